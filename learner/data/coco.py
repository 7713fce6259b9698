"""COCO export of samples: pixel boxes, as `pycocotools.coco.COCO` reads them."""

import json
from pathlib import Path
from typing import Any

from learner.coords import decode_bin
from learner.types import Sample, Shape


def write_coco(samples: list[Sample], image_root: Path, path: Path) -> None:
    """Write `to_coco(samples, image_root)` to `path`."""
    text = json.dumps(to_coco(samples, image_root), ensure_ascii=False, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def to_coco(samples: list[Sample], image_root: Path) -> dict[str, Any]:
    """COCO detection ground truth of box samples with one image each.

    Ids count from 1; image i is sample i - 1. Categories are the descriptions, sorted.
    `bbox` is x, y, width, height in pixels (k/999 times the image side). File names are
    relative to `image_root` where the image lies under it.
    """
    descriptions = sorted({o.desc for sample in samples for o in sample.objects})
    category_ids = {desc: i for i, desc in enumerate(descriptions, start=1)}
    annotations: list[dict[str, Any]] = []
    for image_id, sample in enumerate(samples, start=1):
        for o in sample.objects:
            box = pixel_xywh(o.shape, sample.width, sample.height)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "category_id": category_ids[o.desc],
                    "bbox": box,
                    "area": box[2] * box[3],
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


def pixel_xywh(box: Shape, width: int, height: int) -> list[float]:
    """x, y, width, height in pixels of a norm1000 box."""
    assert box.kind == "bbox_2d"
    x1, y1, x2, y2 = (decode_bin(k) for k in box.coords)
    return [x1 * width, y1 * height, (x2 - x1) * width, (y2 - y1) * height]


def _file_name(image: Path, root: Path) -> str:
    return str(image.relative_to(root) if image.is_relative_to(root) else image)
