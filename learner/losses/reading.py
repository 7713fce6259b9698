"""Logits of a forward, read once: reduced to what the objectives need of them.

A row of logits is as wide as the vocabulary, and a pack has thousands of rows. So no
objective is handed rows: it gets the cross-entropy of the targets, a logsumexp, and the
logits of the 1000 coordinate tokens. Forward and backward go through the supervised rows in
chunks and hold one gradient of the logits, of their own type, besides them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from learner.losses.fences import all_inside, fence_, fenced, fenced_gradient, widened
from learner.losses.supervision import Selection

# In float32 4 MiB, which caches hold, and 64 MiB: a GPU has to be kept busy.
_CHUNK_ELEMENTS_CPU = 2**20
_CHUNK_ELEMENTS = 2**24


class Reading(NamedTuple):
    """What the objectives know of one forward; differentiable, float32 or wider.

    T supervised text tokens, K supervised coordinate slots, as in the `Selection`; T is 0
    where the text was not read.

    text_nll: (T,) `-log p(target)` over the vocabulary, in nats.
    text_lse, slot_lse: (T,), (K,) logsumexp over the vocabulary at the gates' temperature.
    text_coord_logits, slot_coord_logits: (T, 1000), (K, 1000) logits as they came.
    """

    text_nll: Tensor
    text_lse: Tensor
    text_coord_logits: Tensor
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
        rows = torch.cat([text_rows, self.selection.slot_rows])
        read = cast(Callable[..., tuple[Tensor, Tensor, Tensor]], _ReadRows.apply)
        nll, lse, coord = read(logits, rows, targets, self.coord_ids, self.temperature)
        text = len(text_rows)
        return Reading(nll, lse[:text], coord[:text], lse[text:], coord[text:])


class _ReadRows(torch.autograd.Function):
    """(L, V) logits, R distinct rows, T targets -> nll (T,), lse (R,), coord (R, 1000).

    The targets are of the first T rows. The logsumexp of `nll` is at temperature 1, `lse`
    at the one given.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Tensor,
        targets: Tensor,
        coord_ids: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        plain, clean = _logsumexp(logits, rows, 1.0)
        tempered = plain.clone()
        if temperature != 1.0:
            tempered, also = _logsumexp(logits, rows, temperature)
            clean &= also
        nll = plain[: len(targets)] - fenced(logits[rows[: len(targets)], targets])
        coord = widened(logits[rows[:, None], coord_ids])
        ctx.save_for_backward(logits, rows, targets, coord_ids, plain, tempered, clean)
        ctx.temperature = temperature
        return nll, tempered, coord

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        of_nll, of_lse, of_coord = upstream
        logits, rows, targets, coord_ids, plain, tempered, clean = ctx.saved_tensors
        of_plain = torch.zeros_like(plain)
        of_plain[: len(targets)] = of_nll
        pulls = [_Pull(1.0, plain, of_plain), _Pull(ctx.temperature, tempered, of_lse)]
        if ctx.temperature == 1.0:
            pulls = [_Pull(1.0, plain, of_plain + of_lse)]
        gradient = torch.zeros_like(logits)
        all_clean = bool(clean)
        for part in _parts(logits, rows):
            block = _pulled(logits, rows, part, pulls, all_clean=all_clean)
            block[:, coord_ids] += of_coord[part]
            aims = targets[part]
            raw = logits[rows[part][: len(aims)], aims]
            nth = torch.arange(len(aims), device=aims.device)
            block[nth, aims] -= fenced_gradient(raw, of_nll[part])
            gradient[rows[part]] = block.to(gradient.dtype)
        return gradient, None, None, None, None


class _Pull(NamedTuple):
    """A logsumexp of every row, (R,), at a temperature, and the gradient it is pulled by, (R,)."""

    temperature: float
    lse: Tensor
    upstream: Tensor


def _parts(logits: Tensor, rows: Tensor) -> Iterator[slice]:
    """Slices of `rows` whose logits are a chunk."""
    elements = _CHUNK_ELEMENTS_CPU if logits.device.type == "cpu" else _CHUNK_ELEMENTS
    step = max(1, elements // logits.shape[-1])
    return (slice(start, start + step) for start in range(0, len(rows), step))


def _tempered(logits: Tensor, rows: Tensor, temperature: float) -> Tensor:
    """Rows of logits in a memory of their own, divided by the temperature."""
    own = widened(logits.index_select(0, rows))
    return own if temperature == 1.0 else own.div_(temperature)


def _logsumexp(logits: Tensor, rows: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(R,) logsumexp of fenced rows, and whether no fence has replaced anything, (1,) bool."""
    lse = torch.empty(len(rows), dtype=widened(logits[:0]).dtype, device=logits.device)
    clean = torch.ones(1, dtype=torch.bool, device=logits.device)
    for part in _parts(logits, rows):
        own = _tempered(logits, rows[part], temperature)
        clean &= all_inside(own)
        fence_(own)
        top = own.amax(-1, keepdim=True)
        lse[part] = own.sub_(top).exp_().sum(-1).log_().add_(top.squeeze(-1))
    return lse, clean


def _pulled(
    logits: Tensor, rows: Tensor, part: slice, pulls: list[_Pull], *, all_clean: bool
) -> Tensor:
    """Gradient of the logsumexps of a part of the rows, summed over `pulls`; (r, V)."""
    blocks = []
    for temperature, lse, upstream in pulls:
        soft = fence_(_tempered(logits, rows[part], temperature)).sub_(lse[part, None]).exp_()
        soft *= (upstream[part] / temperature)[:, None]
        if not all_clean:
            soft = fenced_gradient(logits[rows[part]], soft, temperature)
        blocks.append(soft)
    return blocks[0] if len(blocks) == 1 else blocks[0].add_(blocks[1])
