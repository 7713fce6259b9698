"""Segments that fill a pack to a given total."""

from collections.abc import Sequence

# A total this share of the room above what was asked for is as good as the exact one.
CLOSE_ENOUGH = 2048


def subset_of_total(lengths: Sequence[int], at_least: int, at_most: int) -> list[int]:
    """Indices of lengths whose total is the smallest in [at_least, at_most].

    If there is none, those of the largest total below. Earlier lengths are preferred: the
    search takes one more at a time and ends at the first total that is close enough
    (`CLOSE_ENOUGH`), so that later ones remain for others.

    The totals of all subsets are the bits of one integer: bit `at_most - total` is set.
    """
    spare = at_most - at_least
    close = min(spare, at_most // CLOSE_ENOUGH)
    wanted = ((2 << close) - 1) << (spare - close)
    reached = 1 << at_most
    before = []
    for length in lengths:
        if reached & wanted:
            break
        before.append(reached)
        reached |= reached >> length
    enough = reached & ((2 << spare) - 1)
    bit = enough.bit_length() - 1 if enough else (reached & -reached).bit_length() - 1
    return _taken(lengths, before, bit)


def _taken(lengths: Sequence[int], before: list[int], bit: int) -> list[int]:
    """Which lengths lead to `bit`: those without which it was not reached."""
    taken = []
    for index in range(len(before) - 1, -1, -1):
        if not before[index] >> bit & 1:
            taken.append(index)
            bit += lengths[index]
    return taken[::-1]
