"""COCO and LVIS files: what is read of them, and what is written.

read_coco    annotations as people publish them -> `CocoFile`, or all that is wrong with it;
             names of categories become Unicode NFC (RES-20)
to_coco      samples -> boxes and polygons in pixels, as `pycocotools.coco.COCO` reads them
to_lvis      the same with the lists of LVIS

`learner.data.conversion` makes a data file of a `CocoFile`.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from learner.data.account import Account, LeftOut, Rule
from learner.data.jsonl import (
    MAX_SIDE,
    REPEATED_KEY,
    BadLine,
    bounding_box,
    brief,
    capped,
    is_description,
    strict_json,
)
from learner.runs.atomic_files import publish_text
from learner.stages.coords import decode_bin
from learner.types import (
    NEG_CATEGORIES,
    NOT_EXHAUSTIVE_CATEGORIES,
    Sample,
    Shape,
    normalized,
)
from shared_contracts.errors import ContractError
from shared_contracts.strict_model import contract_errors

Id = int | str
_COCO_JSON = "Name a JSON file of COCO instances."


class _Part(BaseModel):
    """Keys that are not needed here are left unread."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


def _with_slashes(path: str) -> str:
    return path.replace("\\", "/")


class CocoImage(_Part):
    """The lists of categories are those of LVIS: none of it is there; some are not annotated."""

    id: Id
    file_name: Annotated[str, AfterValidator(_with_slashes)] = Field(min_length=1)
    width: int = Field(gt=0)
    height: int = Field(gt=0)
    neg_category_ids: tuple[Id, ...] | None = None
    not_exhaustive_category_ids: tuple[Id, ...] | None = None


class CocoAnnotation(_Part):
    """bbox: x, y, width, height in pixels. segmentation: polygons, a run-length code, or none."""

    id: Id | None = None
    image_id: Id
    category_id: Id
    bbox: tuple[float, float, float, float]
    iscrowd: bool = False
    segmentation: Any = None


class CocoCategory(_Part):
    id: Id
    name: Annotated[str, AfterValidator(normalized)]


class CocoFile(_Part):
    """The intermediate record of every conversion.

    account: what the reader changed or left out. evidence: how it read boxes whose scale the
    format does not say.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    images: tuple[CocoImage, ...]
    annotations: tuple[CocoAnnotation, ...]
    categories: tuple[CocoCategory, ...]
    account: Account = Field(default_factory=Account)
    evidence: str = ""


def name_of(annotation: CocoAnnotation) -> str:
    """As a table names it."""
    if annotation.id is None:
        return f"annotation of image {annotation.image_id}"
    return f"annotation {annotation.id}"


def read_coco(path: Path, *, lvis: bool = False) -> CocoFile:
    """Read a file of COCO instances.

    lvis: an image without a `file_name` has the last two parts of its `coco_url` for one.

    An annotation that cannot be used is left out. One without a box gets that of its polygons or
    mask. Image records of one file are put together.

    Raises ContractErrors for what is no such file: each value of a wrong type, ids of images and
    categories given twice, and names of categories that no description can be.
    """
    document, account = _load(path), Account()
    if lvis:
        _name_images_by_url(document)
    if isinstance(document, dict) and isinstance(listed := document.get("annotations"), list):
        usable = [each for raw in listed if (each := _annotation(raw, account)) is not None]
        document = document | {"annotations": usable}
    try:
        coco = CocoFile.model_validate(document)
    except ValidationError as error:
        raise capped(
            str(path),
            [
                ContractError(f"{path}: {e.where}" if e.where else str(path), e.found, e.do)
                for e in contract_errors(error, CocoFile)
            ],
        ) from None
    if errors := list(_faults(path, coco)):
        raise capped(str(path), errors)
    return _put_together(coco, account)


def _annotation(raw: Any, account: Account) -> CocoAnnotation | None:
    """The annotation, with the box of its segmentation if it has none; None if it is unusable."""
    given = raw if isinstance(raw, dict) else {"bbox": brief(raw)}
    about = f"annotation {brief(given.get('id') if given is raw else raw)}"
    boxed = given.get("bbox") or _box_of(given.get("segmentation"))
    try:
        annotation = CocoAnnotation.model_validate(given | {"bbox": boxed})
    except ValidationError as error:
        wrong = error.errors()[0]
        found = f"{about}: {'.'.join(map(str, wrong['loc']))} {brief(wrong['input'])}"
        account.note(Rule.UNUSABLE, found)
        left = LeftOut(given.get("id"), given.get("image_id"), None, boxed, Rule.UNUSABLE)
        account.left_out.append(left)
        return None
    account.note(Rule.NO_BOX, about, not given.get("bbox"))
    return annotation


def _box_of(segmentation: Any) -> list[float] | None:
    """x, y, width, height of polygons or of a run-length mask; None if it is neither."""
    if isinstance(segmentation, list) and segmentation and all(map(is_polygon, segmentation)):
        xs = [x for polygon in segmentation for x in polygon[0::2]]
        ys = [y for polygon in segmentation for y in polygon[1::2]]
        return [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]
    if not isinstance(segmentation, dict):
        return None
    from pycocotools import mask

    counts, size = segmentation.get("counts"), segmentation.get("size")
    if not (isinstance(size, list) and [type(side) for side in size] == [int, int]):
        return None
    height, width = size
    if not (0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE):
        return None
    if isinstance(counts, list):  # not compressed
        if any(type(n) is not int or n < 0 for n in counts) or sum(counts) != height * width:
            return None
        segmentation = mask.frPyObjects(segmentation, height, width)
    elif not (isinstance(counts, str) and counts.isascii()):
        return None
    return [float(number) for number in mask.toBbox(segmentation)]


def is_polygon(value: Any) -> bool:
    """Whether a value is a list of three points or more, as numbers of a float's range."""
    return (
        isinstance(value, list)
        and len(value) >= 6
        and len(value) % 2 == 0
        and all(type(v) in (int, float) and abs(v) <= sys.float_info.max for v in value)
    )


def _put_together(coco: CocoFile, account: Account) -> CocoFile:
    """Give the annotations of several records of one image, of one size, to the first of them."""
    first, of_image, ids = dict[Any, CocoImage](), dict[Id, Id](), set[Id]()
    for image in coco.images:
        key = (os.path.normpath(image.file_name), image.width, image.height)
        of_image[image.id] = first.setdefault(key, image).id
        account.note(Rule.REPEATED_IMAGE, image.file_name, of_image[image.id] != image.id)
    annotations = []
    for one in coco.annotations:
        account.note(Rule.REPEATED_ID, name_of(one), one.id in ids)
        ids |= set() if one.id is None else {one.id}
        image_id = of_image.get(one.image_id, one.image_id)
        annotations.append(
            one if image_id == one.image_id else one.model_copy(update={"image_id": image_id})
        )
    return coco.model_copy(
        update={
            "images": tuple(first.values()),
            "annotations": tuple(annotations),
            "account": account,
        }
    )


def _load(path: Path) -> Any:
    if not path.is_file():
        found = "this is not a file" if path.exists() else "there is no such file"
        raise ContractError(str(path), found, _COCO_JSON)
    try:
        document = strict_json(path.read_text(encoding="utf-8-sig"), allow_nan=True)
    except OSError as error:
        found, do = f"it cannot be read ({error.strerror})", "Make it readable."
    except UnicodeDecodeError as error:
        found, do = f"not JSON ({error})", _COCO_JSON
    except BadLine as bad:
        found, do = bad.found, bad.do if bad.kind == REPEATED_KEY else _COCO_JSON
    else:
        if (other := _other_file(document)) is None:
            return document
        found, do = other, _COCO_JSON
    raise ContractError(str(path), found, do)


def _other_file(document: Any) -> str | None:
    """What else of COCO a file is than instances, if it is."""
    listed = document.get("annotations") if isinstance(document, dict) else document
    first = listed[0] if isinstance(listed, list) and listed else None
    if isinstance(first, dict) and "segments_info" in first:
        return "it is a panoptic file: its objects are in PNG files"
    if isinstance(document, list) and isinstance(first, dict) and "category_id" in first:
        return "it is a file of results, which has no images and no names"
    return None


def _name_images_by_url(document: Any) -> None:
    images = document.get("images") if isinstance(document, dict) else None
    for image in images if isinstance(images, list) else []:
        if isinstance(image, dict) and isinstance(url := image.get("coco_url"), str):
            image.setdefault("file_name", "/".join(url.rsplit("/", 2)[1:]))


def _faults(path: Path, coco: CocoFile) -> Iterator[ContractError]:
    yield from _repeated(path, "images", [image.id for image in coco.images])
    yield from _repeated(path, "categories", [category.id for category in coco.categories])
    for index, category in enumerate(coco.categories):
        if not is_description(category.name):
            yield ContractError(
                f"{path}: categories[{index}].name",
                f"{category.name!r} cannot be the description of an object",
                "Give a name in Unicode text, not blank, without special tokens like <|im_end|>.",
            )
    listed = {category.id for category in coco.categories}
    for index, image in enumerate(coco.images):
        for key in ("neg_category_ids", "not_exhaustive_category_ids"):
            for one in getattr(image, key) or ():
                if one not in listed:
                    yield ContractError(
                        f"{path}: images[{index}].{key}",
                        f"{one} is the id of no category",
                        "Remove it, or list the category.",
                    )


def _repeated(path: Path, section: str, ids: Sequence[Id]) -> Iterator[ContractError]:
    first: dict[Id, int] = {}
    for index, one in enumerate(ids):
        before = first.setdefault(one, index)
        if before != index:
            yield ContractError(
                f"{path}: {section}[{index}].id",
                f"{one} is the id of {section}[{before}] too",
                "Give each an id of its own.",
            )


def write_document(document: dict[str, Any], path: Path) -> None:
    """Publish what `to_coco` or `to_lvis` made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    publish_text(path, json.dumps(document, ensure_ascii=False, indent=1) + "\n")


def to_coco(
    samples: Sequence[Sample],
    image_root: Path,
    *,
    listed: Iterable[str] = (),
    behind: Iterable[str] = (),
) -> dict[str, Any]:
    """COCO detection ground truth of samples with one image each.

    listed, behind: more categories, which have their places among the others or behind them.

    Ids count from 1; image i is sample i - 1. Categories are the descriptions, sorted.
    `bbox` is x, y, width, height in pixels (k/999 times the image side), of a polygon those
    of the box around it; a polygon has a `segmentation`, and its own area. File names are
    relative to `image_root` where the image lies under it.
    """
    descriptions = sorted({*listed, *(o.desc for s in samples for o in s.objects)})
    descriptions += sorted({*behind}.difference(descriptions))
    category_ids = {desc: i for i, desc in enumerate(descriptions, start=1)}
    annotations: list[dict[str, Any]] = []
    root = image_root.absolute()
    for image_id, sample in enumerate(samples, start=1):
        for o in sample.objects:
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "category_id": category_ids[o.desc],
                    **_geometry(o.shape, sample.width, sample.height),
                    "iscrowd": 0,
                }
            )
    return {
        "info": {"description": "Rollmatch export"},
        "images": [
            {
                "id": image_id,
                "file_name": str(image.relative_to(root) if image.is_relative_to(root) else image),
                "width": sample.width,
                "height": sample.height,
            }
            for image_id, sample in enumerate(samples, start=1)
            for image in sample.images[:1]
        ],
        "annotations": annotations,
        "categories": [{"id": i, "name": desc} for desc, i in category_ids.items()],
    }


# Keys of LVIS for those of `metadata`.
LVIS_LISTS = {
    NEG_CATEGORIES: "neg_category_ids",
    NOT_EXHAUSTIVE_CATEGORIES: "not_exhaustive_category_ids",
}
# LVIS's classes of frequency: up to so many images.
_RARE, _COMMON = 10, 100


def to_lvis(
    samples: Sequence[Sample], image_root: Path, *, behind: Iterable[str] = ()
) -> dict[str, Any]:
    """Like `to_coco`, with what LVIS's evaluation reads in addition.

    The lists of an image are those of its `metadata`. Without `neg_categories`, the image is taken
    as annotated with every category: all that it does not show are negative. How frequent a
    category is follows from the images of this file.
    """
    lists_of = [
        {key: sample.category_lists.get(key, []) for key in LVIS_LISTS} for sample in samples
    ]
    listed = (name for lists in lists_of for names in lists.values() for name in names)
    lvis = to_coco(samples, image_root, listed=listed, behind=behind)
    ids = {category["name"]: category["id"] for category in lvis["categories"]}
    instances, images = Counter[str](), Counter[str]()
    for image, sample, lists in zip(lvis["images"], samples, lists_of, strict=True):
        shown = Counter(o.desc for o in sample.objects)
        instances += shown
        images.update(shown.keys())
        if NEG_CATEGORIES not in sample.metadata:
            partly = lists[NOT_EXHAUSTIVE_CATEGORIES]
            lists[NEG_CATEGORIES] = [n for n in ids if n not in shown and n not in partly]
        for key, names in lists.items():
            image[LVIS_LISTS[key]] = [ids[name] for name in names]
    for category in lvis["categories"]:
        count = images[category["name"]]
        category["image_count"], category["instance_count"] = count, instances[category["name"]]
        category["frequency"] = "r" if count <= _RARE else "c" if count <= _COMMON else "f"
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
    """Square pixels that a norm1000 shape covers of an image, as `to_coco` has it."""
    area: float = _geometry(shape, width, height)["area"]
    return area


def pixel_xywh(shape: Shape, width: int, height: int) -> list[float]:
    """x, y, width, height in pixels of the box around a norm1000 shape."""
    x1, y1, x2, y2 = (decode_bin(k) for k in bounding_box(shape))
    return [x1 * width, y1 * height, (x2 - x1) * width, (y2 - y1) * height]
