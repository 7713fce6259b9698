"""Lengths of segments: whether a pack can hold them, and which segments have them."""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from shared_contracts.errors import ContractError


def check_length(length: int, capacity: int, sample_id: str) -> None:
    """Raise `ContractError` for a segment of `length` tokens that no pack can hold."""
    assert length > 0, f"sample {sample_id} has {length} tokens"
    if length > capacity:
        raise ContractError(
            "global_max_length",
            f"sample {sample_id} takes {length} tokens and a pack holds {capacity}",
            "Raise global_max_length, lower rollout_matching.max_new_tokens, "
            "or set training.packing: false",
        )


def check_lengths(lengths: Sequence[int], capacity: int, place: str) -> None:
    """`check_length` for each; the samples are named by their index in `place`."""
    for index, length in enumerate(lengths):
        check_length(length, capacity, f"at index {index} of the {place}")


def segments_of(packs: Iterable[Iterable[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Ascending indices into `lengths` for the lengths in each pack.

    Of equally long segments the earlier one goes first.
    """
    waiting = defaultdict[int, deque[int]](deque)
    for index, length in enumerate(lengths):
        waiting[length].append(index)
    return [sorted(waiting[length].popleft() for length in pack) for pack in packs]
