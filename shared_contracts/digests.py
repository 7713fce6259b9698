"""The digest of a bucket, computed on both sides of a push (SYNC-06).

This module imports no array library: `digest` accepts any array of signed 64-bit integers with
wrap-around arithmetic, such as torch's.
"""

from typing import Any, TypeAlias

Int64Array: TypeAlias = Any

_WIDTH = 4096


def positions_of(words: int) -> int:
    """Return the smallest length of `positions` for a digest of `words` words."""
    return max(_WIDTH, words // _WIDTH)


def digest(words: Int64Array, positions: Int64Array) -> Int64Array:
    """Return sum(words[i] * (2 * i + 1)) modulo 2**64, at about the speed of memory.

    A changed bit changes the sum, because each multiplier is odd. Exchanged words change it, too.

    words: (N,). positions: 0, 1, 2, ... with at least `positions_of(N)` entries.
    """
    whole = len(words) // _WIDTH * _WIDTH
    rows = words[:whole].reshape(-1, _WIDTH)
    tail = words[whole:]
    # Entry (row, column) has the multiplier 2 * (row * _WIDTH + column) + 1.
    of_columns = (rows.sum(0) * (2 * positions[:_WIDTH] + 1)).sum()
    of_rows = (rows.sum(1) * positions[: len(rows)]).sum() * (2 * _WIDTH)
    of_tail = (tail * (2 * (positions[: len(tail)] + whole) + 1)).sum()
    return of_columns + of_rows + of_tail
