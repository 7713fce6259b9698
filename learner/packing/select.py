"""One pack out of a buffer that goes on (PACK-02)."""

from collections.abc import Sequence
from types import ModuleType

from learner.packing.length import check_lengths, segments_of
from shared_contracts.errors import ContractError


def select_segments(lengths: Sequence[int], capacity: int) -> list[int]:
    """Indices of the segments for the next pack, in insertion order; none for none.

    Always holds the oldest segment (index 0), and is at least as full as taking in
    insertion order whatever still fits. Among that baseline and the bins that
    `binpacking.to_constant_volume` makes beside the oldest, the fullest wins, then the one
    of fewer segments, then the smallest indices. Of equally long segments the older go first.
    """
    binpacking = _import_binpacking()
    check_lengths(lengths, capacity, "buffer")
    if not lengths:
        return []
    oldest, *others = lengths
    room = capacity - oldest
    bins = binpacking.to_constant_volume([length for length in others if length <= room], room)
    packs = [_first_come(lengths, capacity), *([oldest, *beside] for beside in bins)]
    best = min(map(_rank, packs))
    return min(segments_of([pack], lengths)[0] for pack in packs if _rank(pack) == best)


def _rank(pack: Sequence[int]) -> tuple[int, int]:
    """Fuller before emptier, then fewer segments before more."""
    return -sum(pack), len(pack)


def _first_come(lengths: Sequence[int], capacity: int) -> list[int]:
    """FIFO-greedy: in insertion order, the length of each segment that still fits.

    Going on after one that does not fit takes all that stopping there would take, so this
    is the stronger of the two readings of the baseline.
    """
    taken = []
    for length in lengths:
        if length <= capacity:
            taken.append(length)
            capacity -= length
    return taken


def _import_binpacking() -> ModuleType:
    try:
        import binpacking
    except ImportError:
        raise ContractError(
            "training.packing",
            "the module 'binpacking' is not installed",
            "Install it (pip install binpacking) or set training.packing: false",
        ) from None
    return binpacking
