"""Plain facts about a shape."""

from collections.abc import Callable

from learner.types import Shape

# Whether a shape covers a pixel of the canvas on which objects are matched; one that covers none
# is like nothing, itself included. Asked of the stage that draws the masks, which comes later.
CoversAPixel = Callable[[Shape], bool]


def bounding_box(shape: Shape) -> tuple[int, int, int, int]:
    """x1, y1, x2, y2 in bins; a box is its own."""
    xs, ys = shape.coords[0::2], shape.coords[1::2]
    return min(xs), min(ys), max(xs), max(ys)
