"""Scale and order of box numbers, stated or inferred from all boxes of a file.

Scales: fractions, bins (0 to 999), thousandths (0 to 1000) or pixels. Orders: two corners, or a
corner with width and height. A file has one scale and one order.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from learner.data.jsonl import Size
from learner.data.records import Corners, Scale
from shared_contracts.errors import ContractError

Numbers = tuple[float, float, float, float]

_UNIT: dict[Scale, float] = {"0..1": 1, "0..999": 999, "0..1000": 1000}
# Likelihood ratio that decides between pixels and parts of the image.
_ODDS = 100.0
# Fewest boxes that show whether they are as usual.
_FEWEST = 5
# Highest share of boxes that may be faulty, such as x2 < x1.
FAULTY = 0.1


class Reading(NamedTuple):
    """An interpretation of box numbers; evidence: the reason for it, as text, if inferred."""

    scale: Scale
    corners: Corners
    evidence: str = ""

    def unit(self, size: Size) -> tuple[float, float]:
        """Return the pixels of one unit of x and of y, for an image size in pixels."""
        if self.scale == "pixels":
            return 1.0, 1.0
        return size[0] / _UNIT[self.scale], size[1] / _UNIT[self.scale]

    def pixels(self, box: Numbers, size: Size) -> Numbers:
        """Return x1, y1, x2, y2 in pixels."""
        (a, b, c, d), (x, y) = _two_corners(box, self.corners), self.unit(size)
        return a * x, b * y, c * x, d * y

    def count_inside(self, boxes: Iterable[tuple[Numbers, Size]]) -> int:
        """Return the number of boxes that end in their images, or up to one pixel outside."""
        count = 0
        for box, size in boxes:
            x1, y1, x2, y2 = self.pixels(box, size)
            count += x1 <= x2 <= size[0] + 1 and y1 <= y2 <= size[1] + 1
        return count


def find_reading(
    boxes: Sequence[tuple[Numbers, Size | None]],
    scale: Scale | None = None,
    corners: Corners | None = None,
    usual: tuple[Scale, Corners] | None = None,
) -> Reading:
    """Return the reading of boxes, each given with the size of its image, if that is known.

    scale, corners: as stated; None: the format's `usual` ones, or inferred from all boxes.

    Raises ContractError for an ambiguous scale, and for boxes that do not look usual.
    """
    known = [(box, size) for box, size in boxes if size is not None]
    if usual is not None:
        if len(boxes) >= _FEWEST:
            _require_usual([box for box, _ in boxes], known, usual, scale, corners)
        return Reading(scale or usual[0], corners or usual[1])
    if scale and corners:
        return Reading(scale, corners)
    order, ordered = (corners, "as stated") if corners else _find_corners(boxes)
    ends = [(_two_corners(box, order), size) for box, size in known]
    found, why = (scale, "as stated") if scale else _find_scale(ends)
    if found is None:
        do = "State the scale with --scale: 0..1, 0..999, 0..1000 or pixels"
        raise ContractError("--scale", why, do)
    return Reading(found, order, f"{order} ({ordered}), {found} ({why})")


def _require_usual(
    boxes: Sequence[Numbers],
    known: Sequence[tuple[Numbers, Size]],
    usual: tuple[Scale, Corners],
    scale: Scale | None,
    corners: Corners | None,
) -> None:
    """Raise ContractError for boxes like fractions or of the other order, if that is not stated."""
    if scale is None and max(map(max, boxes)) <= 1:
        found = f"no number of {len(boxes)} boxes is above 1, and this format's are {usual[0]}"
        raise ContractError("--scale", found, "State the scale: --scale 0..1, or --scale pixels")
    orders: tuple[Corners, Corners] = ("xywh", "xyxy")
    outside = {
        order: len(known) - Reading(scale or usual[0], order).count_inside(known)
        for order in orders
    }
    own, (other,) = outside.pop(usual[1]), outside
    if corners is None and own > len(known) / 2 and outside[other] <= FAULTY * len(known):
        found = (
            f"as {usual[1]} {own} of {len(known)} boxes leave their images, and as {other} "
            f"{outside[other]}"
        )
        do = "State the order: --boxes xyxy for two corners, or --boxes xywh"
        raise ContractError("--boxes", found, do)


def _two_corners(box: Numbers, corners: Corners) -> Numbers:
    a, b, c, d = box
    return (a, b, a + c, b + d) if corners == "xywh" else box


def bounding_xywh(flat: Sequence[float]) -> list[float]:
    """Return x, y, width, height of the bounding box of flat points x, y, ..."""
    xs, ys = flat[0::2], flat[1::2]
    return [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]


def _find_corners(boxes: Sequence[tuple[Numbers, Any]]) -> tuple[Corners, str]:
    """Return "xyxy" unless more than `FAULTY` of the boxes would be reversed; and the evidence."""
    backward = sum(c < a or d < b for (a, b, c, d), _ in boxes)
    if backward <= FAULTY * len(boxes):
        return "xyxy", f"the third number is below the first in {backward} of {len(boxes)}"
    return "xywh", f"as two corners, {backward} of {len(boxes)} would be reversed"


def _find_scale(boxes: Sequence[tuple[Numbers, Size]]) -> tuple[Scale | None, str]:
    """Return the scale, or None if it is ambiguous, and the evidence.

    Compares the likelihoods of pixels and of parts (bins, thousandths), for uniform corners.
    parts: the probability that parts, read as pixels, fit into images below 1,000 pixels.
    pixels: the probability that pixels of images above 1,000 pixels are all at most 1,000.
    """
    numbers = [number for box, _ in boxes for number in box]
    if not numbers:
        return "pixels", "there are no boxes"
    largest = max(numbers)
    if largest <= 1:
        return "0..1", f"no number of {len(numbers):,} is above 1"
    above = sum(number > _UNIT["0..1000"] for number in numbers)
    outside = sum(x2 > w or y2 > h for (_, _, x2, y2), (w, h) in boxes)
    parts, pixels = 1.0, 1.0
    for _, (width, height) in boxes:
        parts *= min(width / 1000, 1) * min(height / 1000, 1)
        pixels *= min(1000 / width, 1) * min(1000 / height, 1)
    if above > FAULTY * len(numbers) or (above and outside <= FAULTY * len(boxes)):
        return "pixels", f"{above:,} of {len(numbers):,} numbers are above 1,000"
    if outside <= FAULTY * len(boxes) and parts * _ODDS < pixels:
        return "pixels", f"{len(boxes) - outside:,} of {len(boxes):,} lie in their images as pixels"
    if not above and (outside > FAULTY * len(boxes) or pixels * _ODDS < parts):
        ends = sum(number == _UNIT["0..1000"] for number in numbers)
        if largest <= _UNIT["0..999"] and _UNIT["0..999"] in numbers:
            return "0..999", f"no number of {len(numbers):,} is above 999"
        if not ends:
            found = f"no number of {len(numbers):,} is above {largest:g}"
            return "0..1000", f"{found}: 0..999 is possible, too, and Qwen3-VL's scale is taken"
        found = f"no number is above 1,000, and {ends:,} of {len(numbers):,} are 1,000"
        return "0..1000", f"{found}: this is Qwen3-VL's scale"
    return None, (
        f"{len(boxes):,} boxes fit as pixels and as parts of their images: the largest number is "
        f"{largest:g}, and {outside:,} boxes are outside of their images as pixels"
    )
