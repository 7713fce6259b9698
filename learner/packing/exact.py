"""The best plan of a small pool, over all divisions into packs (PACK-03).

Sets of segments are bit masks: segment k is bit k. The best plan of a set has one pack
that holds the set's last segment, and beside it the best plan of what is left. So the
sets whose last segment is k are solved from those of the segments before it, all of them
at once: some 3**11 / 2 pairs of a pack and a rest for 12 segments.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

EXACT_POOL = 12

# A score is one number, the least is the best: packs, underfilled packs, and in the low
# bits how far the emptiest pack is from full.
Scores = npt.NDArray[np.int64]
_EMPTIEST = (1 << 40) - 1
_UNDERFILLED = 1 << 40
_PACK = 1 << 48
_TOO_LONG = 1 << 54


def best_plan(lengths: Sequence[int], capacity: int, filled: int) -> list[list[int]]:
    """Lengths in each pack: fewest packs, then fewest under `filled` tokens, then the
    fullest emptiest pack.
    """
    n = len(lengths)
    as_one = _scores_as_one_pack(lengths, capacity, filled)
    best = np.zeros(1, np.int64)
    for last in range(n - 1):
        best = np.concatenate([best, _best_divisions(as_one[1 << last : 2 << last], best)])
    packs, left = [], (1 << n) - 1
    while left:
        pack = _best_pack(left, as_one, best)
        packs.append([length for k, length in enumerate(lengths) if pack >> k & 1])
        left ^= pack
    return packs


def _scores_as_one_pack(lengths: Sequence[int], capacity: int, filled: int) -> Scores:
    """Score of each set as one pack, shape (2**n,)."""
    totals = np.zeros(1, np.int64)
    for length in lengths:
        totals = np.concatenate([totals, totals + length])
    scores: Scores = _PACK + _UNDERFILLED * (totals < filled) + capacity - totals
    scores[totals > capacity] = _TOO_LONG
    return scores


def _add(some: Scores, more: Scores) -> Scores:
    """Score of the packs of both: counts add up, the emptier of the emptiest stays."""
    emptiest: Scores = np.maximum(some & _EMPTIEST, more & _EMPTIEST)
    return (some & ~_EMPTIEST) + (more & ~_EMPTIEST) + emptiest


def _best_divisions(pack: Scores, rest: Scores) -> Scores:
    """For each set the least of pack[a] + rest[b] over its divisions into a and b.

    Shapes (2**k,). Segment by segment: it is in neither, in the pack, or in the rest.
    """
    segments = len(rest).bit_length() - 1
    pack, rest = pack[None], rest[None]
    for _ in range(segments):
        pack_without, pack_with = np.split(pack, 2, axis=1)
        rest_without, rest_with = np.split(rest, 2, axis=1)
        pack = np.concatenate([pack_without, pack_with, pack_without])
        rest = np.concatenate([rest_without, rest_without, rest_with])
    best = _add(pack, rest)
    for _ in range(segments):
        neither, in_pack, in_rest = np.split(best, 3)
        best = np.concatenate([neither, np.minimum(in_pack, in_rest)], axis=1)
    return best.ravel()


def _best_pack(segments: int, as_one: Scores, best: Scores) -> int:
    """The pack that holds the last of `segments` in their best plan."""
    last = 1 << (segments.bit_length() - 1)
    others = segments ^ last
    beside = np.arange(last)
    beside = beside[beside & ~others == 0]
    scores = _add(as_one[last | beside], best[others ^ beside])
    return last | int(beside[np.argmin(scores)])
