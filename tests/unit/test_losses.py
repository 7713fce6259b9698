"""Every objective against a plain float64 implementation, loop by loop."""

import math

import pytest
import torch
from torch import Tensor

from learner.config.pipeline import (
    BboxGeoConfig,
    BboxGeoModule,
    CoordRegConfig,
    CoordRegModule,
    ObjectiveModule,
    PipelineConfig,
    TokenCEConfig,
    TokenCEModule,
)
from learner.coords import COORD_BINS
from learner.losses.bbox_geo import ciou_loss, expected_coords
from learner.losses.coord_reg import soft_targets, wasserstein1
from learner.losses.fences import coord_gate, fenced, full_logsumexp, text_gate
from learner.losses.pipeline import PackLoss, Pipeline
from learner.losses.reading import Readings
from learner.losses.supervision import Supervision
from learner.losses.token_ce import role_weights, token_weights
from learner.types import Channel, Role

VOCAB = 1100
FIRST_COORD = 60
COORD_IDS = list(range(FIRST_COORD, FIRST_COORD + COORD_BINS))

TOKEN_CE = TokenCEConfig(
    desc_ce_weight=0.5,
    rollout_fn_desc_weight=0.25,
    rollout_matched_prefix_struct_weight=0.75,
    self_context_struct_ce_weight=0.0,
    rollout_drop_invalid_struct_ce_multiplier=2.0,
)
BBOX_GEO = BboxGeoConfig(smoothl1_weight=2.0, ciou_weight=0.5)
COORD_REG = CoordRegConfig(
    coord_ce_weight=0.1,
    soft_ce_weight=0.2,
    w1_weight=0.3,
    coord_gate_weight=0.4,
    text_gate_weight=0.5,
    temperature=0.9,
    target_sigma=2.0,
    target_truncate=8,
)


def declared(*modules: ObjectiveModule) -> Pipeline:
    return Pipeline(PipelineConfig(objective=modules, diagnostics=()), COORD_IDS)


def loss_of(objective: Pipeline, logits: Tensor, channel: Channel) -> PackLoss:
    """Of one forward over `row()`."""
    selection = objective.select(row(), channel)
    reading = objective.reader(selection).anchor(logits)
    return objective(Readings(reading, reading), selection, channel)


def pipeline() -> Pipeline:
    both: tuple[Channel, ...] = ("A", "B")
    modules: list[ObjectiveModule] = [
        TokenCEModule(name="token_ce", enabled=True, weight=1.5, channels=both, config=TOKEN_CE),
        BboxGeoModule(name="bbox_geo", enabled=True, weight=0.7, channels=both, config=BBOX_GEO),
        CoordRegModule(name="coord_reg", enabled=True, weight=1.1, channels=both, config=COORD_REG),
    ]
    return declared(*modules)


def row() -> Supervision:
    """Two prompt tokens, then one matched and one appended box with their text."""
    box = [Role.COORD] * 4
    roles = [
        Role.PROMPT,
        Role.PROMPT,
        Role.MATCHED_STRUCTURE,
        Role.MATCHED_DESC,
        *box,
        Role.FALSE_POSITIVE,
    ]
    roles += [Role.APPENDED_STRUCTURE, Role.APPENDED_DESC, *box, Role.CLOSURE, Role.CLOSURE]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, FIRST_COORD, (len(roles),), generator=generator)
    positions = torch.tensor([i for i, r in enumerate(roles) if r == Role.COORD])
    bins = torch.tensor([10.0, 20, 500, 999, 0, 300, 301, 302])
    ids[positions] = FIRST_COORD + torch.randint(0, COORD_BINS, (8,), generator=generator)
    return Supervision(
        input_ids=ids,
        roles=torch.tensor([int(r) for r in roles], dtype=torch.int8),
        has_dropped=torch.ones(len(roles), dtype=torch.bool),
        coord_positions=positions,
        coord_bins=bins,
        boxes=torch.arange(8).view(2, 4),
    )


def plain_text_terms(logits: Tensor, r: Supervision, channel: str) -> tuple[float, float]:
    """(weighted CE, text gate) by LOSS-01 and LOSS-04, one token at a time."""
    desc = TOKEN_CE.desc_ce_weight if channel == "A" else TOKEN_CE.rollout_fn_desc_weight
    ce = weights = gate = count = 0.0
    for p in range(len(r.roles)):
        role = int(r.roles[p])
        weight = {
            Role.MATCHED_STRUCTURE: 0.75 * 2.0,
            Role.APPENDED_STRUCTURE: 1.0 * 2.0,
            Role.APPENDED_DESC: desc,
            Role.CLOSURE: 1.0,
        }.get(role, 0.0)  # type: ignore[call-overload]
        if weight == 0.0:
            continue
        z = logits[p - 1].double()
        ce += weight * float(torch.logsumexp(z, 0) - z[r.input_ids[p]])
        weights += weight
        scaled = z / COORD_REG.temperature
        p_coord = float(torch.softmax(scaled, 0)[COORD_IDS].sum())
        gate += -math.log(max(1 - p_coord, 1e-6))
        count += 1
    return ce / weights, gate / count


def plain_coord_terms(logits: Tensor, r: Supervision) -> dict[str, float]:
    sums = dict.fromkeys(("coord_ce", "coord_soft_ce", "coord_w1", "coord_gate"), 0.0)
    slots = len(r.coord_positions)
    for position, target in zip(r.coord_positions.tolist(), r.coord_bins.tolist(), strict=True):
        z = logits[position - 1].double() / COORD_REG.temperature
        probs = torch.softmax(z[COORD_IDS], 0).tolist()
        q = [
            math.exp(-(((k - target) / COORD_REG.target_sigma) ** 2) / 2)
            if abs(k - target) <= COORD_REG.target_truncate
            else 0.0
            for k in range(COORD_BINS)
        ]
        total = sum(q)
        cdf_p = cdf_q = w1 = soft = 0.0
        for k in range(COORD_BINS):
            cdf_p += probs[k]
            cdf_q += q[k] / total
            w1 += abs(cdf_p - cdf_q) / 999
            soft += -(q[k] / total) * math.log(probs[k])
        sums["coord_ce"] += -math.log(probs[int(target)]) / slots
        sums["coord_soft_ce"] += soft / slots
        sums["coord_w1"] += w1 / slots
        sums["coord_gate"] += (
            float(torch.logsumexp(z, 0) - torch.logsumexp(z[COORD_IDS], 0)) / slots
        )
    return sums


def plain_ciou(a: list[float], b: list[float]) -> float:
    ax1, ax2 = sorted((a[0], a[2]))
    ay1, ay2 = sorted((a[1], a[3]))
    bx1, by1, bx2, by2 = b
    inter = max(0.0, min(ax2, bx2) - max(ax1, bx1)) * max(0.0, min(ay2, by2) - max(ay1, by1))
    union = (ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - inter
    iou = inter / (union + 1e-7)
    c2 = (max(ax2, bx2) - min(ax1, bx1)) ** 2 + (max(ay2, by2) - min(ay1, by1)) ** 2
    rho2 = ((ax1 + ax2 - bx1 - bx2) ** 2 + (ay1 + ay2 - by1 - by2) ** 2) / 4
    v = (4 / math.pi**2) * (
        math.atan((bx2 - bx1) / (by2 - by1 + 1e-7)) - math.atan((ax2 - ax1) / (ay2 - ay1 + 1e-7))
    ) ** 2
    return 1 - iou + rho2 / (c2 + 1e-7) + v * v / (1 - iou + v + 1e-7)


def plain_box_terms(logits: Tensor, r: Supervision) -> tuple[float, float]:
    decoded, truth = [], []
    for position, target in zip(r.coord_positions.tolist(), r.coord_bins.tolist(), strict=True):
        probs = torch.softmax(logits[position - 1].double()[COORD_IDS], 0)
        decoded.append(sum(float(probs[k]) * k / 999 for k in range(COORD_BINS)))
        truth.append(target / 999)
    errors = [0.5 * (d - t) ** 2 for d, t in zip(decoded, truth, strict=True)]
    boxes = [plain_ciou(decoded[i : i + 4], truth[i : i + 4]) for i in (0, 4)]
    return sum(errors) / len(errors), sum(boxes) / len(boxes)


@pytest.mark.req("LOSS-01", "LOSS-03", "LOSS-04", "LOSS-05")
@pytest.mark.parametrize("channel", ["A", "B"])
def test_the_total_is_the_plain_formula_and_the_sum_of_its_atoms(channel: Channel) -> None:
    logits = torch.randn(len(row().roles), VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    result = loss_of(pipeline(), logits, channel)
    ce, text_leak = plain_text_terms(logits, row(), channel)
    coord = plain_coord_terms(logits, row())
    smooth, ciou = plain_box_terms(logits, row())
    expected = 1.5 * ce + 0.7 * (2.0 * smooth + 0.5 * ciou)
    expected += 1.1 * (
        0.1 * coord["coord_ce"]
        + 0.2 * coord["coord_soft_ce"]
        + 0.3 * coord["coord_w1"]
        + 0.4 * coord["coord_gate"]
        + 0.5 * text_leak
    )
    assert result.total.item() == pytest.approx(expected, rel=1e-5)
    assert sum(result.atoms.values()) == pytest.approx(result.total.item(), abs=1e-4)
    coord_prefix = {"A": "loss/A2_coord", "B": "loss/B_coord"}[channel]
    assert result.atoms[f"{coord_prefix}/coord_w1"] == pytest.approx(
        1.1 * 0.3 * coord["coord_w1"], rel=1e-5
    )


@pytest.mark.req("LOSS-01")
def test_roles_become_the_weights_of_the_declared_policy() -> None:
    in_b, in_a = role_weights(TOKEN_CE, "B"), role_weights(TOKEN_CE, "A")
    assert in_b[Role.MATCHED_STRUCTURE] == 0.75
    assert in_b[Role.MATCHED_DESC] == in_b[Role.FALSE_POSITIVE] == in_b[Role.COORD] == 0.0
    assert in_b[Role.APPENDED_STRUCTURE] == in_b[Role.CLOSURE] == 1.0
    assert in_b[Role.APPENDED_DESC] == 0.25
    assert in_a[Role.APPENDED_DESC] == 0.5


@pytest.mark.req("LOSS-01")
def test_only_structure_of_samples_with_dropped_objects_is_multiplied() -> None:
    roles = torch.tensor([Role.APPENDED_STRUCTURE] * 2 + [Role.APPENDED_DESC, Role.CLOSURE])
    dropped = torch.tensor([True, False, True, True])
    assert token_weights(roles, dropped, TOKEN_CE, "B").tolist() == [2.0, 1.0, 0.25, 1.0]


@pytest.mark.req("LOSS-03")
def test_expectation_decoding_is_the_mean_not_the_argmax() -> None:
    logits = torch.full((COORD_BINS,), -1e4)
    logits[0] = logits[999] = 0.0
    assert expected_coords(logits).item() == pytest.approx(0.5, abs=1e-6)


@pytest.mark.req("LOSS-03")
def test_ciou_orders_the_corners_of_a_box_before_it_compares() -> None:
    target = torch.tensor([[0.1, 0.2, 0.6, 0.9]])
    flipped = torch.tensor([[0.6, 0.9, 0.1, 0.2]])
    assert ciou_loss(flipped, target).item() == pytest.approx(0.0, abs=1e-5)


@pytest.mark.req("LOSS-03", "LOSS-04")
@pytest.mark.parametrize("fill", [0.0, 1e4, -1e4, math.inf, -math.inf, math.nan])
def test_extreme_logits_give_finite_losses_and_gradients(fill: float) -> None:
    logits = torch.full((len(row().roles), VOCAB), fill, requires_grad=True)
    result = loss_of(pipeline(), logits, "B")
    result.total.backward()
    assert math.isfinite(result.total.item())
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


@pytest.mark.req("LOSS-03")
def test_degenerate_boxes_give_finite_gradients() -> None:
    point = torch.tensor([[0.5, 0.5, 0.5, 0.5]], requires_grad=True)
    loss = ciou_loss(point, torch.tensor([[0.5, 0.5, 0.5, 0.5]])).sum()
    loss.backward()
    assert math.isfinite(loss.item())
    assert point.grad is not None
    assert torch.isfinite(point.grad).all()


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
def test_gates_are_the_two_sides_of_one_mass() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(3))
    coord = logits[:, COORD_IDS]
    full = full_logsumexp(logits)
    leak = coord_gate(full, coord)
    p_coord = torch.softmax(logits.double(), 1)[:, COORD_IDS].sum(1)
    assert torch.allclose(leak.double(), -p_coord.log(), atol=1e-5)
    assert torch.allclose(text_gate(full, coord).double(), -(1 - p_coord).log(), atol=1e-4)


@pytest.mark.req("LOSS-04")
def test_fences_replace_nan_and_bound_infinities() -> None:
    raw = torch.tensor([math.nan, math.inf, -math.inf, 2e5, 1.0])
    assert fenced(raw, 0.5).tolist() == [0.0, 1e4, -1e4, 1e4, 2.0]


@pytest.mark.req("LOSS-01", "LOSS-03")
def test_false_positives_and_prompts_get_no_gradient() -> None:
    supervision = row()
    logits = torch.randn(len(supervision.roles), VOCAB, requires_grad=True)
    loss_of(pipeline(), logits, "B").total.backward()
    assert logits.grad is not None
    touched = {p + 1 for p in logits.grad.abs().sum(1).nonzero().squeeze(1).tolist()}
    for position, role in enumerate(supervision.roles.tolist()):
        silent = role in (Role.PROMPT, Role.FALSE_POSITIVE, Role.MATCHED_DESC)
        assert (position in touched) == (not silent)


@pytest.mark.req("CFG-08", "LOSS-05")
def test_a_module_left_out_of_a_channel_adds_nothing() -> None:
    module = TokenCEModule(
        name="token_ce", enabled=True, weight=1.0, channels=("A",), config=TOKEN_CE
    )
    only_a = declared(module)
    logits = torch.randn(len(row().roles), VOCAB)
    assert loss_of(only_a, logits, "B").total.item() == 0.0
    assert loss_of(only_a, logits, "A").total.item() > 0.0
