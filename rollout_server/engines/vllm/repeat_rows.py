"""The repeat guard of many sequences at once, as tensors on any device.

`GuardRows` gives the verdicts of `RepeatGuard`, with the same number of tensor operations whatever
the number of sequences, and never waits for the device. It reads the ids where vLLM's model runner
V2 keeps them: a row for each slot of the batch, prompt first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shared_contracts.repeat_guard import RepeatGuard, RepeatTerminateConfig

# A limit that nothing reaches.
NEVER = 2**31 - 1


@dataclass(frozen=True)
class _Begun:
    """A sequence that takes a slot.

    prompt, last, first: the positions of the first generated id, of the first id to take and of the
    first that may trigger. limits: of the three counts. block: ids of one.
    """

    prompt: int
    last: int
    first: int
    limits: list[int]
    block: int

    def since(self, key: int) -> list[int]:
        """The first positions of the counts, whose ids all were generated, and of a trigger."""
        back = self.prompt + 1, self.prompt + self.block, self.prompt + max(key, 1) - 1, self.first
        return [max(position, self.last) for position in back]


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
        # One row for each slot, in one table, so that a step gathers once: how many neighbours are
        # equal, ids equal the one a block before, keys are there; triggered | the limits | the
        # positions since which each of the three is counted, and since which it may trigger | where
        # in all ids position 0 is, shifted back by what the newest id is compared with: itself, its
        # neighbour, one block, the key.
        back = [0, 1, 1, *reversed(range(len(self._key)))]
        self._parts = [4, 3, 4, len(back)]
        empty = [0] * 4 + [NEVER] * 7
        begins = torch.arange(slots, device=device)[:, None] * ids.shape[1]
        told = torch.tensor([empty], device=device).expand(slots, -1)
        self._table = torch.cat((told, begins - torch.tensor([back], device=device)), dim=1)
        self._state = self._table[:, :4]
        # What `flush` writes, by slot.
        self._begun: dict[int, _Begun] = {}

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
        block = min(max(config.ngram_size, 1), self._ids.shape[1])
        self._begun[slot] = _Begun(prompt, known - 1, first, limits, block)

    def flush(self) -> None:
        """Write what was begun to the device, and read ids that were generated before."""
        if not self._begun:
            return
        width = self._ids.shape[1]
        written = self.to_device(
            [
                [
                    slot,
                    *[0] * 4,
                    *begun.limits,
                    *begun.since(len(self._key)),
                    slot * width - begun.block,
                ]
                for slot, begun in self._begun.items()
            ]
        )
        slots = written[:, 0]
        self._table[slots, :11] = written[:, 1:12]
        self._table[slots, 13] = written[:, 12]
        for slot, begun in self._begun.items():
            if begun.last > begun.prompt:
                generated = self._ids[slot, begun.prompt : begun.last]
                self._read(slot, begun.block, begun.first - begun.prompt, generated)
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
        over = (counts >= self._table[slot, 4:7]).any(dim=1) & (places >= first)
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
        state, limits, since, begins = self._table.index_select(0, slots).split(self._parts, dim=1)
        now = positions[:, None]
        due = now >= since
        # What is before the first id of a slot belongs to another one, and nothing of it is due.
        ids = self._ids.take(now + begins)
        same = ids[:, 1:3] == ids[:, :1]
        key = (ids[:, 3:] == self._pattern).all(dim=1, keepdim=True)
        counts = state[:, :3]
        counts += torch.cat((same, key), dim=1) & due[:, :3]
        counts[:, :2].masked_fill_(due[:, :2] > same, 0)
        over = ((counts >= limits) & due[:, 3:]).any(dim=1)
        state[:, 3] |= over
        self._state.index_copy_(0, slots, state)
        triggered: torch.Tensor = state[:, 3] > 0
        return triggered


def _run(ids: torch.Tensor, back: int, places: torch.Tensor) -> torch.Tensor:
    """For each id, how many up to it equal the one `back` before them, without a gap."""
    differs = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    differs[back:] = ids[back:] != ids[: max(len(ids) - back, 0)]
    last = torch.where(differs, places, -1).cummax(0).values
    return places - last
