"""The repeat guard of many sequences at once, as tensors on any device.

`GuardRows` gives the verdicts of `RepeatGuard`, with the same number of tensor operations whatever
the number of sequences, and never waits for the device. It reads the ids where vLLM's model runner
V2 keeps them: a row for each slot of the batch, prompt first.
"""

from collections.abc import Sequence
from typing import Any

import torch

from shared_contracts.repeat_guard import RepeatGuard, RepeatTerminateConfig

# A limit that nothing reaches.
NEVER = 2**31 - 1


class GuardRows:
    """The guards of `slots` sequences; a slot that nothing was begun in never triggers.

    A run of equal ids is counted as the ids that equal the one before them, and equal blocks of n
    ids as the ids that equal the one n before them.

    ids: (slots, context), the ids of each slot, which the caller fills.
    object_key_token_ids: see `RepeatGuard`.
    """

    def __init__(self, slots: int, ids: torch.Tensor, object_key_token_ids: Sequence[int]) -> None:
        self._ids = ids
        self._key = tuple(object_key_token_ids)
        device = ids.device
        self._pattern = torch.tensor(self._key, dtype=ids.dtype, device=device)
        # One row for each slot: the positions of the first generated id, of the first id to take
        # and of the first that may trigger; the limits; how far back from the newest id the ids
        # are that it is compared with: itself, its neighbour, one block, the key.
        back = [0, 1, 1, *reversed(range(len(self._key)))]
        told = [0, 0, NEVER, *[NEVER] * 3, *back]
        self._told = torch.tensor([told], device=device).repeat(slots, 1)
        # Neighbours that are equal, ids that equal the one a block before, keys; triggered.
        self._state = torch.zeros(slots, 4, dtype=torch.int64, device=device)
        # What `flush` writes, by slot: the three positions, the three limits, the block.
        self._begun: dict[int, list[int]] = {}

    def begin(self, slot: int, config: RepeatTerminateConfig, prompt: int, known: int) -> None:
        """A sequence takes `slot`; of its `known` ids the first `prompt` were not generated.

        It is there after `flush`. `take` takes its last known id; `flush` reads those before it.
        """
        RepeatGuard(config, self._key)  # refuses settings that lack the ids of a key
        limits = [NEVER] * 3
        if config.enabled:
            rules = config.run_limit - 1, config.block_limit, config.max_object_keys or NEVER
            limits = [min(limit, NEVER) for limit in rules]
        first = prompt + max(config.min_new_tokens, 1) - 1
        block = max(config.ngram_size, 1)
        self._begun[slot] = [prompt, known - 1, first, *limits, block]

    def flush(self) -> None:
        """Write what was begun to the device, and read ids that were generated before."""
        if not self._begun:
            return
        slots = self.to_device(list(self._begun))
        told = self.to_device(list(self._begun.values()))
        self._told[slots, :6] = told[:, :6]
        self._told[slots, 8] = told[:, 6]
        self._state[slots] = 0
        for slot, (prompt, last, first, *_, block) in self._begun.items():
            if last > prompt:
                self._read(slot, block, first - prompt, self._ids[slot, prompt:last])
        self._begun.clear()

    def to_device(self, numbers: list[Any]) -> torch.Tensor:
        """A tensor beside the ids, made without waiting for the device."""
        device = self._ids.device
        pinned = device.type == "cuda"
        return torch.tensor(numbers, pin_memory=pinned).to(device, non_blocking=True)

    def _read(self, slot: int, block: int, first: int, ids: torch.Tensor) -> None:
        """Take all of `ids`, which were generated before the sequence took its slot."""
        places = torch.arange(len(ids), device=ids.device)
        counts = torch.stack(
            (_run(ids, 1, places), _run(ids, block, places), self._keys(ids)), dim=1
        )
        over = (counts >= self._told[slot, 3:6]).any(dim=1) & (places >= first)
        self._state[slot, :3] = counts[-1]
        self._state[slot, 3] = over.any()

    def _keys(self, ids: torch.Tensor) -> torch.Tensor:
        """How often the key has occurred after each of `ids`."""
        size = len(self._key)
        ends = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
        if 0 < size <= len(ids):
            ends[size - 1 :] = (ids.unfold(0, size, 1) == self._pattern).all(dim=1)
        return ends.cumsum(0)

    def take(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Take the newest id of each of `slots`; whether each has triggered, now or before.

        positions: of the newest ids. One of the prompt, and one that was read, is left out.
        """
        slots = slots.long()
        told, state = self._told.index_select(0, slots), self._state.index_select(0, slots)
        counts, limits = state[:, :3], told[:, 3:6]
        places = positions[:, None] - told[:, 6:]
        generated = places >= told[:, :1]
        ids = self._ids.take(slots[:, None] * self._ids.shape[1] + places.clamp_(min=0))
        equal = (ids[:, 1:3] == ids[:, :1]) & generated[:, 1:3]
        new = torch.zeros_like(counts)
        torch.mul(counts[:, :2] + 1, equal, out=new[:, :2])
        if self._key:
            found = ((ids[:, 3:] == self._pattern) & generated[:, 3:]).all(dim=1)
            torch.add(counts[:, 2], found, out=new[:, 2])
        due = positions[:, None] >= told[:, 1:3]
        counts.copy_(torch.where(due[:, :1], new, counts))
        over = (counts >= limits).any(dim=1) & due.all(dim=1)
        state[:, 3] |= over
        self._state.index_copy_(0, slots, state)
        return state[:, 3] > 0


def _run(ids: torch.Tensor, back: int, places: torch.Tensor) -> torch.Tensor:
    """For each id, how many up to it equal the one `back` before them, without a gap."""
    differs = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    differs[back:] = ids[back:] != ids[: max(len(ids) - back, 0)]
    last = torch.where(differs, places, -1).cummax(0).values
    return places - last
