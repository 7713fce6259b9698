"""The pieces the objectives are made of: weights of roles, decoding, targets, gates, fences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.objectives.bbox_geo import ciou_loss, expected_coords
from learner.objectives.coord_reg import soft_targets, wasserstein1
from learner.objectives.numerics import (
    all_inside,
    bound_,
    bounded,
    bounded_gradient,
    coord_gate,
    coord_mass,
    full_logsumexp,
    logsumexp_and_text_mass_,
    text_gate,
)
from learner.objectives.token_ce import role_weights, token_weights
from learner.stages.coords import COORD_BINS
from learner.types import Role
from tests.unit.loss_rows import (
    COORD_IDS,
    COORD_REG,
    SOME,
    TEXT_IDS,
    TOKEN_CE,
    VOCAB,
    Case,
    annotation_row,
    answer_row,
    coord_reg,
    declared,
    logits_for,
    token_ce,
)
from tests.unit.packed_logits import as_given
from tests.unit.plain_losses import ciou, soft_target, trade_off
from tests.unit.plain_losses import wasserstein1 as plain_wasserstein1

CORNERS = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(-0.5, 1.5))
BOXES = st.tuples(CORNERS, CORNERS, CORNERS, CORNERS)


@pytest.mark.req("LOSS-01", "RES-05", "RES-09")
def test_roles_become_the_weights_of_the_declared_policy() -> None:
    in_b, in_a = role_weights(TOKEN_CE, "B"), role_weights(TOKEN_CE, "A")
    assert in_b[Role.MATCHED_STRUCTURE] == 0.75
    assert in_b[Role.MATCHED_DESC] == in_b[Role.FALSE_POSITIVE] == in_b[Role.COORD] == 0.0
    assert in_b[Role.APPENDED_STRUCTURE] == in_b[Role.CLOSURE] == 1.0
    assert in_b[Role.APPENDED_DESC] == 0.25
    assert in_a[Role.APPENDED_DESC] == 0.5
    assert in_a[Role.APPENDED_STRUCTURE] == in_a[Role.CLOSURE] == 1.0
    assert in_a[Role.PROMPT] == in_a[Role.COORD] == in_b[Role.PROMPT] == 0.0


@pytest.mark.req("LOSS-01")
def test_only_structure_of_samples_with_dropped_objects_is_multiplied() -> None:
    taught = [Role.MATCHED_STRUCTURE, Role.APPENDED_STRUCTURE, Role.APPENDED_DESC, Role.CLOSURE]
    roles = torch.tensor([role for role in taught for _ in range(2)])
    dropped = torch.tensor([True, False] * 4)
    weights = [1.5, 0.75, 2.0, 1.0, 0.25, 0.25, 1.0, 1.0]
    assert token_weights(roles, dropped, TOKEN_CE, "B").tolist() == weights


def test_a_row_moves_to_another_device_whole() -> None:
    row = answer_row()
    moved = row.to(torch.device("meta"))
    for name, tensor in vars(row).items():
        found = vars(moved)[name]
        assert found.device.type == "meta"
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype), name


def test_text_of_the_last_forward_is_read_only_where_an_objective_looks_at_it() -> None:
    silent = TOKEN_CE.model_copy(update={"self_context_struct_ce_weight": 0.0})
    ungated = COORD_REG.model_copy(update={"text_gate_weight": 0.0})
    row = annotation_row()
    logits = logits_for(row, 0)
    for text, reg, read in (
        (silent, ungated, False),
        (TOKEN_CE, ungated, True),
        (silent, COORD_REG, True),
    ):
        case = Case(declared(token_ce(text), coord_reg(reg)), row, "A")
        reader = case.pipeline.reader(case.select())
        whole, final = reader.anchor(as_given(logits)), reader.final(as_given(logits))
        assert len(final.text_nll) == len(final.text_mass) == (len(whole.text_nll) if read else 0)
        assert torch.equal(final.slot_lse, whole.slot_lse)
        assert torch.equal(reader.slots(as_given(logits)), whole.slot_coord_logits)


@pytest.mark.req("LOSS-03")
@pytest.mark.scenario("Expectation decoding uses probability-weighted mean (not argmax)")
def test_expectation_decoding_is_the_mean_not_the_argmax() -> None:
    logits = torch.full((COORD_BINS,), -1e4)
    logits[0] = logits[999] = 0.0
    assert expected_coords(logits).item() == pytest.approx(0.5, abs=1e-6)


@pytest.mark.req("LOSS-03")
@SOME
@given(BOXES, BOXES)
def test_ciou_of_any_two_boxes_is_the_plain_one(
    predicted: tuple[float, ...], truth: tuple[float, ...]
) -> None:
    boxes = torch.tensor([predicted, truth], dtype=torch.float64)
    expected = ciou(predicted, truth, trade_off(predicted, truth))
    assert ciou_loss(boxes[:1], boxes[1:]).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.req("LOSS-03")
def test_ciou_orders_the_corners_of_a_box_before_it_compares() -> None:
    target = torch.tensor([[0.1, 0.2, 0.6, 0.9]])
    flipped = torch.tensor([[0.6, 0.9, 0.1, 0.2]])
    assert ciou_loss(flipped, target).item() == pytest.approx(0.0, abs=1e-5)


@pytest.mark.req("LOSS-03")
@SOME
@given(BOXES, BOXES)
def test_any_boxes_points_and_lines_too_have_finite_gradients(
    predicted: tuple[float, ...], truth: tuple[float, ...]
) -> None:
    boxes = torch.tensor([predicted], requires_grad=True)
    loss = ciou_loss(boxes, torch.tensor([truth])).sum()
    (gradient,) = torch.autograd.grad(loss, boxes)
    assert math.isfinite(loss.item())
    assert torch.isfinite(gradient).all()


@pytest.mark.req("LOSS-04")
@SOME
@given(
    st.integers(0, 999 * 16).map(lambda k: k / 16),
    st.one_of(st.floats(0.001, 1.0), st.floats(1.0, 1000.0)),
    st.one_of(st.none(), st.integers(1, 1000)),
)
def test_soft_targets_are_the_plain_bell_however_narrow(
    target: float, sigma: float, truncate: int | None
) -> None:
    q = soft_targets(torch.tensor([target]), sigma, truncate)[0]
    expected = soft_target(target, sigma, truncate)
    assert q.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert q.sum().item() == pytest.approx(1.0, abs=1e-5)
    if truncate is not None:
        beyond = (torch.arange(COORD_BINS) - target).abs() > truncate
        assert not q[beyond].any()


@pytest.mark.req("LOSS-04")
def test_soft_targets_are_a_truncated_normalized_bell() -> None:
    q = soft_targets(torch.tensor([0, 500]), sigma=2.0, truncate=8)
    assert q.sum(1).tolist() == pytest.approx([1.0, 1.0])
    assert q[1, 491] == 0.0
    assert q[1, 492] > 0.0
    assert q[1].argmax() == 500
    assert (q[1, 501] / q[1, 500]).item() == pytest.approx(math.exp(-0.125))


@pytest.mark.req("LOSS-04")
def test_w1_of_two_points_is_their_distance() -> None:
    p = torch.nn.functional.one_hot(torch.tensor([100]), COORD_BINS).float()
    q = torch.nn.functional.one_hot(torch.tensor([340]), COORD_BINS).float()
    assert wasserstein1(p, q).item() == pytest.approx(240 / 999)


@pytest.mark.req("LOSS-04")
def test_w1_of_any_two_distributions_is_the_plain_one() -> None:
    draw = torch.Generator().manual_seed(0)
    p, q = (4 * torch.randn(2, 8, COORD_BINS, generator=draw, dtype=torch.float64)).softmax(-1)
    expected = [plain_wasserstein1(*pair) for pair in zip(p.tolist(), q.tolist(), strict=True)]
    assert wasserstein1(p, q).tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.req("LOSS-04")
def test_gates_are_the_two_sides_of_one_mass() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(3))
    coord = logits[:, COORD_IDS]
    full = full_logsumexp(logits)
    leak = coord_gate(full, coord)
    p_coord = torch.softmax(logits.double(), 1)[:, COORD_IDS].sum(1)
    assert torch.allclose(leak.double(), -p_coord.log(), atol=1e-5)
    assert torch.allclose(coord_mass(full, coord).double(), p_coord, atol=1e-5)
    again, text_mass = logsumexp_and_text_mass_(logits.clone(), torch.tensor(COORD_IDS))
    assert torch.allclose(again, full)
    assert torch.allclose(text_gate(text_mass).double(), -(1 - p_coord).log(), atol=1e-5)


@pytest.mark.req("LOSS-04")
@pytest.mark.parametrize("raised", [0.0, 5.0, 9.0])
def test_the_text_gate_keeps_its_digits_where_the_coordinates_have_nearly_all(
    raised: float,
) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3))
    logits[:, COORD_IDS] += raised
    p_text = torch.softmax(logits.double(), 1)[:, TEXT_IDS].sum(1)
    assert (p_text > 1e-6).all()
    _, text_mass = logsumexp_and_text_mass_(logits, torch.tensor(COORD_IDS))
    assert text_mass.double().tolist() == pytest.approx(p_text.tolist(), rel=1e-5)


@pytest.mark.req("LOSS-04")
def test_the_text_gate_ends_at_its_floor() -> None:
    logits = torch.zeros(2, VOCAB, dtype=torch.float64)
    logits[0, TEXT_IDS] = -50.0
    logits[1, COORD_IDS] = -50.0
    gates = text_gate(logsumexp_and_text_mass_(logits, torch.tensor(COORD_IDS))[1])
    assert gates.tolist() == pytest.approx([-math.log(1e-6), 0.0], abs=1e-12)


@pytest.mark.req("LOSS-04")
def test_the_temperature_divides_before_the_bounds_hold() -> None:
    raw = torch.tensor([math.nan, math.inf, -math.inf, 2e5, 6e3, 1.0])
    assert bounded(raw, 0.5).tolist() == [0.0, 1e4, -1e4, 1e4, 1e4, 2.0]
    assert bounded(raw, 2.0).tolist() == [0.0, 1e4, -1e4, 1e4, 3e3, 0.5]
    assert bounded(raw, 30.0).tolist() == pytest.approx([0.0, 1e4, -1e4, 2e5 / 30, 200, 1 / 30])


@pytest.mark.req("LOSS-04")
def test_bounds_in_place_and_their_gradient_are_those_of_the_bounds() -> None:
    raw = torch.tensor([math.nan, math.inf, -math.inf, 2e4, -2e4, 1e4, -1e4, 5.0])
    assert torch.equal(bound_(raw.clone()), bounded(raw))
    inside = [False, False, False, False, False, True, True, True]
    assert [bool(all_inside(torch.tensor([[0.0, value]]))) for value in raw] == inside
    pulls = torch.arange(1.0, 9.0)
    assert bounded_gradient(raw, pulls).tolist() == [0, 0, 0, 0, 0, 6, 7, 8]
    assert bounded_gradient(raw, pulls, 2.0).tolist() == [0, 0, 0, 4, 5, 6, 7, 8]
    assert bounded_gradient(raw, pulls, 0.5).tolist() == [0, 0, 0, 0, 0, 0, 0, 8]


@pytest.mark.req("LOSS-04")
def test_each_row_is_read_by_itself_however_far_it_is_from_the_others() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    logits += torch.tensor([0.0, 5e3, -5e3])[:, None]
    rows = [logsumexp_and_text_mass_(row[None].clone(), torch.tensor(COORD_IDS)) for row in logits]
    lse, text_mass = logsumexp_and_text_mass_(logits.clone(), torch.tensor(COORD_IDS))
    assert torch.allclose(lse, torch.cat([own for own, _ in rows]), rtol=1e-12)
    assert torch.allclose(text_mass, torch.cat([own for _, own in rows]), rtol=1e-12)
