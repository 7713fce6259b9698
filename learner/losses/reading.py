"""Logits of a forward, read once: reduced to what the objectives need of them.

A row of logits is as wide as the vocabulary, and a pack has thousands of rows. So no
objective is handed rows: of text it gets the cross-entropy of the target and the share of what
is no coordinate, of a slot a logsumexp and the logits of the 1000 coordinates. Forward and
backward go through the supervised rows in chunks and hold one gradient of the logits, of their own
type, besides them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from learner.losses.fences import (
    all_inside,
    fence_,
    fenced,
    fenced_gradient,
    logsumexp_and_text_mass_,
    widened,
)
from learner.losses.supervision import Selection

# In float32 4 MiB, which caches hold, and 64 MiB: a GPU has to be kept busy.
_CHUNK_ELEMENTS_CPU = 2**20
_CHUNK_ELEMENTS = 2**24


class Reading(NamedTuple):
    """What the objectives know of one forward; differentiable, float32 or wider.

    T supervised text tokens, K supervised coordinate slots, as in the `Selection`; T is 0
    where the text was not read.

    text_nll: (T,) `-log p(target)` over the vocabulary, in nats.
    text_mass: (T,) share of the tokens that are no coordinates in the vocabulary, in [0, 1].
    slot_lse: (K,) logsumexp over the vocabulary. Both are at the gates' temperature.
    slot_coord_logits: (K, 1000) logits as they came.
    """

    text_nll: Tensor
    text_mass: Tensor
    slot_lse: Tensor
    slot_coord_logits: Tensor


class Readings(NamedTuple):
    """The forwards of a pack that the objectives look at.

    anchor: of the teacher-forced forward (A1 in channel A). final: of the last one (A2); the
    same object where there is one forward.
    """

    anchor: Reading
    final: Reading


@dataclass(frozen=True)
class Reader:
    """Reads the supervised rows of one pack's logits, (L, V).

    coord_ids: (1000,) on the device of the logits. temperature: of the gates.
    final_text: an objective looks at the text of the last of several forwards.
    """

    selection: Selection
    coord_ids: Tensor
    temperature: float
    final_text: bool

    def anchor(self, logits: Tensor) -> Reading:
        chosen = self.selection
        return self._read(logits, chosen.text_rows, chosen.text_targets)

    def final(self, logits: Tensor) -> Reading:
        if self.final_text:
            return self.anchor(logits)
        nothing = self.selection.text_rows[:0]
        return self._read(logits, nothing, nothing)

    def slots(self, logits: Tensor) -> Tensor:
        """Coordinate logits of the slots alone, (K, 1000)."""
        return widened(logits[self.selection.slot_rows[:, None], self.coord_ids])

    def _read(self, logits: Tensor, text_rows: Tensor, targets: Tensor) -> Reading:
        read = cast(Callable[..., tuple[Tensor, ...]], _ReadRows.apply)
        slot_rows = self.selection.slot_rows
        return Reading(
            *read(logits, text_rows, targets, slot_rows, self.coord_ids, self.temperature)
        )


class _ReadRows(torch.autograd.Function):
    """(L, V) logits, T text rows and targets, K slot rows -> the four of a `Reading`.

    No row is there twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        text_rows: Tensor,
        targets: Tensor,
        slot_rows: Tensor,
        coord_ids: Tensor,
        temperature: float,
    ) -> tuple[Tensor, ...]:
        source = _Rows(logits, coord_ids)
        plain, mass = source.logsumexp(text_rows, 1.0)
        text = plain
        if temperature != 1.0:
            text, mass = source.logsumexp(text_rows, temperature)
        slot, _ = source.logsumexp(slot_rows, temperature)
        ctx.save_for_backward(logits, text_rows, targets, slot_rows, coord_ids)
        ctx.found = (plain, text, mass, slot, source.clean)
        ctx.temperature = temperature
        nll = plain - fenced(logits[text_rows, targets])
        coord = widened(logits[slot_rows[:, None], coord_ids])
        return nll, mass.clone(), slot.clone(), coord

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        of_nll, of_mass, of_slot, of_coord = upstream
        logits, text_rows, targets, slot_rows, coord_ids = ctx.saved_tensors
        plain, text, mass, slot, clean = ctx.found
        source, at = _Rows(logits, coord_ids, clean), ctx.temperature
        of_text, of_coord_in_text = of_mass * (1.0 - mass), -of_mass * mass
        if at == 1.0:
            of_text, of_coord_in_text = of_text + of_nll, of_coord_in_text + of_nll
        gradient = torch.zeros_like(logits)
        for part in source.parts(text_rows):
            rows, aims = text_rows[part], targets[part]
            block = source.pulled(rows, text[part], at, of_text[part], of_coord_in_text[part])
            if at != 1.0:
                block += source.pulled(rows, plain[part], 1.0, of_nll[part])
            nth = torch.arange(len(aims), device=aims.device)
            block[nth, aims] -= fenced_gradient(logits[rows, aims], of_nll[part])
            gradient[rows] = block.to(gradient.dtype)
        for part in source.parts(slot_rows):
            rows = slot_rows[part]
            block = source.pulled(rows, slot[part], at, of_slot[part])
            block.index_add_(1, coord_ids, of_coord[part])
            gradient[rows] = block.to(gradient.dtype)
        return gradient, None, None, None, None, None


class _Rows:
    """Fenced rows of (L, V) logits in chunks, without gradients.

    clean: () bool, whether the fences left all as it was of what has been read so far. What was
        found when rows were read is given to the object that pulls at them.
    """

    def __init__(self, logits: Tensor, coord_ids: Tensor, clean: Tensor | None = None) -> None:
        self._logits = logits
        self._coord_ids = coord_ids
        self.clean = logits.new_ones((), dtype=torch.bool)
        self._all_clean = clean is not None and bool(clean)

    def parts(self, rows: Tensor) -> Iterator[slice]:
        """Slices of `rows` whose logits are a chunk."""
        elements = _CHUNK_ELEMENTS_CPU if rows.device.type == "cpu" else _CHUNK_ELEMENTS
        step = max(1, elements // self._logits.shape[-1])
        return (slice(start, start + step) for start in range(0, len(rows), step))

    def logsumexp(self, rows: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """(R,) -> logsumexp of each row (R,), and the share of what is no coordinate (R,)."""
        lse = torch.empty(len(rows), dtype=self._wide, device=rows.device)
        mass = torch.empty_like(lse)
        for part in self.parts(rows):
            own = self._divided(rows[part], temperature)
            self.clean = self.clean & all_inside(own)
            lse[part], mass[part] = logsumexp_and_text_mass_(fence_(own), self._coord_ids)
        return lse, mass

    def pulled(
        self,
        rows: Tensor,
        lse: Tensor,
        temperature: float,
        whole: Tensor,
        coord: Tensor | None = None,
    ) -> Tensor:
        """Gradient of the logits of `rows`, (r, V), where their logsumexp is pulled by `whole`.

        The softmax times `whole` (r,), but at the coordinates times `coord` (r,) if given.
        """
        soft = fence_(self._divided(rows, temperature)).sub_(lse[:, None]).exp_()
        inner = None
        if coord is not None:
            inner = soft.index_select(1, self._coord_ids).mul_((coord / temperature)[:, None])
        soft.mul_((whole / temperature)[:, None])
        if inner is not None:
            soft.index_copy_(1, self._coord_ids, inner)
        if self._all_clean:
            return soft
        return fenced_gradient(self._logits[rows], soft, temperature)

    @property
    def _wide(self) -> torch.dtype:
        return widened(self._logits[:0]).dtype

    def _divided(self, rows: Tensor, temperature: float) -> Tensor:
        """Logits of `rows`, divided, in a memory of their own."""
        own = widened(self._logits.index_select(0, rows))
        return own if temperature == 1.0 else own.div_(temperature)
