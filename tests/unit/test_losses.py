"""The objectives against the plain formulas in float64, and the pieces they are made of.

Values, names, gradients and monitors of any row under any config, and of logits that no model
should have.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.objectives.bbox_geo import ciou_loss
from learner.objectives.config import PipelineConfig
from learner.objectives.logit_stats import Reader, Supervision
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
from learner.objectives.pipeline import PackLoss
from learner.types import Channel
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
    coord_diag,
    declared,
    duplicate_ul,
    logits_for,
    random_case,
    token_ce,
)
from tests.unit.packed_logits import as_given
from tests.unit.plain_losses import ciou, trade_off

CORNERS = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(-0.5, 1.5))
BOXES = st.tuples(CORNERS, CORNERS, CORNERS, CORNERS)


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
    assert text_gate(torch.zeros(1)).item() == pytest.approx(-math.log(1e-6))


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


@pytest.mark.req("LOSS-06", "CFG-08")
@pytest.mark.parametrize(
    "entry", [{"enabled": False}, {"weight": 0.0}, {"channels": ("A",)}, {"channels": ()}]
)
def test_a_disabled_monitor_has_no_values(entry: dict[str, Any]) -> None:
    config = declared(token_ce(), diagnostics=[coord_diag(**entry)])
    row = answer_row()
    assert Case(config, row, "B").loss([logits_for(row, 0)]).diagnostics == {}


INF, NAN = math.inf, math.nan
MONITORS = {
    "acc_top1",
    "acc_top5",
    "p_gt_mean",
    "expected_bin_mae",
    "entropy_mean",
    "coord_mass_mean",
}


def check_values(case: Case, logits: list[Tensor], rel: float) -> PackLoss:
    result = case.loss(logits)
    expected = case.plain.atoms(logits)
    for key in expected.keys() | result.atoms.keys():
        found, wanted = result.atoms.get(key, 0.0), expected.get(key, 0.0)
        assert found == pytest.approx(wanted, rel=rel, abs=rel), key
    assert result.total.item() == pytest.approx(sum(expected.values()), rel=rel, abs=rel)
    return result


def check_monitors(case: Case, logits: list[Tensor], result: PackLoss) -> None:
    """The sums of each forward are the plain ones."""
    assert result.slots == len(case.row.coord_positions)
    seen = dict(zip(["A1", "A2"] if case.channel == "A" else ["B"], logits, strict=False))
    assert set(result.diagnostics) == {f"coord_diag/{p}/{name}" for p in seen for name in MONITORS}
    for provenance, forward in seen.items():
        for name, value in case.plain.diagnostics(forward, gate_temperature(case.config)).items():
            found = result.diagnostics[f"coord_diag/{provenance}/{name}"]
            assert found == pytest.approx(value, rel=1e-6, abs=1e-6), name


def gate_temperature(config: PipelineConfig) -> float:
    regs = (m.config for m in config.objective if m.name == "coord_reg" and m.enabled)
    return next((reg.temperature for reg in regs), 1.0)


def random_direction(logits: Sequence[Tensor], seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(z.shape, generator=draw, dtype=z.dtype) for z in logits]


def slope(gradients: Sequence[Tensor], direction: Sequence[Tensor]) -> float:
    return sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))


def untaught_rows(case: Case) -> list[int]:
    """Rows of logits that predict no supervised token."""
    plain = case.plain
    taught = {p - 1 for p, _ in [*plain.text(), *plain.slots(), *plain.departures()]}
    return [row for row in range(len(case.row.roles)) if row not in taught]


# ---- any row under any config --------------------------------------------------------


@pytest.mark.req("LOSS-01", "LOSS-03", "LOSS-04", "LOSS-05", "LOSS-06", "RES-05", "DATA-02")
@pytest.mark.scenario(
    "Expectation decoding uses probability-weighted mean (not argmax)",
    "Geometry losses operate on normalized coordinates",
    "Dropped invalid instances may upweight B3 structure CE",
    "CE masking follows matched/FP/FN policy",
    "Stop-neutral masking is not applied",
    "Desc can be fully masked while keeping structure CE",
)
@FEW
@given(CASES)
def test_any_row_under_any_config_has_the_plain_loss(drawn: tuple[Case, list[Tensor]]) -> None:
    case, logits = drawn
    result = check_values(case, logits, rel=1e-6)
    check_monitors(case, logits, result)
    narrow = case.loss([z.float() for z in logits])
    assert sum(narrow.atoms.values()) == pytest.approx(narrow.total.item(), abs=1e-4)

    gradients = case.gradients(logits)
    direction = random_direction(logits, seed=len(case.row.roles))
    expected = case.plain.slope(logits, direction)
    assert slope(gradients, direction) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert not any(gradient[untaught_rows(case)].any() for gradient in gradients)

    unwatched = replace(case, config=case.config.model_copy(update={"diagnostics": ()}))
    alone = unwatched.loss(logits)
    assert (alone.total.item(), alone.atoms) == (result.total.item(), result.atoms)
    for one, other in zip(gradients, unwatched.gradients(logits), strict=True):
        assert torch.equal(one, other)


@pytest.mark.req("CLEAN-02")
def test_a_departing_coordinate_whose_neighbours_have_all_mass_has_the_plain_loss() -> None:
    check_values(*random_case(129542), rel=1e-6)


@pytest.mark.req("CLEAN-02")
def test_a_bin_as_near_to_the_target_as_to_a_departing_coordinate_does_not_count() -> None:
    row = answer_row()
    row.departures[1, 1] = COORD_IDS[873 - 14]  # the target's coordinate has bin 873
    logits = logits_for(row, 0)
    logits[row.departures[1, 0] - 1, COORD_IDS[873 - 7]] += 10
    check_values(Case(EVERYTHING, row, "B"), [logits], rel=1e-6)


@pytest.mark.req("CLEAN-02", "LOSS-05")
def test_the_duplicates_of_a_part_of_a_pack_count_over_those_of_the_whole() -> None:
    case = Case(declared(duplicate_ul()), answer_row(), "B")
    own, logits = case.select(), [logits_for(case.row, 0)]
    part = replace(own, totals=replace(own.totals, departures=2 * own.totals.departures))
    assert 2 * case.loss(logits, part).total.item() == pytest.approx(case.loss(logits).total.item())


@pytest.mark.req("LOSS-01", "LOSS-03", "LOSS-04", "LOSS-05")
@pytest.mark.parametrize(("row", "channel", "count"), EXAMPLES)
@pytest.mark.parametrize(
    ("dtype", "rel"), [(torch.float64, 1e-6), (torch.float32, 2e-5), (torch.bfloat16, 2e-5)]
)
def test_logits_of_any_type_have_the_loss_and_the_gradient_of_their_values(
    row: Supervision, channel: Channel, count: int, dtype: torch.dtype, rel: float
) -> None:
    case = Case(EVERYTHING, row, channel)
    logits = [logits_for(row, seed).to(dtype) for seed in range(count)]
    result = check_values(case, logits, rel)
    assert result.total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(math.isfinite(value) and value > 0 for value in result.atoms.values())
    wide = case.gradients([z.double() for z in logits])
    for found, expected in zip(case.gradients(logits), wide, strict=True):
        assert (found.dtype, found.shape) == (dtype, (len(row.roles), VOCAB))
        rounding = 2 * torch.finfo(dtype).eps * expected.abs() + 1e-5 * expected.abs().max()
        assert ((found.double() - expected).abs() <= rounding).all()


@pytest.mark.req("LOSS-05", "CFG-08", "RES-10", "LOSS-04")
@pytest.mark.scenario("Enabled coord soft-CE/W1 increases Stage-2 coord regularization")
def test_a_term_is_there_exactly_where_it_is_declared_with_a_weight() -> None:
    case = Case(EVERYTHING, annotation_row(), "A")
    logits = [logits_for(case.row, seed) for seed in (0, 1)]
    names = {
        "self_context_struct_ce_weight": "loss/A2_text/struct_ce",
        "smoothl1_weight": "loss/A2_coord/bbox_smoothl1",
        "ciou_weight": "loss/A2_coord/bbox_ciou",
        "coord_ce_weight": "loss/A2_coord/coord_ce",
        "soft_ce_weight": "loss/A2_coord/coord_soft_ce",
        "w1_weight": "loss/A2_coord/coord_w1",
        "coord_gate_weight": "loss/A2_coord/coord_gate",
        "text_gate_weight": "loss/A2_coord/text_gate",
    }
    whole = case.loss(logits).atoms
    for position, module in enumerate(EVERYTHING.objective):
        without = [*EVERYTHING.objective]
        for field in type(module.config).model_fields:
            if field in names:
                config = module.config.model_copy(update={field: 0.0})
                without[position] = module.model_copy(update={"config": config})
                found = replace(case, config=declared(*without)).loss(logits).atoms
                assert found.keys() == whole.keys() - {names.pop(field)}
    assert not names
    without = [module for module in EVERYTHING.objective if module.name != "bbox_geo"]
    found = replace(case, config=declared(*without)).loss(logits).atoms
    assert found == {key: value for key, value in whole.items() if "bbox" not in key}


@pytest.mark.req("LOSS-01", "LOSS-04")
@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 0.7), (torch.bfloat16, 0.7)])
def test_a_wide_vocabulary_is_read_as_a_whole(dtype: torch.dtype, temperature: float) -> None:
    """Its supervised rows are 12 MiB in float32: more than is read at once."""
    row, width = annotation_row(), 2**18
    draw = torch.Generator().manual_seed(5)
    logits = (4 * torch.randn(len(row.roles), width, generator=draw)).to(dtype).requires_grad_()
    selection = Case(EVERYTHING, row, "A").select()
    ids = torch.tensor(COORD_IDS)
    reading = Reader(selection, ids, temperature, final_text=True, radius=None).anchor(
        as_given(logits)
    )

    wide = logits.detach().double().requires_grad_()
    text, slots = wide[selection.text_rows], wide[selection.slot_rows]
    chosen = text.gather(1, selection.text_targets[:, None]).squeeze(1)
    expected = (
        text.logsumexp(1) - chosen,
        (text / temperature).softmax(1).index_fill(1, ids, 0.0).sum(1),
        (slots / temperature).logsumexp(1),
        slots[:, ids],
    )
    pulls = [torch.randn(value.shape, generator=draw, dtype=value.dtype) for value in expected]
    narrow = [pull.to(found.dtype) for pull, found in zip(pulls, reading[:4], strict=True)]
    (gradient,) = torch.autograd.grad(list(reading[:4]), logits, narrow)
    (wanted,) = torch.autograd.grad(expected, wide, pulls)
    for found, value in zip(reading[:4], expected, strict=True):
        assert torch.allclose(found.double(), value, rtol=1e-5)
    assert gradient.dtype == dtype
    rtol = max(2 * torch.finfo(dtype).eps, 1e-5)
    assert torch.allclose(gradient.double(), wanted, rtol=rtol, atol=1e-6)


# ---- logits that no model should have ------------------------------------------------

MIXTURE = [NAN, INF, -INF, 1e4, -1e4, 9.5e3, 5e4, -3e38, 0.0, 1.0]


def at(ids: Sequence[int], value: float) -> Callable[[Tensor], None]:
    def write(row: Tensor) -> None:
        row[ids] = value

    return write


def mixed(row: Tensor) -> None:
    draw = torch.Generator().manual_seed(9)
    row.copy_(torch.tensor(MIXTURE)[torch.randint(len(MIXTURE), (VOCAB,), generator=draw)])


ROWS: dict[str, Callable[[Tensor], None]] = {
    **{f"all {value}": at(range(VOCAB), value) for value in (0.0, 9.9e3, INF, -INF, NAN)},
    "coordinates inf": at(COORD_IDS, INF),
    "coordinates -inf": at(COORD_IDS, -INF),
    "text inf": at(TEXT_IDS, INF),
    "text -inf": at(TEXT_IDS, -INF),
    "one coordinate inf": at(COORD_IDS[300:301], INF),
    "one text id inf": at(TEXT_IDS[3:4], INF),
    "one coordinate -inf": at(COORD_IDS[10:11], -INF),
    "some nan": at([TEXT_IDS[3], COORD_IDS[10], COORD_IDS[300]], NAN),
    "mixed": mixed,
}
WORST = ["all inf", "all nan", "mixed"]
FENCED = [
    *WORST,
    "all 9900.0",
    "coordinates inf",
    "one coordinate inf",
    "one text id inf",
    "some nan",
]
KINDS = ["text", "slots", "the rest", "all"]


def spoilt(case: Case, count: int, kind: str, name: str) -> list[Tensor]:
    """Ordinary logits of `count` forwards with the rows of a kind overwritten."""
    text = [position - 1 for position, _ in case.plain.text()]
    slots = [position - 1 for position, _ in case.plain.slots()]
    rest = [row for row in range(len(case.row.roles)) if row not in text + slots]
    rows = {"text": text, "slots": slots, "the rest": rest, "all": text + slots + rest}[kind]
    logits = [logits_for(case.row, seed) for seed in range(count)]
    for forward in logits:
        for row in rows:
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
def test_losses_and_gradients_of_any_logits_are_finite(name: str, dtype: torch.dtype) -> None:
    for row, channel, count in EXAMPLES:
        case = Case(EVERYTHING, row, channel)
        for kind in KINDS:
            assert_finite(case, [z.to(dtype) for z in spoilt(case, count, kind, name)])


def off_the_fence(logits: Tensor, temperature: float) -> Tensor:
    """Whether a logit is not where a fence begins, where there is no slope; like `logits`."""
    edge = (logits.abs() == 1e4) | ((logits / temperature).abs() == 1e4)
    return (~edge).to(logits.dtype)


@pytest.mark.req("LOSS-01", "LOSS-03", "LOSS-04", "RES-02")
@pytest.mark.scenario("Gate-loss numeric fences are consistent across training and rollout paths")
@pytest.mark.parametrize("kind", ["text", "slots"])
@pytest.mark.parametrize("name", FENCED)
def test_bounds_change_the_gradient_only_of_what_they_replace(name: str, kind: str) -> None:
    # Where all coordinates are decoded to one place, boxes are points: there CIoU has no slope.
    config = SMOOTH if name.startswith("all") else EVERYTHING
    for case, count in (
        (Case(config, answer_row(samples=1), "B"), 1),
        (Case(config, annotation_row(), "A"), 2),
    ):
        logits = spoilt(case, count, kind, name)
        direction = [
            d * off_the_fence(z, 0.9)
            for d, z in zip(random_direction(logits, seed=1), logits, strict=True)
        ]
        gradients = case.gradients(logits)
        expected = case.plain.slope(logits, direction, step=1e-5)
        assert slope(gradients, direction) == pytest.approx(expected, rel=1e-4, abs=2e-5)
        replaced = [g[~(z.abs() <= 1e4)] for g, z in zip(gradients, logits, strict=True)]
        assert not torch.cat(replaced).any()
