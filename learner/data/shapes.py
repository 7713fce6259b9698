"""Plain facts about a shape."""

from learner.types import Shape


def bounding_box(shape: Shape) -> tuple[int, int, int, int]:
    """x1, y1, x2, y2 in bins; a box is its own."""
    xs, ys = shape.coords[0::2], shape.coords[1::2]
    return min(xs), min(ys), max(xs), max(ys)


def covers_nothing(shape: Shape) -> bool:
    """True for a box or polygon of no area: a line or a point."""
    x1, y1, x2, y2 = bounding_box(shape)
    if shape.kind == "bbox_2d":
        return x1 == x2 or y1 == y2
    points = list(zip(shape.coords[0::2], shape.coords[1::2], strict=True))
    far = next((point for point in points if point != points[0]), points[0])
    return all(_turn(points[0], far, point) == 0 for point in points)


def _turn(origin: tuple[int, int], a: tuple[int, int], b: tuple[int, int]) -> int:
    """Cross product of the ways from `origin` to `a` and to `b`; 0 on one line."""
    ax, ay, bx, by = a[0] - origin[0], a[1] - origin[1], b[0] - origin[0], b[1] - origin[1]
    return ax * by - bx * ay
