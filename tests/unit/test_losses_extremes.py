"""Logits no model should have: losses, parts and gradients stay finite, and right (LOSS-03, -04).

What no fence replaces keeps the gradient that the plain formulas give it.
"""

import math
from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

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

INF, NAN = math.inf, math.nan
EVERYWHERE = range(VOCAB)
MIXTURE = [NAN, INF, -INF, 1e4, -1e4, 9.5e3, 5e4, -3e38, 0.0, 1.0]


def at(ids: Sequence[int], value: float) -> Callable[[Tensor], None]:
    def write(row: Tensor) -> None:
        row[ids] = value

    return write


def mixed(row: Tensor) -> None:
    draw = torch.Generator().manual_seed(9)
    row.copy_(torch.tensor(MIXTURE)[torch.randint(len(MIXTURE), (VOCAB,), generator=draw)])


ROWS: dict[str, Callable[[Tensor], None]] = {
    "all 0": at(EVERYWHERE, 0.0),
    "all 1e4": at(EVERYWHERE, 1e4),
    "all -1e4": at(EVERYWHERE, -1e4),
    "all 9.9e3": at(EVERYWHERE, 9.9e3),
    "all inf": at(EVERYWHERE, INF),
    "all -inf": at(EVERYWHERE, -INF),
    "all nan": at(EVERYWHERE, NAN),
    "coordinates inf": at(COORD_IDS, INF),
    "coordinates -inf": at(COORD_IDS, -INF),
    "text inf": at(TEXT_IDS, INF),
    "text -inf": at(TEXT_IDS, -INF),
    "one coordinate 9.9e3": at(COORD_IDS[300:301], 9.9e3),
    "one coordinate inf": at(COORD_IDS[300:301], INF),
    "one text id inf": at(TEXT_IDS[3:4], INF),
    "one coordinate -inf": at(COORD_IDS[10:11], -INF),
    "some nan": at([TEXT_IDS[3], COORD_IDS[10], COORD_IDS[300]], NAN),
    "mixed": mixed,
}
WORST = ["all inf", "all nan", "mixed"]
KINDS = ["text", "slots", "the rest", "all"]


def indices(case: Case, kind: str) -> list[int]:
    """Rows of logits that predict supervised text, coordinates, or nothing that is taught."""
    text = [position - 1 for position, _ in case.plain.text()]
    slots = [position - 1 for position, _ in case.plain.slots()]
    rest = [row for row in range(len(case.row.roles)) if row not in text + slots]
    return {"text": text, "slots": slots, "the rest": rest, "all": text + slots + rest}[kind]


def spoilt(case: Case, count: int, kind: str, name: str) -> list[Tensor]:
    """Ordinary logits of `count` forwards with the rows of a kind overwritten."""
    logits = [logits_for(case.row, seed) for seed in range(count)]
    for forward in logits:
        for row in indices(case, kind):
            ROWS[name](forward[row])
    return logits


def assert_finite(case: Case, logits: list[Tensor]) -> None:
    result = case.loss(logits)
    values = [result.total.item(), *result.atoms.values(), *result.diagnostics.values()]
    assert all(map(math.isfinite, values))
    assert sum(result.atoms.values()) == pytest.approx(result.total.item(), rel=1e-6, abs=1e-4)
    assert all(torch.isfinite(gradient).all() for gradient in case.gradients(logits))


@pytest.mark.req("LOSS-03", "LOSS-04")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in ROWS]
    + [(name, dtype) for name in WORST for dtype in (torch.float64, torch.bfloat16)],
)
def test_no_logits_make_a_loss_or_a_gradient_that_is_not_finite(
    name: str, dtype: torch.dtype
) -> None:
    for row, channel, count in EXAMPLES:
        case = Case(EVERYTHING, row, channel)
        for kind in KINDS:
            assert_finite(case, [z.to(dtype) for z in spoilt(case, count, kind, name)])


@pytest.mark.req("LOSS-03", "LOSS-04")
@FEW
@given(CASES, st.integers(0, 2**32))
def test_no_mixture_of_rows_makes_a_loss_that_is_not_finite(
    drawn: tuple[Case, list[Tensor]], seed: int
) -> None:
    draw, (case, logits) = Random(seed), drawn
    for forward in logits:
        for index in draw.sample(range(len(forward)), len(forward) // 2):
            ROWS[draw.choice(list(ROWS))](forward[index])
    assert_finite(case, [z.float() for z in logits])


def off_the_fence(logits: Tensor, temperature: float) -> Tensor:
    """Whether a logit is not where a fence begins, where there is no slope; like `logits`."""
    edge = (logits.abs() == 1e4) | ((logits / temperature).abs() == 1e4)
    return (~edge).to(logits.dtype)


@pytest.mark.req("LOSS-01", "LOSS-03", "LOSS-04")
@pytest.mark.parametrize("kind", ["text", "slots"])
@pytest.mark.parametrize("name", ROWS)
def test_bounds_change_the_gradient_only_of_what_they_replace(name: str, kind: str) -> None:
    # Where all coordinates are decoded to one place, boxes are points: there CIoU has no slope.
    config = SMOOTH if name.startswith("all") else EVERYTHING
    for case, count in (
        (Case(config, answer_row(samples=1), "B"), 1),
        (Case(config, annotation_row(), "A"), 2),
    ):
        logits = spoilt(case, count, kind, name)
        draw = torch.Generator().manual_seed(1)
        direction = [
            torch.randn(z.shape, generator=draw, dtype=z.dtype) * off_the_fence(z, 0.9)
            for z in logits
        ]

        gradients = case.gradients(logits)
        found = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))
        expected = case.plain.slope(logits, direction, step=1e-5)
        assert found == pytest.approx(expected, rel=1e-4, abs=2e-5), case.channel
        replaced = [g[~(z.abs() <= 1e4)] for g, z in zip(gradients, logits, strict=True)]
        assert not torch.cat(replaced).any()
