"""Scale and order of the numbers of boxes, stated or found from all boxes of a file.

    read_boxes   numbers -> x, y, width, height in pixels, and a sentence with the evidence

The four numbers are fractions, bins (0 to 999), thousandths (0 to 1000) or pixels; and two corners,
or a corner with width and height. One scale and one order hold for the whole file.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from shared_contracts.errors import ContractError

Scale = Literal["0..1", "0..999", "0..1000", "pixels"]
Corners = Literal["xyxy", "xywh"]
Numbers = tuple[float, float, float, float]
Size = tuple[int, int]

# Of an image that cannot be read; its boxes are no evidence.
UNKNOWN: Size = (1, 1)
_UNIT: dict[Scale, float] = {"0..1": 1, "0..999": 999, "0..1000": 1000}
# One reading must be so many times more likely than the other.
_ODDS = 100.0
# Share of boxes that may be wrong by themselves, such as with x2 < x1.
_FAULTY = 0.1


class Boxes(NamedTuple):
    """pixels: x, y, width, height of each box. evidence: how its numbers were read, and why."""

    pixels: list[Numbers]
    evidence: str


def read_boxes(
    boxes: Sequence[Numbers],
    sizes: Sequence[Size],
    scale: Scale | None,
    corners: Corners | None,
    where: str,
) -> Boxes:
    """Return the boxes in pixels. sizes: width and height of the image of each, or UNKNOWN.

    scale, corners: as stated; None: found from all boxes.

    Raises ContractError, about `where`, if the scale cannot be found.
    """
    order, ordered = _order(boxes) if corners is None else (corners, "as stated")
    two = [(a, b, a + c, b + d) if order == "xywh" else (a, b, c, d) for a, b, c, d in boxes]
    unit, scaled = _scale(two, sizes, where) if scale is None else (scale, "as stated")
    pixels = []
    for (x1, y1, x2, y2), (width, height) in zip(two, sizes, strict=True):
        x, y = (1.0, 1.0) if unit == "pixels" else (width / _UNIT[unit], height / _UNIT[unit])
        pixels.append((x1 * x, y1 * y, (x2 - x1) * x, (y2 - y1) * y))
    return Boxes(pixels, f"{order} ({ordered}), {unit} ({scaled})")


def _order(boxes: Sequence[Numbers]) -> tuple[Corners, str]:
    """Two corners, unless too many boxes would end before they begin."""
    backward = sum(c < a or d < b for a, b, c, d in boxes)
    if backward <= _FAULTY * len(boxes):
        return "xyxy", f"the third number is below the first in {backward} of {len(boxes)}"
    return "xywh", f"as two corners, {backward} of {len(boxes)} would end before they begin"


def _scale(boxes: Sequence[Numbers], sizes: Sequence[Size], where: str) -> tuple[Scale, str]:
    """Compare how likely the boxes are as pixels and as parts of their images.

    Parts lie inside of a small image, if they are taken for pixels, by chance only. Pixels of a
    large image are at most 1,000 by chance only. Corners are taken as evenly spread for both.
    """
    known = [pair for pair in zip(boxes, sizes, strict=True) if pair[1] != UNKNOWN]
    boxes, sizes = [box for box, _ in known], [size for _, size in known]
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
    raise ContractError(
        where,
        f"{len(boxes):,} boxes do as pixels and as parts of their images: the largest number is "
        f"{largest:g}, and {outside:,} boxes leave their images as pixels",
        "State the scale with --scale: 0..1, 0..999, 0..1000 or pixels",
    )
