"""Reader and writers of COCO and LVIS files."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from learner.data.files import parse_json, read_text
from learner.data.jsonl import bounding_box, is_description, is_side
from learner.data.records import (
    Account,
    Annotation,
    Id,
    Rule,
    Source,
    SourceImage,
    bounding_xywh,
    is_number,
)
from learner.stages.tokens import decode_bin
from learner.types import NEG_CATEGORIES, NOT_EXHAUSTIVE_CATEGORIES, Sample, Shape, normalized
from shared_contracts.errors import ContractError
from shared_contracts.strict_model import shown

_COCO_JSON = "Name a JSON file of COCO instances."
# Key of `metadata` -> key of an LVIS image.
LVIS_LISTS = {
    NEG_CATEGORIES: "neg_category_ids",
    NOT_EXHAUSTIVE_CATEGORIES: "not_exhaustive_category_ids",
}


def read_coco(path: Path, folder: Path | None) -> Source:
    """Read a file of COCO or LVIS instances. folder: base of its image names; None: it is found.

    An annotation without a box gets the bounding box of its polygons or mask.

    Raises ContractError for another kind of file, for repeated ids of images or categories, and
    for unknown category ids in LVIS lists.
    """
    images, annotations, categories = _sections(path)
    names = {id: each.get("name") for each in categories if (id := _id(each)) is not None}
    account, ids, of_image = Account(), set[Any](), dict[Any, SourceImage]()
    for image in images:
        picture = _picture(str(path), image, names)
        if picture is None:
            account.note(Rule.BAD_IMAGE, shown(image))
        else:
            of_image[picture.id] = picture
    for annotation in annotations:
        one = _annotation(annotation, names)
        if one.id is not None:
            account.note(Rule.REPEATED_ID, one, one.id in ids)
            ids.add(one.id)
        account.note(Rule.NO_BOX, one, one.fault is None and not annotation.get("bbox"))
        if one.image_id in of_image:
            of_image[one.image_id].annotations.append(one)
        else:
            unusable = one.fault is Rule.UNUSABLE
            account.leave_out(one, None, Rule.UNUSABLE if unusable else Rule.UNKNOWN_IMAGE)
    found = list(of_image.values())
    return Source(folder or _folder_of(path, found), found, account, ("pixels", "xywh"))


def _folder_of(path: Path, pictures: Sequence[SourceImage]) -> Path:
    """Return the folder of the file, or, if no image is there, the one of COCO's own layout:
    `annotations/instances_NAME.json` is beside the folder NAME. LVIS names NAME in its images.
    """
    above = path.absolute().parent.parent
    for folder in (path.parent, above / path.stem.removeprefix("instances_"), above):
        if any(os.path.isfile(folder / picture.name) for picture in pictures):
            return folder
    return path.parent


def _sections(path: Path) -> list[list[dict[str, Any]]]:
    """Return the images, annotations and categories; entries that are no mapping become empty."""
    document = parse_json(read_text(path, _COCO_JSON), str(path), _COCO_JSON)
    sections = document if isinstance(document, dict) else {}
    lists = [sections.get(key) for key in ("images", "annotations", "categories")]
    mappings = [
        [one if isinstance(one, dict) else {} for one in each]
        for each in lists
        if isinstance(each, list)
    ]
    found = ""
    if isinstance(document, list):
        found = "it is a list, as a file of results, which has no images and no names"
    elif len(mappings) < len(lists):
        found = "it has no lists of images, annotations and categories"
    elif any("segments_info" in first for first in mappings[1][:1]):
        found = "it is a panoptic file: its objects are in PNG files"
    if found:
        raise ContractError(str(path), found, _COCO_JSON)
    for key, section in (("images", mappings[0]), ("categories", mappings[2])):
        ids = Counter(map(_id, section))
        if repeated := [each for each, times in ids.items() if each is not None and times > 1]:
            found = f"ids given twice: {shown(repeated)}"
            raise ContractError(f"{path}: {key}", found, "Give each an id of its own.")
    return mappings


def _id(record: dict[str, Any], key: str = "id") -> Id | None:
    value = record.get(key)
    return value if isinstance(value, int | str) else None


def _picture(where: str, image: dict[str, Any], names: dict[Any, Any]) -> SourceImage | None:
    """Return a picture; without `file_name` (LVIS), folder and file come from `coco_url`."""
    name, id = image.get("file_name"), _id(image)
    if name is None and isinstance(url := image.get("coco_url"), str):
        name = "/".join(url.rsplit("/", 2)[1:])
    if id is None or not isinstance(name, str) or not name:
        return None
    width, height = image.get("width", 0), image.get("height", 0)
    size = (width, height) if is_side(width) and is_side(height) else None
    picture = SourceImage(id, name.replace("\\", "/"), size)
    for key, of_ids in LVIS_LISTS.items():
        if not isinstance(ids := image.get(of_ids), list):
            continue
        if unknown := [i for i in ids if not isinstance(i, int | str) or i not in names]:
            found = f"{shown(unknown)} are ids of no category"
            do = "Remove them, or list the categories."
            raise ContractError(f"{where}: {of_ids} of image {id}", found, do)
        named = (names[each] for each in ids)
        picture.metadata[key] = [normalized(name) for name in named if is_description(name)]
    return picture


def _annotation(record: dict[str, Any], names: dict[Any, Any]) -> Annotation:
    category_id, box = _id(record, "category_id"), record.get("bbox")
    fault = Rule.CROWD if record.get("iscrowd") in (1, "1") else None
    if fault is None and category_id not in names:
        fault = Rule.UNKNOWN_CATEGORY
    segmentation: Any = record.get("segmentation")
    listed = isinstance(segmentation, list) and all(map(_is_polygon, segmentation))
    polygons, stated = segmentation if listed else [], dict[str, str]()
    if not box and polygons:
        box, stated = bounding_xywh([n for each in polygons for n in each]), {"corners": "xywh"}
    elif not box and isinstance(segmentation, dict):
        box, stated = _box_of_mask(segmentation), {"scale": "pixels", "corners": "xywh"}
    return Annotation.read(
        _id(record),
        _id(record, "image_id"),
        names.get(category_id),
        box,
        fault,
        polygon=polygons[0] if len(polygons) == 1 else None,
        **stated,
    )


def _box_of_mask(rle: dict[str, Any]) -> list[float] | None:
    """Return x, y, width, height in pixels of a run-length mask; None for another value."""
    from pycocotools import mask

    counts, size = rle.get("counts"), rle.get("size")
    if not (isinstance(size, list) and len(size) == 2 and all(map(is_side, size))):
        return None
    height, width = size
    if isinstance(counts, list):  # not compressed
        if any(type(n) is not int or n < 0 for n in counts) or sum(counts) != height * width:
            return None
        rle = mask.frPyObjects(rle, height, width)
    elif not (isinstance(counts, str) and counts.isascii()):
        return None
    return [float(number) for number in mask.toBbox(rle)]


def _is_polygon(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) >= 6
        and len(value) % 2 == 0
        and all(map(is_number, value))
    )


def image_name(image: Path, root: Path) -> str:
    """Return the image path, relative to `root` if the image is below it."""
    root = root.absolute()
    return str(image.relative_to(root) if image.is_relative_to(root) else image)


def json_text(document: dict[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def to_coco(
    samples: Sequence[Sample],
    image_root: Path,
    *,
    listed: Iterable[str] = (),
    behind: Iterable[str] = (),
) -> dict[str, Any]:
    """Return COCO detection ground truth of samples with one image each.

    listed: more categories, sorted among the descriptions. behind: categories after all others.

    Ids count from 1; image i is sample i - 1. Categories are the sorted descriptions.
    `bbox` is x, y, width, height in pixels (k/999 times the image side). A polygon has its
    bounding box as `bbox`, its points as `segmentation`, and its own area. File names are relative
    to `image_root` for images below it.
    """
    descriptions = sorted({*listed, *(o.desc for s in samples for o in s.objects)})
    descriptions += sorted({*behind}.difference(descriptions))
    category_ids = {desc: i for i, desc in enumerate(descriptions, start=1)}
    images, annotations, numbers = list[Any](), list[Any](), count(1)
    for image_id, sample in enumerate(samples, start=1):
        sides = {"width": sample.width, "height": sample.height}
        names = [image_name(image, image_root) for image in sample.images[:1]]
        images += [{"id": image_id, "file_name": name, **sides} for name in names]
        for o in sample.objects:
            ids = {"id": next(numbers), "image_id": image_id, "category_id": category_ids[o.desc]}
            annotations.append({**ids, **_geometry(o.shape, **sides), "iscrowd": 0})
    return {
        "info": {"description": "Rollmatch export"},
        "images": images,
        "annotations": annotations,
        "categories": [{"id": i, "name": desc} for desc, i in category_ids.items()],
    }


# Largest numbers of images of LVIS's frequency classes "r" and "c".
_RARE, _COMMON = 10, 100


def to_lvis(
    samples: Sequence[Sample], image_root: Path, *, behind: Iterable[str] = ()
) -> dict[str, Any]:
    """Return `to_coco`'s document with the additional keys of LVIS's evaluation.

    The lists of an image come from its `metadata`. Without `neg_categories`, all categories that
    the image does not show are negative. Frequencies count the images of this file.
    """
    listed = (name for s in samples for names in s.category_lists.values() for name in names)
    lvis = to_coco(samples, image_root, listed=listed, behind=behind)
    ids = {category["name"]: category["id"] for category in lvis["categories"]}
    instances, images = Counter[str](), Counter[str]()
    for image, sample in zip(lvis["images"], samples, strict=True):
        present = Counter(o.desc for o in sample.objects)
        instances += present
        images.update(present.keys())
        partly = sample.category_lists.get(NOT_EXHAUSTIVE_CATEGORIES, [])
        absent = [name for name in ids if name not in present and name not in partly]
        lists = {NEG_CATEGORIES: absent, NOT_EXHAUSTIVE_CATEGORIES: partly, **sample.category_lists}
        for key, names in lists.items():
            image[LVIS_LISTS[key]] = [ids[name] for name in names]
    for category in lvis["categories"]:
        number = images[category["name"]]
        category["image_count"], category["instance_count"] = number, instances[category["name"]]
        category["frequency"] = "r" if number <= _RARE else "c" if number <= _COMMON else "f"
    return lvis


def _geometry(shape: Shape, width: int, height: int) -> dict[str, Any]:
    box = pixel_xywh(shape, width, height)
    if shape.kind == "bbox_2d":
        return {"bbox": box, "area": box[2] * box[3]}
    sides = (width, height) * (len(shape.coords) // 2)
    flat = [decode_bin(k) * side for k, side in zip(shape.coords, sides, strict=True)]
    xs, ys = flat[0::2], flat[1::2]  # the shoelace formula
    doubled = sum(xs[i - 1] * ys[i] - xs[i] * ys[i - 1] for i in range(len(xs)))
    return {"segmentation": [flat], "bbox": box, "area": abs(doubled) / 2}


def pixel_area(shape: Shape, width: int, height: int) -> float:
    """Return `to_coco`'s area of a norm1000 shape, in square pixels."""
    area: float = _geometry(shape, width, height)["area"]
    return area


def pixel_xywh(shape: Shape, width: int, height: int) -> list[float]:
    """Return x, y, width, height in pixels of the bounding box of a norm1000 shape."""
    x1, y1, x2, y2 = (decode_bin(k) for k in bounding_box(shape))
    return [x1 * width, y1 * height, (x2 - x1) * width, (y2 - y1) * height]
