"""COCO files: what is read of them, and the export of samples.

read_coco    annotations as people publish them -> `CocoFile`, or all that is wrong with it
write_coco   samples -> boxes and polygons in pixels, as `pycocotools.coco.COCO` reads them
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from learner.coords import decode_bin
from learner.data.findings import capped
from learner.data.jsonl import is_description
from learner.data.lines import REPEATED_KEY, BadLine, strict_json
from learner.data.shapes import bounding_box
from learner.types import Sample, Shape
from shared_contracts.errors import ContractError
from shared_contracts.strict_model import contract_errors

Id = int | str
_COCO_JSON = "Name a JSON file of COCO instances."


class _Part(BaseModel):
    """Keys that are not needed here are left unread."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class CocoImage(_Part):
    id: Id
    file_name: str = Field(min_length=1)
    width: int = Field(gt=0)
    height: int = Field(gt=0)


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
    name: str


class CocoFile(_Part):
    images: tuple[CocoImage, ...]
    annotations: tuple[CocoAnnotation, ...]
    categories: tuple[CocoCategory, ...]


def read_coco(path: Path) -> CocoFile:
    """Read a file of COCO instances.

    Raises ContractErrors for what is no such file: each value of a wrong type, ids given twice,
    and names of categories that no description can be.
    """
    try:
        coco = CocoFile.model_validate(_load(path))
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


def write_coco(samples: list[Sample], image_root: Path, path: Path) -> None:
    """Write `to_coco(samples, image_root)` to `path`."""
    text = json.dumps(to_coco(samples, image_root), ensure_ascii=False, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def to_coco(samples: list[Sample], image_root: Path) -> dict[str, Any]:
    """COCO detection ground truth of samples with one image each.

    Ids count from 1; image i is sample i - 1. Categories are the descriptions, sorted.
    `bbox` is x, y, width, height in pixels (k/999 times the image side), of a polygon those
    of the box around it; a polygon has a `segmentation`, and its own area. File names are
    relative to `image_root` where the image lies under it.
    """
    descriptions = sorted({o.desc for sample in samples for o in sample.objects})
    category_ids = {desc: i for i, desc in enumerate(descriptions, start=1)}
    annotations: list[dict[str, Any]] = []
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
                "file_name": _file_name(sample.images[0], image_root),
                "width": sample.width,
                "height": sample.height,
            }
            for image_id, sample in enumerate(samples, start=1)
        ],
        "annotations": annotations,
        "categories": [{"id": i, "name": desc} for desc, i in category_ids.items()],
    }


def _geometry(shape: Shape, width: int, height: int) -> dict[str, Any]:
    box = pixel_xywh(shape, width, height)
    if shape.kind == "bbox_2d":
        return {"bbox": box, "area": box[2] * box[3]}
    sides = (width, height) * (len(shape.coords) // 2)
    flat = [decode_bin(k) * side for k, side in zip(shape.coords, sides, strict=True)]
    return {"segmentation": [flat], "bbox": box, "area": _polygon_area(flat)}


def _polygon_area(flat: list[float]) -> float:
    """Of a ring x, y, x, y, ... in the square of its unit (the shoelace formula)."""
    xs, ys = flat[0::2], flat[1::2]
    doubled = sum(xs[i - 1] * ys[i] - xs[i] * ys[i - 1] for i in range(len(xs)))
    return abs(doubled) / 2


def pixel_xywh(shape: Shape, width: int, height: int) -> list[float]:
    """x, y, width, height in pixels of the box around a norm1000 shape."""
    x1, y1, x2, y2 = (decode_bin(k) for k in bounding_box(shape))
    return [x1 * width, y1 * height, (x2 - x1) * width, (y2 - y1) * height]


def _file_name(image: Path, root: Path) -> str:
    """image: absolute."""
    root = root.absolute()
    return str(image.relative_to(root) if image.is_relative_to(root) else image)
