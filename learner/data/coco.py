"""COCO and LVIS files: what is read of them, and samples to and from them.

read_coco       annotations as people publish them -> `CocoFile`, or all that is wrong with it;
                names of categories become Unicode NFC (RES-20)
to_coco         samples -> boxes and polygons in pixels, as `pycocotools.coco.COCO` reads them
to_lvis         the same with the lists of LVIS
convert         COCO instances -> records of a data file; what cannot be taken over as it is falls
                under a counted `Rule`
write_records   publishes those records

`learner.data.yolo` and `learner.data.voc` read other formats into a `CocoFile`, too.
"""

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from learner.data.images import Look, UnreadableImage, Watch, look_at_all, look_at_header
from learner.data.jsonl import (
    REPEATED_KEY,
    BadLine,
    CoversAPixel,
    DataProblem,
    bounding_box,
    brief,
    capped,
    is_description,
    strict_json,
)
from learner.runs.atomic_files import publish_text
from learner.stages.coords import decode_bin, encode_bin
from learner.types import GeometryKind, GroundTruthObject, Sample, Shape, normalized
from shared_contracts.errors import ContractError
from shared_contracts.strict_model import contract_errors

Id = int | str
_COCO_JSON = "Name a JSON file of COCO instances."


class _Part(BaseModel):
    """Keys that are not needed here are left unread."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class CocoImage(_Part):
    """The lists of categories are those of LVIS: none of it is there; some are not annotated."""

    id: Id
    file_name: str = Field(min_length=1)
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
    images: tuple[CocoImage, ...]
    annotations: tuple[CocoAnnotation, ...]
    categories: tuple[CocoCategory, ...]


def read_coco(path: Path, *, lvis: bool = False) -> CocoFile:
    """Read a file of COCO instances.

    lvis: an image without a `file_name` has the last two parts of its `coco_url` for one.

    Raises ContractErrors for what is no such file: each value of a wrong type, ids given twice,
    and names of categories that no description can be.
    """
    document = _load(path)
    if lvis:
        _name_images_by_url(document)
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
    return coco


def _load(path: Path) -> Any:
    if not path.is_file():
        found = "this is not a file" if path.exists() else "there is no such file"
        raise ContractError(str(path), found, _COCO_JSON)
    try:
        return strict_json(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        found, do = f"it cannot be read ({error.strerror})", "Make it readable."
    except UnicodeDecodeError as error:
        found, do = f"not JSON ({error})", _COCO_JSON
    except BadLine as bad:
        found, do = bad.found, bad.do if bad.kind == REPEATED_KEY else _COCO_JSON
    raise ContractError(str(path), found, do)


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
    samples: Sequence[Sample], image_root: Path, more_names: Iterable[str] = ()
) -> dict[str, Any]:
    """COCO detection ground truth of samples with one image each.

    more_names: of categories that no object has.

    Ids count from 1; image i is sample i - 1. Categories are the descriptions, sorted.
    `bbox` is x, y, width, height in pixels (k/999 times the image side), of a polygon those
    of the box around it; a polygon has a `segmentation`, and its own area. File names are
    relative to `image_root` where the image lies under it.
    """
    descriptions = sorted({*more_names, *(o.desc for s in samples for o in s.objects)})
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


# Of `metadata`, and of LVIS: the categories whose absence was verified in an image, and those of
# which not every object was annotated.
LVIS_LISTS = {
    "neg_categories": "neg_category_ids",
    "not_exhaustive_categories": "not_exhaustive_category_ids",
}
# LVIS's classes of frequency: up to so many images.
_RARE, _COMMON = 10, 100


def lvis_faults(samples: Iterable[Sample]) -> Iterator[DataProblem]:
    """Lists in `metadata` that name no categories."""
    for sample in samples:
        for key in LVIS_LISTS:
            names = sample.metadata.get(key, [])
            if not isinstance(names, list) or not all(is_description(name) for name in names):
                yield DataProblem(
                    "metadata",
                    sample.sample_id,
                    f"metadata.{key} is {brief(names)}",
                    "Make it a list of descriptions, or leave it out.",
                )


def to_lvis(samples: Sequence[Sample], image_root: Path) -> dict[str, Any]:
    """Like `to_coco`, with what LVIS's evaluation reads in addition.

    The lists of an image are those of its `metadata`. Without `neg_categories`, the image is taken
    as annotated with every category: all that it does not show are negative. How frequent a
    category is follows from the images of this file.
    """
    listed = [
        {key: [normalized(name) for name in s.metadata.get(key, [])] for key in LVIS_LISTS}
        for s in samples
    ]
    more_names = (name for lists in listed for names in lists.values() for name in names)
    lvis = to_coco(samples, image_root, more_names)
    ids = {category["name"]: category["id"] for category in lvis["categories"]}
    instances, images = Counter[str](), Counter[str]()
    for image, sample, lists in zip(lvis["images"], samples, listed, strict=True):
        shown = Counter(o.desc for o in sample.objects)
        instances += shown
        images.update(shown.keys())
        if "neg_categories" not in sample.metadata:
            partly = lists["not_exhaustive_categories"]
            lists["neg_categories"] = [n for n in ids if n not in shown and n not in partly]
        for key, names in lists.items():
            image[LVIS_LISTS[key]] = [ids[name] for name in names]
    for annotation in lvis["annotations"]:
        del annotation["iscrowd"]
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


class Rule(Enum):
    """Which images or annotations, and what becomes of them.

    An annotation falls under one of the rules that leave it out, or becomes an object.
    """

    MISSING_IMAGE = "images without a file", "left out"
    UNREADABLE_IMAGE = "images that cannot be decoded", "left out"
    OTHER_SIZE = "images of another size than annotated", "left out"
    REORIENTED = "images that EXIF turns or mirrors", "taken as upright"
    SKIPPED_IMAGE = "images that show no object", "left out"
    EMPTY_IMAGE = "images that show no object", "kept"
    ALL_LEFT_OUT = "images whose annotations were all left out", "left out"
    UNKNOWN_IMAGE = "annotations of an image that is not listed", "left out"
    OF_IMAGE_LEFT_OUT = "annotations of an image left out", "left out"
    CROWD = "annotations of a crowd", "left out"
    UNKNOWN_CATEGORY = "annotations of a category that is not listed", "left out"
    NO_AREA = "annotations of no area", "left out"
    OUTSIDE = "annotations outside of the image", "left out"
    THIN = "annotations too thin to match", "left out"
    DUPLICATE = "annotations like another in every bin", "left out"
    CLIPPED = "annotations partly outside of the image", "clipped"
    NO_SEGMENTATION = "annotations without a polygon", "box taken"
    RUN_LENGTH = "annotations with a run-length mask", "box taken"
    SEVERAL_POLYGONS = "annotations of several polygons", "box taken"
    BAD_POLYGON = "annotations whose polygon is no list of points", "box taken"
    THIN_POLYGON = "annotations whose polygon is too thin to match", "box taken"

    @property
    def what(self) -> str:
        return self.value[0]

    @property
    def done(self) -> str:
        return self.value[1]


class LeftOut(NamedTuple):
    """An annotation that became no object, and why. image: its file name, where it is listed."""

    annotation: CocoAnnotation
    image: str | None
    rule: Rule


@dataclass
class Conversion:
    """records: lines of the data file. first: what each rule was first applied to."""

    records: list[dict[str, Any]] = field(default_factory=list)
    counts: Counter[Rule] = field(default_factory=Counter)
    first: dict[Rule, str] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)

    @property
    def objects(self) -> int:
        return sum(len(record["objects"]) for record in self.records)

    def note(self, rule: Rule, about: str, times: int = 1) -> None:
        if times:
            self.counts[rule] += times
            self.first.setdefault(rule, about)


# Boxes that stick out of their image by fewer pixels were only rounded.
_ROUNDING = 0.01
# Of a float; whole numbers in JSON may be larger.
_LARGEST = sys.float_info.max


def name_of(annotation: CocoAnnotation) -> str:
    """As a table names it."""
    if annotation.id is None:
        return f"annotation of image {annotation.image_id}"
    return f"annotation {annotation.id}"


def object_of(
    annotation: CocoAnnotation,
    image: CocoImage,
    names: dict[Id, str],
    geometry: GeometryKind,
    covers_a_pixel: CoversAPixel,
) -> tuple[GroundTruthObject | None, list[Rule]]:
    """The object of an annotation and how it was changed, or None and why there is none.

    names: of the categories, by id.
    geometry: `poly` takes an annotation's polygon where it has exactly one, else its box.
    """
    rules: list[Rule] = []
    found: GroundTruthObject | None = None
    if annotation.iscrowd:
        rules.append(Rule.CROWD)
    elif annotation.category_id not in names:
        rules.append(Rule.UNKNOWN_CATEGORY)
    else:
        shape = (
            _polygon(annotation.segmentation, image, covers_a_pixel, rules)
            if geometry == "poly"
            else None
        )
        shape = shape or _box(annotation.bbox, image, covers_a_pixel, rules)
        if shape is not None:
            found = GroundTruthObject(names[annotation.category_id], shape)
    if found is None:
        rules = rules[-1:]
    return found, rules


def _box(
    bbox: tuple[float, float, float, float],
    image: CocoImage,
    covers_a_pixel: CoversAPixel,
    rules: list[Rule],
) -> Shape | None:
    x, y, width, height = bbox
    if width <= 0 or height <= 0:
        rules.append(Rule.NO_AREA)
        return None
    if x >= image.width or y >= image.height or x + width <= 0 or y + height <= 0:
        rules.append(Rule.OUTSIDE)
        return None
    points = [(x, y), (x + width, y + height)]
    shape = Shape("bbox_2d", tuple(k for point in points for k in _bins(point, image)))
    if not covers_a_pixel(shape):
        rules.append(Rule.THIN)
        return None
    _note_clipping(points, image, rules)
    return shape


def _polygon(
    segmentation: Any, image: CocoImage, covers_a_pixel: CoversAPixel, rules: list[Rule]
) -> Shape | None:
    if not segmentation:
        rules.append(Rule.NO_SEGMENTATION)
    elif isinstance(segmentation, dict):
        rules.append(Rule.RUN_LENGTH)
    elif not isinstance(segmentation, list) or not all(map(_is_polygon, segmentation)):
        rules.append(Rule.BAD_POLYGON)
    elif len(segmentation) > 1:
        rules.append(Rule.SEVERAL_POLYGONS)
    else:
        (flat,) = segmentation
        points = list(zip(flat[0::2], flat[1::2], strict=True))
        return _one_polygon(points, image, covers_a_pixel, rules)
    return None


def _one_polygon(
    points: list[tuple[float, float]],
    image: CocoImage,
    covers_a_pixel: CoversAPixel,
    rules: list[Rule],
) -> Shape | None:
    """Points outside of the image move to its nearest edge; repeated ones are one."""
    bins = [_bins(point, image) for point in points]
    corners = [point for i, point in enumerate(bins) if point != bins[i - 1]]
    shape = Shape("poly", tuple(k for point in corners for k in point))
    if len(corners) < 3 or not covers_a_pixel(shape):
        rules.append(Rule.THIN_POLYGON)
        return None
    _note_clipping(points, image, rules)
    return shape


def _is_polygon(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) >= 6
        and len(value) % 2 == 0
        and all(type(v) in (int, float) and abs(v) <= _LARGEST for v in value)
    )


def _bins(point: tuple[float, float], image: CocoImage) -> tuple[int, int]:
    x, y = _inside(point, image)
    return encode_bin(x / image.width), encode_bin(y / image.height)


def _inside(point: tuple[float, float], image: CocoImage) -> tuple[float, float]:
    return min(max(point[0], 0), image.width), min(max(point[1], 0), image.height)


def _note_clipping(points: list[tuple[float, float]], image: CocoImage, rules: list[Rule]) -> None:
    moved = (abs(a - b) for p in points for a, b in zip(p, _inside(p, image), strict=True))
    if max(moved) > _ROUNDING:
        rules.append(Rule.CLIPPED)


Order = Literal["file", "left-to-right", "top-to-bottom"]


@dataclass(frozen=True)
class Wanted:
    """How to convert.

    images: folder that the file names start at.
    out: the data file, at whose folder its image paths start.
    skip_empty: leave out images without an annotation.
    covers_a_pixel: objects that cover none are left out.
    """

    images: Path
    out: Path
    geometry: GeometryKind
    order: Order
    skip_empty: bool
    covers_a_pixel: CoversAPixel


def convert(coco: CocoFile, wanted: Wanted, watch: Watch) -> Conversion:
    """The records of a COCO file; images come in its order. Only their headers are read."""
    conversion = Conversion()
    names = {category.id: category.name for category in coco.categories}
    of_image = _by_image(coco, conversion)
    paths = [wanted.images.absolute() / image.file_name for image in coco.images]
    looks = watch(look_at_all(paths, look_at_header), len(paths))
    for image, (path, look) in zip(coco.images, looks, strict=True):
        annotations = of_image.get(image.id, [])
        if (fault := _fault(image, path, look)) is not None:
            conversion.note(fault, image.file_name)
            conversion.left_out += [LeftOut(one, image.file_name, fault) for one in annotations]
            conversion.note(Rule.OF_IMAGE_LEFT_OUT, image.file_name, len(annotations))
            continue
        if isinstance(look, Look) and look.reoriented:
            conversion.note(Rule.REORIENTED, image.file_name)
        objects = _objects(image, annotations, names, wanted, conversion)
        if annotations and not objects:  # what it shows is not nothing
            conversion.note(Rule.ALL_LEFT_OUT, image.file_name)
            continue
        if not objects:
            empty = Rule.SKIPPED_IMAGE if wanted.skip_empty else Rule.EMPTY_IMAGE
            conversion.note(empty, image.file_name)
        if wanted.order != "file":
            axes = (0, 1) if wanted.order == "left-to-right" else (1, 0)
            boxes = {item: bounding_box(item.shape) for item in objects}
            objects.sort(key=lambda item: tuple(boxes[item][axis] for axis in axes))
        if objects or not wanted.skip_empty:
            conversion.records.append(_record(image, path, objects, names, wanted))
    return conversion


def write_records(conversion: Conversion, annotations: int, out: Path) -> None:
    """Publish a data file, whole or not at all.

    annotations: how many there were. Raises ContractError when no image is left, or no object
        came of them.
    """
    records = conversion.records
    if not records:
        raise ContractError(
            str(out), "no image is left to write", "See in the table why each was left out."
        )
    if annotations and not conversion.objects:
        raise ContractError(
            str(out),
            f"no object came of {annotations} annotations",
            "See in the table why each was left out; ids of images and categories must be equal, "
            'and "1" is not 1.',
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    publish_text(out, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))


def write_left_out(conversion: Conversion, source: Path, out: Path) -> None:
    """Publish a JSON line for each annotation of the file `source` that became no object."""
    lines = (
        {
            "file": str(source),
            "annotation_id": annotation.id,
            "image_id": annotation.image_id,
            "image": image,
            "bbox": annotation.bbox,
            "reason": rule.what,
        }
        for annotation, image, rule in conversion.left_out
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    publish_text(out, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _by_image(coco: CocoFile, conversion: Conversion) -> dict[Id, list[CocoAnnotation]]:
    listed = {image.id for image in coco.images}
    of_image: dict[Id, list[CocoAnnotation]] = defaultdict(list)
    for annotation in coco.annotations:
        if annotation.image_id in listed:
            of_image[annotation.image_id].append(annotation)
        else:
            conversion.note(Rule.UNKNOWN_IMAGE, name_of(annotation))
            conversion.left_out.append(LeftOut(annotation, None, Rule.UNKNOWN_IMAGE))
    return of_image


def _fault(image: CocoImage, path: Path, look: Look | UnreadableImage) -> Rule | None:
    """Why an image is left out, None where it is not."""
    if not os.path.isfile(path):
        return Rule.MISSING_IMAGE
    if isinstance(look, UnreadableImage):
        return Rule.UNREADABLE_IMAGE
    return None if look.size == (image.width, image.height) else Rule.OTHER_SIZE


def _objects(
    image: CocoImage,
    annotations: Sequence[CocoAnnotation],
    names: dict[Id, str],
    wanted: Wanted,
    conversion: Conversion,
) -> list[GroundTruthObject]:
    found: dict[GroundTruthObject, None] = {}
    for annotation in annotations:
        item, rules = object_of(annotation, image, names, wanted.geometry, wanted.covers_a_pixel)
        if item in found:
            item, rules = None, [Rule.DUPLICATE]
        if item is None:
            conversion.left_out.append(LeftOut(annotation, image.file_name, rules[0]))
        else:
            found[item] = None
        for rule in rules:
            conversion.note(rule, name_of(annotation))
    return list(found)


def _record(
    image: CocoImage,
    path: Path,
    objects: Sequence[GroundTruthObject],
    names: dict[Id, str],
    wanted: Wanted,
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"image_id": image.id}
    for key, ids in LVIS_LISTS.items():
        if (listed := getattr(image, ids)) is not None:
            metadata[key] = [names[one] for one in listed]
    # `..` leads out of the folder where a link points, so both are resolved; the image itself
    # keeps its name.
    folder, out = path.parent.resolve(), wanted.out.parent.resolve()
    return {
        "images": [os.path.relpath(folder / path.name, out)],
        "width": image.width,
        "height": image.height,
        "objects": [{"desc": o.desc, o.shape.kind: list(o.shape.coords)} for o in objects],
        "metadata": metadata,
    }
