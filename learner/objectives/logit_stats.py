"""The supervision of a packed row, and the statistics of its logits for the objectives.

A row of logits is as wide as the vocabulary, and a pack has thousands of rows. So objectives get
statistics: for a text row the target's cross-entropy and the probability of all tokens that are no
coordinates, for a slot a logsumexp and the logits of the 1000 coordinates. The head is applied to
the supervised rows only, a chunk at a time (FULL-02). Backward computes each chunk's logits again:
the logits of one chunk exist at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from learner.objectives import numerics
from learner.objectives.numerics import (
    bound_,
    bounded,
    is_outside,
    logsumexp_and_text_mass_,
    widened,
)
from learner.types import Role


@dataclass(frozen=True)
class Supervision:
    """The supervision of a packed row of L tokens; positions count from its start.

    input_ids: (L,). roles: (L,) int8, values of `Role`. has_dropped: (L,) bool, true in
    samples that lost an invalid object. coord_positions: (K,). coord_bins: (K,) float, in bins.
    boxes: (N, 4) indices into K. departures: (U, 2) position and token id at which a removed
    duplicate departs from the target; positions are unique. kept_positions, kept_logprobs: (R,)
    tokens of the answer that the target keeps, with the engine's log-probability in nats
    (LOGP-01). kept_advantages: (R,) of their answer; 0 if answers are not compared.
    """

    input_ids: Tensor
    roles: Tensor
    has_dropped: Tensor
    coord_positions: Tensor
    coord_bins: Tensor
    boxes: Tensor
    departures: Tensor = field(default_factory=lambda: torch.zeros(0, 2, dtype=torch.long))
    kept_positions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    kept_logprobs: Tensor = field(default_factory=lambda: torch.zeros(0))
    kept_advantages: Tensor = field(default_factory=lambda: torch.zeros(0))

    def to(self, device: torch.device) -> "Supervision":
        return Supervision(**{name: tensor.to(device) for name, tensor in vars(self).items()})


@dataclass(frozen=True)
class Totals:
    """Denominators of a row's means; a term whose denominator is 0 is left out.

    They are arguments of the objectives, so that the losses of parts of a row, over the totals of
    the whole row, add up to the loss of the whole.

    text_weight, struct_weight: () sums of cross-entropy weights, over all supervised text
    and over its structure and closure. text, slots, boxes, departures: counts.
    answer_tokens: kept tokens of the row; or the number by which the losses of packs, weighted by
    their share of the samples, add up to the mean over the tokens of the step (GROUP-03).
    """

    text_weight: Tensor
    struct_weight: Tensor
    text: int
    slots: int
    boxes: int
    departures: int = 0
    answer_tokens: float = 0


@dataclass(frozen=True)
class Selection:
    """The supervised tokens of a row, and the rows of logits that predict them.

    A row is one less than the position of its token, which the logits at position - 1 predict.

    text_rows: (T,); text_targets: (T,) token ids; text_roles: (T,) `Role` values;
    text_weights: (T,) cross-entropy weights, > 0.
    slot_rows: (K,); slot_bins: (K,) in [0, 999], fractions between bins allowed.
    boxes: (N, 4) indices into K, in x1, y1, x2, y2 order.
    departure_rows: (U,); departure_tokens, departure_targets: (U,) token ids of the removed
        duplicate and of the target.
    kept_rows: (R,); kept_tokens: (R,) token ids; kept_roles: (R,) `Role` values; kept_logprobs:
        (R,) by the engine; kept_advantages: (R,). They are trained on only with `learns_kept`.
    """

    text_rows: Tensor
    text_targets: Tensor
    text_roles: Tensor
    text_weights: Tensor
    slot_rows: Tensor
    slot_bins: Tensor
    boxes: Tensor
    departure_rows: Tensor
    departure_tokens: Tensor
    departure_targets: Tensor
    kept_rows: Tensor
    kept_tokens: Tensor
    kept_roles: Tensor
    kept_logprobs: Tensor
    kept_advantages: Tensor
    totals: Totals
    learns_kept: bool = False

    def over(self, answer_tokens: float) -> "Selection":
        """Return the selection with another denominator `answer_tokens`."""
        return replace(self, totals=replace(self.totals, answer_tokens=answer_tokens))

    @property
    def head_rows(self) -> int:
        """Number of rows whose logits have a backward, in one forward."""
        kept = len(self.kept_rows) if self.learns_kept else 0
        return len(self.text_rows) + len(self.slot_rows) + len(self.departure_rows) + kept


def select(row: Supervision, weights: Tensor, departures: Tensor) -> Selection:
    """weights: (L,) of text tokens; 0: not supervised. departures: (U, 2), some of the row's."""
    positions = weights.nonzero().squeeze(1)
    text_weights, roles = weights[positions], row.roles[positions]
    return Selection(
        text_rows=positions - 1,
        text_targets=row.input_ids[positions],
        text_roles=roles,
        text_weights=text_weights,
        slot_rows=row.coord_positions - 1,
        slot_bins=row.coord_bins,
        boxes=row.boxes,
        departure_rows=departures[:, 0] - 1,
        departure_tokens=departures[:, 1],
        departure_targets=row.input_ids[departures[:, 0]],
        kept_rows=row.kept_positions - 1,
        kept_tokens=row.input_ids[row.kept_positions],
        kept_roles=row.roles[row.kept_positions],
        kept_logprobs=row.kept_logprobs,
        kept_advantages=row.kept_advantages,
        totals=Totals(
            text_weight=text_weights.sum(),
            struct_weight=text_weights[~is_description(roles)].sum(),
            text=len(positions),
            slots=len(row.coord_positions),
            boxes=len(row.boxes),
            departures=len(departures),
            answer_tokens=len(row.kept_positions),
        ),
    )


def is_description(roles: Tensor) -> Tensor:
    """Return whether supervised text is description; else it is structure; (T,) -> (T,) bool."""
    return roles == Role.APPENDED_DESC


# Logits that the head computes at once: 440 rows of Qwen's vocabulary, 128 MiB in bfloat16. Each
# chunk reads the whole head: with fewer rows the memory would limit a GPU.
HEAD_ELEMENTS = 2**26

# Logits that are widened at once: in float32 4 MiB on a CPU, for its caches, and 64 MiB on a GPU.
_CHUNK_ELEMENTS_CPU = 2**20
_CHUNK_ELEMENTS = 2**24


class HeadInput(NamedTuple):
    """The input of the head for a pack.

    hidden: (L, H), the last hidden states. head: maps (r, H) of them to logits (r, V).
    vocabulary: V.
    """

    hidden: Tensor
    head: Callable[[Tensor], Tensor]
    vocabulary: int


class LogitStats(NamedTuple):
    """Statistics of one forward for the objectives; differentiable, float32 or wider.

    T supervised text tokens, K supervised coordinate slots, U departures, R kept tokens, as in the
    `Selection`; T is 0 if no objective reads the text of this forward.

    text_nll: (T,) `-log p(target)` over the vocabulary, in nats.
    text_mass: (T,) probability of all tokens that are no coordinates, in [0, 1].
    slot_lse: (K,) logsumexp over the vocabulary. Both are at the gates' temperature.
    slot_coord_logits: (K, 1000) unchanged logits.
    departure_nll: (U,) `-log p` over the vocabulary, in nats, of the token with its neighbours.
    kept_nll: (R,) `-log p(token)` of kept tokens; without gradient unless they are trained on.
    """

    text_nll: Tensor
    text_mass: Tensor
    slot_lse: Tensor
    slot_coord_logits: Tensor
    departure_nll: Tensor
    kept_nll: Tensor


class ForwardStats(NamedTuple):
    """Statistics of the forwards of a pack.

    anchor: of the teacher-forced forward (A1 in channel A). final: of the last one (A2); the
    same object if there is one forward. start_nll: (R,) `kept_nll` by the model that the run
    started from, without gradient; None if no module reads it.
    """

    anchor: LogitStats
    final: LogitStats
    start_nll: Tensor | None = None


@dataclass(frozen=True)
class Reader:
    """Reads the supervised rows of one pack's logits.

    coord_ids: (1000,) on the device of the logits. temperature: of the gates.
    final_text: whether an objective reads the text of the last of several forwards.
    radius: in bins, of the neighbours of a coordinate at a departure; None: departures may be
        tokens of any kind, without neighbours.
    """

    selection: Selection
    coord_ids: Tensor
    temperature: float
    final_text: bool
    radius: int | None

    def anchor(self, given: HeadInput) -> LogitStats:
        chosen = self.selection
        return self._stats(given, chosen.text_rows, chosen.text_targets)

    def final(self, given: HeadInput) -> LogitStats:
        if self.final_text:
            return self.anchor(given)
        nothing = self.selection.text_rows[:0]
        return self._stats(given, nothing, nothing)

    def slots(self, given: HeadInput) -> Tensor:
        """Return only the coordinate logits of the slots, (K, 1000)."""

        def read(hidden: Tensor) -> Tensor:
            return widened(given.head(hidden).index_select(-1, self.coord_ids))

        rows = given.hidden.index_select(0, self.selection.slot_rows)
        return torch.cat([_recomputed(read, part) for part in rows.split(_head_rows(given))])

    def kept(self, given: HeadInput) -> Tensor:
        """Return only the `kept_nll` of a `LogitStats`."""
        return self._nll(given, self.selection.kept_rows, self.selection.kept_tokens)

    def _stats(self, given: HeadInput, text_rows: Tensor, targets: Tensor) -> LogitStats:
        """Return statistics of these text rows, and of all slots, departures and kept tokens."""
        chosen = self.selection
        text, mass, slots, coord = self._read(given, text_rows, targets, chosen.slot_rows)
        departing = self._departing(given)
        with torch.set_grad_enabled(chosen.learns_kept and torch.is_grad_enabled()):
            kept = self.kept(given)
        return LogitStats(text, mass, slots, coord, departing, kept)

    def _departing(self, given: HeadInput) -> Tensor:
        """Return the `departure_nll` of a `LogitStats`.

        The neighbours of a departing coordinate are the bins within the radius that are nearer to
        it than to the target's coordinate at that position, if the target has one there.
        """
        chosen, rows = self.selection, self.selection.departure_rows
        if self.radius is None or not len(rows):
            return self._nll(given, rows, chosen.departure_tokens)
        nothing = rows[:0]
        _, _, lse, logits = replace(self, temperature=1.0)._read(given, nothing, nothing, rows)
        grid = torch.arange(len(self.coord_ids), device=rows.device)
        own = chosen.departure_tokens[:, None] == self.coord_ids
        aim = chosen.departure_targets[:, None] == self.coord_ids
        away = (grid - own.int().argmax(1, keepdim=True)).abs()
        nearer = away < (grid - aim.int().argmax(1, keepdim=True)).abs()
        near = (away <= self.radius) & (nearer | ~aim.any(1, keepdim=True))
        return lse - bounded(logits).masked_fill(~near, -torch.inf).logsumexp(-1)

    def _nll(self, given: HeadInput, rows: Tensor, tokens: Tensor) -> Tensor:
        """Return `-log p(token)` of (R,) rows, which may also be rows of text or slots."""
        if len(rows):
            return self._read(given, rows, tokens, rows[:0])[0]
        # No view: FSDP2 puts its hooks on what a forward returns.
        return widened(given.hidden.new_zeros(0))

    def _read(
        self, given: HeadInput, text_rows: Tensor, targets: Tensor, slot_rows: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the first four fields of a `LogitStats`, of unique rows.

        A chunk may have rows of both kinds. Its logits are dropped after the forward and
        computed again in backward, unless one chunk has all rows.
        """
        rows = torch.cat([text_rows, slot_rows])
        step = _head_rows(given)
        read = cast(Callable[..., tuple[Tensor, ...]], _ReadRows.apply)

        def part(hidden: Tensor, aims: Tensor) -> tuple[Tensor, ...]:
            nth = torch.arange(len(hidden), device=hidden.device)
            of_text, of_slots = nth[: len(aims)], nth[len(aims) :]
            logits = given.head(hidden)
            return read(logits, of_text, aims, of_slots, self.coord_ids, self.temperature)

        hidden = given.hidden.index_select(0, rows)
        if len(rows) <= step:
            return part(hidden, targets)
        parts = [
            _recomputed(part, chunk, targets[start : start + step])
            for start, chunk in zip(range(0, len(rows), step), hidden.split(step), strict=True)
        ]
        return tuple(torch.cat(kind) for kind in zip(*parts, strict=True))


def _head_rows(given: HeadInput) -> int:
    return max(1, HEAD_ELEMENTS // given.vocabulary)


def _recomputed(read: Callable[..., Any], *inputs: Tensor) -> Any:
    """Return `read(*inputs)`; backward computes it again from the inputs."""
    return checkpoint(read, *inputs, use_reentrant=False)


class _ReadRows(torch.autograd.Function):
    """(r, V) logits, T text rows and targets, K slot rows -> first four fields of a `LogitStats`.

    Rows are unique.
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
        ctx.found = (plain, text, mass, slot)
        ctx.temperature = temperature
        nll = plain - bounded(logits[text_rows, targets])
        coord = widened(logits[slot_rows[:, None], coord_ids])
        return nll, mass.clone(), slot.clone(), coord

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        of_nll, of_mass, of_slot, of_coord = upstream
        logits, text_rows, targets, slot_rows, coord_ids = ctx.saved_tensors
        plain, text, mass, slot = ctx.found
        source, at = _Rows(logits, coord_ids), ctx.temperature
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
            replaced = is_outside(widened(logits[rows, aims]))
            block[nth, aims] -= of_nll[part].masked_fill(replaced, 0.0)
            gradient[rows] = block.to(gradient.dtype)
        for part in source.parts(slot_rows):
            rows = slot_rows[part]
            block = source.pulled(rows, slot[part], at, of_slot[part])
            block.index_add_(1, coord_ids, of_coord[part])
            gradient[rows] = block.to(gradient.dtype)
        return gradient, None, None, None, None, None


class _Rows:
    """Bounded rows of (r, V) logits in chunks, without gradients."""

    def __init__(self, logits: Tensor, coord_ids: Tensor) -> None:
        self._logits = logits
        self._coord_ids = coord_ids

    def parts(self, rows: Tensor) -> Iterator[slice]:
        """Yield slices of `rows`, one per chunk of logits."""
        elements = _CHUNK_ELEMENTS if numerics.is_on_cuda(rows) else _CHUNK_ELEMENTS_CPU
        step = max(1, elements // self._logits.shape[-1])
        return (slice(start, start + step) for start in range(0, len(rows), step))

    def logsumexp(self, rows: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the logsumexp and the text mass of each row; (R,) -> (R,), (R,)."""
        lse = torch.empty(len(rows), dtype=widened(self._logits[:0]).dtype, device=rows.device)
        mass = torch.empty_like(lse)
        for part in self.parts(rows):
            own = bound_(self._divided(rows[part], temperature))
            lse[part], mass[part] = logsumexp_and_text_mass_(own, self._coord_ids)
        return lse, mass

    def pulled(
        self,
        rows: Tensor,
        lse: Tensor,
        temperature: float,
        whole: Tensor,
        coord: Tensor | None = None,
    ) -> Tensor:
        """Return the gradient of the logits of `rows`, (r, V), for the gradient of the logsumexp.

        It is the softmax times `whole` (r,), but at the coordinates times `coord` (r,) if given.
        """
        scaled = self._divided(rows, temperature)
        replaced = is_outside(scaled)  # a bound has no gradient
        soft = bound_(scaled).sub_(lse[:, None]).exp_()
        inner = None
        if coord is not None:
            inner = soft.index_select(1, self._coord_ids).mul_((coord / temperature)[:, None])
        soft.mul_((whole / temperature)[:, None])
        if inner is not None:
            soft.index_copy_(1, self._coord_ids, inner)
        return soft.masked_fill_(replaced, 0.0)

    def _divided(self, rows: Tensor, temperature: float) -> Tensor:
        """Return a copy of the logits of `rows`, divided by the temperature."""
        own = widened(self._logits.index_select(0, rows))
        return own if temperature == 1.0 else own.div_(temperature)
