"""Logits of a forward, read once: reduced to what the objectives need of them.

A row of logits is as wide as the vocabulary, and a pack has thousands of rows. So no
objective is handed rows: it gets the cross-entropy of the targets, a logsumexp, and the
logits of the 1000 coordinate tokens. Forward and backward go through the supervised rows in
chunks and hold one gradient of the logits, of their own type, besides them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from learner.losses.fences import fenced, fenced_gradient, widened
from learner.losses.supervision import Selection

# A chunk in float32 is 16 MiB: some 27 rows of a vocabulary of 152k.
_CHUNK_ELEMENTS = 2**22


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
        chunks = rows.split(_rows_per_chunk(logits))
        plain = torch.cat([_lse(logits[chunk], 1.0) for chunk in chunks])
        tempered = plain
        if temperature != 1.0:
            tempered = torch.cat([_lse(logits[chunk], temperature) for chunk in chunks])
        nll = plain[: len(targets)] - fenced(logits[rows[: len(targets)], targets])
        coord = widened(logits[rows[:, None], coord_ids])
        ctx.save_for_backward(logits, rows, targets, coord_ids, plain, tempered)
        ctx.temperature = temperature
        return nll, tempered.clone(), coord

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_nll, grad_lse, grad_coord = grads
        logits, rows, targets, coord_ids, plain, tempered = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        by_row = torch.zeros_like(plain)
        by_row[: len(targets)] = grad_nll
        start = 0
        for chunk in rows.split(_rows_per_chunk(logits)):
            part = slice(start, start + len(chunk))
            start += len(chunk)
            raw = logits[chunk]
            if ctx.temperature == 1.0:
                block = _lse_gradient(raw, plain[part], by_row[part] + grad_lse[part], 1.0)
            else:
                block = _lse_gradient(raw, plain[part], by_row[part], 1.0)
                block += _lse_gradient(raw, tempered[part], grad_lse[part], ctx.temperature)
            block[:, coord_ids] += grad_coord[part]
            aims = targets[part]
            nth = torch.arange(len(aims), device=aims.device)
            block[nth, aims] -= fenced_gradient(raw[nth, aims], by_row[part][: len(aims)])
            grad[chunk] = block.to(grad.dtype)
        return grad, None, None, None, None


def _rows_per_chunk(logits: Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS // logits.shape[-1])


def _lse(raw: Tensor, temperature: float) -> Tensor:
    return torch.logsumexp(fenced(raw, temperature), dim=-1)


def _lse_gradient(raw: Tensor, lse: Tensor, upstream: Tensor, temperature: float) -> Tensor:
    """Gradient of `_lse` times `upstream`, by row; (r, V), (r,), (r,) -> (r, V)."""
    soft = fenced(raw, temperature).sub_(lse[:, None]).exp_()
    soft *= (upstream / temperature)[:, None]
    return fenced_gradient(raw, soft, temperature)
