"""Lengths for the tests of packing, and what plans of them are held against."""

from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

CAPACITY = 20

# Many of the same length, and many that fill a pack alone or in halves.
LENGTHS = st.one_of(st.integers(1, CAPACITY), st.sampled_from([4, 5, 10, CAPACITY]))


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to divide items into packs."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for packs in partitions(rest):
        yield [[first], *packs]
        for k in range(len(packs)):
            yield [*packs[:k], [first, *packs[k]], *packs[k + 1 :]]


def badness(packs: list[list[int]], capacity: int, min_fill: float) -> tuple[int, int, float]:
    """Number of packs, of underfilled packs, minus the smallest fill; packs hold lengths."""
    fills = [sum(pack) / capacity for pack in packs]
    return len(packs), sum(fill < min_fill for fill in fills), -min(fills)


def lengths_in(packs: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    return [[lengths[i] for i in pack] for pack in packs]


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> int:
    """How many packs it needs."""
    totals: list[int] = []
    for length in sorted(lengths, reverse=True):
        for k, total in enumerate(totals):
            if total + length <= capacity:
                totals[k] += length
                break
        else:
            totals.append(length)
    return len(totals)


def fewest_possible(lengths: Sequence[int], capacity: int) -> int:
    """Smallest number of packs, by the best (packs, fill of the last) of every subset."""
    best = [(1, 0)] + [(len(lengths) + 1, 0)] * (2 ** len(lengths) - 1)
    for mask in range(1, len(best)):
        for i, length in enumerate(lengths):
            if mask >> i & 1:
                packs, fill = best[mask ^ (1 << i)]
                grown = (packs, fill + length) if fill + length <= capacity else (packs + 1, length)
                best[mask] = min(best[mask], grown)
    return best[-1][0]


def subset_totals(lengths: Sequence[int]) -> set[int]:
    totals = {0}
    for length in lengths:
        totals |= {total + length for total in totals}
    return totals
