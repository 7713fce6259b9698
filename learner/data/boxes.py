"""Scale and order of the numbers of boxes, stated or found from all boxes of a file.

The four numbers are fractions, bins (0 to 999), thousandths (0 to 1000) or pixels; and two corners,
or a corner with width and height. One scale and one order hold for the whole file.
"""

from collections.abc import Sequence
from typing import NamedTuple

from learner.data.records import Corners, Scale, Size

Numbers = tuple[float, float, float, float]

_UNIT: dict[Scale, float] = {"0..1": 1, "0..999": 999, "0..1000": 1000}
# One reading must be so many times more likely than the other.
_ODDS = 100.0
# Share of boxes that may be wrong by themselves, such as with x2 < x1.
_FAULTY = 0.1


class Reading(NamedTuple):
    """How the numbers of boxes are read; evidence: why."""

    scale: Scale
    corners: Corners
    evidence: str

    def unit(self, size: Size) -> tuple[float, float]:
        """Pixels of an image of this size in 1 of x, and in 1 of y."""
        if self.scale == "pixels":
            return 1.0, 1.0
        return size[0] / _UNIT[self.scale], size[1] / _UNIT[self.scale]

    def pixels(self, box: Numbers, size: Size) -> Numbers:
        """x1, y1, x2, y2."""
        (a, b, c, d), (x, y) = _two_corners(box, self.corners), self.unit(size)
        return a * x, b * y, c * x, d * y


def find_reading(
    boxes: Sequence[Numbers],
    sizes: Sequence[Size | None],
    scale: Scale | None,
    corners: Corners | None,
) -> Reading | str:
    """Return the reading, or why the scale cannot be found.

    sizes: of the image of each box; None if it cannot be read. Its boxes are no evidence.
    scale, corners: as stated; None: found from all boxes.
    """
    order, ordered = find_corners(boxes) if corners is None else (corners, "as stated")
    if scale is not None:
        return Reading(scale, order, f"{order} ({ordered}), {scale} (as stated)")
    known = [
        (_two_corners(box, order), size)
        for box, size in zip(boxes, sizes, strict=True)
        if size is not None
    ]
    found, why = find_scale([box for box, _ in known], [size for _, size in known])
    return Reading(found, order, f"{order} ({ordered}), {found} ({why})") if found else why


def _two_corners(box: Numbers, corners: Corners) -> Numbers:
    a, b, c, d = box
    return (a, b, a + c, b + d) if corners == "xywh" else box


def find_corners(boxes: Sequence[Numbers]) -> tuple[Corners, str]:
    """Two corners, unless too many boxes would end before they begin."""
    backward = sum(c < a or d < b for a, b, c, d in boxes)
    if backward <= _FAULTY * len(boxes):
        return "xyxy", f"the third number is below the first in {backward} of {len(boxes)}"
    return "xywh", f"as two corners, {backward} of {len(boxes)} would end before they begin"


def find_scale(boxes: Sequence[Numbers], sizes: Sequence[Size]) -> tuple[Scale | None, str]:
    """Compare how likely the boxes are as pixels and as parts of their images.

    Parts lie inside of a small image, if they are taken for pixels, by chance only. Pixels of a
    large image are at most 1,000 by chance only. Corners are taken as evenly spread for both.
    """
    numbers = [number for box in boxes for number in box]
    if not numbers:
        return "pixels", "there are no boxes"
    largest = max(numbers)
    if largest <= 1:
        return "0..1", f"no number of {len(numbers):,} is above 1"
    above = sum(number > _UNIT["0..1000"] for number in numbers)
    outside = sum(x2 > w or y2 > h for (_, _, x2, y2), (w, h) in zip(boxes, sizes, strict=True))
    parts, pixels = 1.0, 1.0
    for width, height in sizes:
        parts *= min(width / 1000, 1) * min(height / 1000, 1)
        pixels *= min(1000 / width, 1) * min(1000 / height, 1)
    if above > _FAULTY * len(numbers) or (above and outside <= _FAULTY * len(boxes)):
        return "pixels", f"{above:,} of {len(numbers):,} numbers are above 1,000"
    if outside <= _FAULTY * len(boxes) and parts * _ODDS < pixels:
        return "pixels", f"{len(boxes) - outside:,} of {len(boxes):,} lie in their images as pixels"
    if not above and (outside > _FAULTY * len(boxes) or pixels * _ODDS < parts):
        ends = sum(number == _UNIT["0..1000"] for number in numbers)
        if largest <= _UNIT["0..999"] and _UNIT["0..999"] in numbers:
            return "0..999", f"no number of {len(numbers):,} is above 999"
        found = f"no number is above 1,000, and {ends:,} of {len(numbers):,} are 1,000"
        return "0..1000", f"{found}: this is Qwen3-VL's scale"
    return None, (
        f"{len(boxes):,} boxes do as pixels and as parts of their images: the largest number is "
        f"{largest:g}, and {outside:,} boxes leave their images as pixels"
    )
