"""One COCO annotation -> one object, or a rule by which there is none."""

import sys
from typing import Any

from learner.coords import encode_bin
from learner.data.coco import CocoAnnotation, CocoImage, Id
from learner.data.conversion import Rule
from learner.data.shapes import CoversAPixel
from learner.types import GeometryKind, GroundTruthObject, Shape

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
