"""The pieces the objectives are made of: boxes, gates, fences, monitors."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.objectives.bbox_geo import ciou_loss
from learner.objectives.numerics import (
    bound_,
    bounded,
    coord_gate,
    coord_mass,
    full_logsumexp,
    is_outside,
    logsumexp_and_text_mass_,
    text_gate,
)
from tests.unit.loss_rows import (
    COORD_IDS,
    TEXT_IDS,
    VOCAB,
    Case,
    answer_row,
    coord_diag,
    declared,
    logits_for,
    token_ce,
)
from tests.unit.plain_losses import ciou, trade_off

CORNERS = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(-0.5, 1.5))
BOXES = st.tuples(CORNERS, CORNERS, CORNERS, CORNERS)


# ---- boxes ---------------------------------------------------------------------------


@pytest.mark.req("LOSS-03")
@given(BOXES, BOXES)
def test_ciou_of_any_boxes_points_and_lines_is_the_plain_one_with_a_finite_gradient(
    predicted: tuple[float, ...], truth: tuple[float, ...]
) -> None:
    boxes = torch.tensor([predicted, truth], dtype=torch.float64)
    expected = ciou(predicted, truth, trade_off(predicted, truth))
    assert ciou_loss(boxes[:1], boxes[1:]).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    narrow = boxes[:1].float().requires_grad_()
    loss = ciou_loss(narrow, boxes[1:].float()).sum()
    (gradient,) = torch.autograd.grad(loss, narrow)
    assert math.isfinite(loss.item())
    assert torch.isfinite(gradient).all()


# ---- gates and fences ----------------------------------------------------------------


@pytest.mark.req("LOSS-04")
@pytest.mark.parametrize("raised", [0.0, 5.0, 9.0])
def test_gates_keep_their_digits_however_much_mass_the_coordinates_have(raised: float) -> None:
    """Each row is read by itself, however far it is from the others."""
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3))
    logits[:, COORD_IDS] += raised
    logits[1:3] += torch.tensor([[512.0], [-512.0]])
    probs = torch.softmax(logits.double(), 1)
    p_text, p_coord = probs[:, TEXT_IDS].sum(1), probs[:, COORD_IDS].sum(1)
    assert (p_text > 1e-6).all()
    full, coord = full_logsumexp(logits), logits[:, COORD_IDS]
    assert coord_gate(full, coord).double().tolist() == pytest.approx(
        (-p_coord.log()).tolist(), abs=1e-4
    )
    assert coord_mass(full, coord).double().tolist() == pytest.approx(p_coord.tolist(), abs=1e-4)
    again, text_mass = logsumexp_and_text_mass_(logits.clone(), torch.tensor(COORD_IDS))
    assert torch.allclose(again, full)
    assert text_mass.double().tolist() == pytest.approx(p_text.tolist(), rel=1e-4)
    assert torch.allclose(text_gate(text_mass).double(), -p_text.log(), atol=1e-4)


@pytest.mark.req("LOSS-04")
def test_the_temperature_divides_before_the_bounds_hold() -> None:
    raw = torch.tensor([math.nan, math.inf, -math.inf, 2e5, 6e3, 1.0])
    assert bounded(raw, 0.5).tolist() == [0.0, 1e4, -1e4, 1e4, 1e4, 2.0]
    assert bounded(raw, 2.0).tolist() == [0.0, 1e4, -1e4, 1e4, 3e3, 0.5]
    assert bounded(raw, 30.0).tolist() == pytest.approx([0.0, 1e4, -1e4, 2e5 / 30, 200, 1 / 30])


@pytest.mark.req("LOSS-04")
def test_bounds_in_place_are_the_bounds() -> None:
    raw = torch.tensor([math.nan, math.inf, -math.inf, 2e4, -2e4, 1e4, -1e4, 5.0])
    assert torch.equal(bound_(raw.clone()), bounded(raw))
    assert is_outside(raw).tolist() == [True, True, True, True, True, False, False, False]


# ---- monitors ------------------------------------------------------------------------


@pytest.mark.req("LOSS-06", "CFG-08")
@pytest.mark.parametrize(
    "entry", [{"enabled": False}, {"weight": 0.0}, {"channels": ("A",)}, {"channels": ()}]
)
def test_a_disabled_monitor_has_no_values(entry: dict[str, Any]) -> None:
    config = declared(token_ce(), diagnostics=[coord_diag(**entry)])
    row = answer_row()
    assert Case(config, row, "B").loss([logits_for(row, 0)]).diagnostics == {}
