"""The one coordinate quantization: bins 0..999, `c = k/999` (DATA-02).

Bin 0 is the left or top edge of the image, bin 999 the right or bottom edge.
"""

from learner.types import COORD_BINS as COORD_BINS


def encode_bin(c: float) -> int:
    """Return the bin of a normalized coordinate: `clamp(round(999 * c), 0, 999)`."""
    return round((COORD_BINS - 1) * min(max(c, 0.0), 1.0))


def decode_bin(k: int) -> float:
    """Return the normalized coordinate in [0, 1] of bin `k`: `k / 999`."""
    return k / (COORD_BINS - 1)


def coord_token(k: int) -> str:
    """Return the text of the coordinate token of bin `k`."""
    return f"<|coord_{k}|>"
