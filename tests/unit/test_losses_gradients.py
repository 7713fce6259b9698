"""Gradients of the total with respect to the logits: finite differences of the plain formulas."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from torch import Tensor

from learner.objectives.logit_stats import Reader, Selection, Supervision, Totals
from learner.types import Channel, Role
from tests.unit.loss_rows import (
    CASES,
    COORD_IDS,
    EVERYTHING,
    EXAMPLES,
    FEW,
    SMOOTH,
    TEXT_IDS,
    VOCAB,
    Case,
    annotation_row,
    answer_row,
    logits_for,
)
from tests.unit.packed_logits import as_given


def slope(gradients: Sequence[Tensor], direction: Sequence[Tensor]) -> float:
    return sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))


def random_direction(logits: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Every entry of every forward moves."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(z.shape, generator=draw, dtype=z.dtype) for z in logits]


def taught_rows(case: Case) -> set[int]:
    """Rows of logits that predict a supervised token."""
    plain = case.plain
    taught = [*plain.text(), *plain.slots(), *plain.departures()]
    return {position - 1 for position, _ in taught}


@pytest.mark.req("LOSS-01", "LOSS-03", "LOSS-04", "LOSS-05")
@FEW
@given(CASES)
def test_any_row_under_any_config_has_the_slope_of_the_plain_loss(
    drawn: tuple[Case, list[Tensor]],
) -> None:
    case, logits = drawn
    gradients = case.gradients(logits)
    direction = random_direction(logits, seed=len(case.row.roles))
    expected = case.plain.slope(logits, direction)
    assert slope(gradients, direction) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    silent = [row for row in range(len(case.row.roles)) if row not in taught_rows(case)]
    assert all(not gradient[silent].any() for gradient in gradients)


def entries(case: Case) -> dict[str, tuple[int, int]]:
    """(row, column) of a logit of each kind there is."""
    ids, roles = case.row.input_ids.tolist(), case.row.roles.tolist()
    texts = [p for p, _ in case.plain.text()]
    (slot, target), *_ = case.plain.slots()
    kinds = {"prompt": (0, TEXT_IDS[0])}
    for role in sorted({roles[p] for p in texts}):
        p = next(p for p in texts if roles[p] == role)
        other = next(i for i in TEXT_IDS if i != ids[p])
        name = Role(role).name
        kinds |= {f"target of {name}": (p - 1, ids[p]), f"other text at {name}": (p - 1, other)}
        kinds |= {f"coordinate at {name}": (p - 1, COORD_IDS[500])}
    kinds |= {"nearest bin": (slot - 1, COORD_IDS[round(target)])}
    kinds |= {"other bin": (slot - 1, COORD_IDS[round(target) + 3])}
    kinds |= {"far bin": (slot - 1, COORD_IDS[0]), "text at a slot": (slot - 1, TEXT_IDS[5])}
    return kinds


@pytest.mark.req("LOSS-01", "LOSS-03", "LOSS-04")
@pytest.mark.parametrize(
    ("row", "channel", "count"), [(answer_row(samples=1), "B", 1), (annotation_row(), "A", 2)]
)
def test_a_logit_of_each_kind_has_the_slope_of_the_plain_loss(
    row: Supervision, channel: Channel, count: int
) -> None:
    case = Case(EVERYTHING, row, channel)
    logits = [logits_for(row, 40 + seed) for seed in range(count)]
    gradients = case.gradients(logits)
    for forward, gradient in enumerate(gradients):
        for kind, (at, column) in entries(case).items():
            direction = [torch.zeros_like(z) for z in logits]
            direction[forward][at, column] = 1.0
            expected = case.plain.slope(logits, direction)
            found = gradient[at, column].item()
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-8), (forward, kind)


@pytest.mark.req("LOSS-01", "LOSS-03", "LOSS-04")
@pytest.mark.parametrize(("row", "channel", "count"), EXAMPLES)
def test_the_pipeline_passes_gradcheck(row: Supervision, channel: Channel, count: int) -> None:
    """All columns at once, in random directions."""
    case = Case(SMOOTH, row, channel)
    logits = [logits_for(row, 60 + seed).requires_grad_() for seed in range(count)]
    assert torch.autograd.gradcheck(lambda *z: case.loss(z).total, logits, fast_mode=True)


@pytest.mark.req("LOSS-03")
def test_the_pipeline_with_ciou_has_the_slope_of_the_plain_loss_in_many_directions() -> None:
    case = Case(EVERYTHING, annotation_row(), "A")
    logits = [logits_for(case.row, 80), logits_for(case.row, 81)]
    gradients = case.gradients(logits)
    for seed in range(4):
        direction = random_direction(logits, seed)
        expected = case.plain.slope(logits, direction)
        assert slope(gradients, direction) == pytest.approx(expected, rel=1e-6, abs=1e-7)


def small_selection(text: Sequence[int], slots: Sequence[int]) -> Selection:
    """Of ten rows over a vocabulary of twelve. Two coordinates depart."""
    one = torch.ones(())
    return Selection(
        text_rows=torch.tensor(text, dtype=torch.long),
        text_targets=torch.arange(len(text)) % 12,
        text_roles=torch.full((len(text),), int(Role.CLOSURE), dtype=torch.int8),
        text_weights=torch.ones(len(text)),
        slot_rows=torch.tensor(slots, dtype=torch.long),
        slot_bins=torch.zeros(len(slots)),
        boxes=torch.zeros(0, 4, dtype=torch.long),
        departure_rows=torch.tensor(text[:2], dtype=torch.long),
        departure_tokens=torch.tensor([11, 2][: len(text)]),
        departure_targets=torch.tensor([3, 9][: len(text)]),
        kept_rows=torch.zeros(0, dtype=torch.long),
        kept_tokens=torch.zeros(0, dtype=torch.long),
        kept_roles=torch.zeros(0, dtype=torch.int8),
        kept_logprobs=torch.zeros(0),
        totals=Totals(one, one, 1, 1, 1),
    )


SELECTIONS = [([7, 2, 4], [3, 0, 9, 5]), ([1, 2], []), ([], [6, 1]), ([], [])]


@pytest.mark.req("LOSS-01", "LOSS-04")
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize(("text", "slots"), SELECTIONS)
def test_a_reading_passes_gradcheck_entry_by_entry(
    temperature: float, text: list[int], slots: list[int]
) -> None:
    selection = small_selection(text, slots)
    ids = torch.tensor([9, 2, 11, 5, 3])
    reader = Reader(selection, ids, temperature, final_text=False, radius=1)
    logits = logits_for_reading(seed=len(text)).requires_grad_()
    ways: list[Callable[[Tensor], tuple[Tensor, ...]]] = [
        lambda z: tuple(reader.anchor(as_given(z))),
        lambda z: tuple(reader.final(as_given(z))),
        lambda z: (reader.slots(as_given(z)),),
    ]
    for read in ways:
        assert torch.autograd.gradcheck(read, (logits,))


def logits_for_reading(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(10, 12, generator=draw, dtype=torch.float64)


@pytest.mark.req("LOSS-01", "LOSS-04")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("row", "channel", "count"), EXAMPLES)
def test_logits_of_lower_precision_get_the_gradient_of_their_values(
    row: Supervision, channel: Channel, count: int, dtype: torch.dtype
) -> None:
    case = Case(EVERYTHING, row, channel)
    logits = [logits_for(row, 20 + seed).to(dtype) for seed in range(count)]
    wide = case.gradients([z.double() for z in logits])
    for found, expected in zip(case.gradients(logits), wide, strict=True):
        assert found.dtype == dtype
        assert found.shape == (len(row.roles), VOCAB)
        rounding = 2 * torch.finfo(dtype).eps * expected.abs() + 1e-5 * expected.abs().max()
        assert ((found.double() - expected).abs() <= rounding).all()
