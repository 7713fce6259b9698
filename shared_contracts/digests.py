"""The digest of a bucket, which both sides of a push compute (SYNC-06).

This module imports no array library: `digest` works on any array of signed 64-bit integers whose
arithmetic wraps around, such as torch's.
"""

from typing import Any, TypeAlias

Int64Array: TypeAlias = Any

_WIDTH = 4096
_BLOCK, _MOST_BLOCKS = 16, 16  # rows of 32 KiB


def positions_of(words: int) -> int:
    """Return the length of the `positions` that a digest of so many words needs."""
    return max(_WIDTH, words // _WIDTH)


def digest(words: Int64Array, positions: Int64Array) -> Int64Array:
    """Return sum(words[i] * (2 * i + 1)) modulo 2**64, at about the speed of memory.

    A changed bit changes the sum, because each multiplier is odd. So do words that trade places.

    words: (N,). positions: 0, 1, 2, ... with at least `positions_of(N)` entries.
    """
    whole = len(words) // _WIDTH * _WIDTH
    rows = words[:whole].reshape(-1, _WIDTH)
    tail = words[whole:]
    # Entry (row, column) has the multiplier 2 * (row * _WIDTH + column) + 1. A block of rows is
    # small enough to be in a cache when it is read again.
    columns, of_rows = 0 * positions[:_WIDTH], 0
    step = max(_BLOCK, len(rows) // _MOST_BLOCKS)
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        columns = columns + block.sum(0)
        of_rows = of_rows + (block.sum(1) * positions[start : start + len(block)]).sum()
    of_columns = (columns * (2 * positions[:_WIDTH] + 1)).sum()
    of_rows = of_rows * (2 * _WIDTH)
    of_tail = (tail * (2 * (positions[: len(tail)] + whole) + 1)).sum()
    return of_columns + of_rows + of_tail
