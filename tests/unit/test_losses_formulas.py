"""The pipeline's total and every part of it against the plain formulas in float64."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from learner.objectives.logit_stats import Reader, Selection, Supervision
from learner.objectives.pipeline import PackLoss
from learner.types import Channel, Role
from tests.unit.loss_rows import (
    CASES,
    COORD_IDS,
    EVERYTHING,
    EXAMPLES,
    FEW,
    Case,
    annotation_row,
    declared,
    logits_for,
    make_row,
    random_case,
)
from tests.unit.packed_logits import as_given


def hold_against_plain(case: Case, logits: list[Tensor], rel: float) -> PackLoss:
    result = case.loss(logits)
    expected = case.plain.atoms(logits)
    for key in expected.keys() | result.atoms.keys():
        found, wanted = result.atoms.get(key, 0.0), expected.get(key, 0.0)
        assert found == pytest.approx(wanted, rel=rel, abs=rel), key
    assert result.total.item() == pytest.approx(sum(expected.values()), rel=rel, abs=rel)
    return result


@pytest.mark.req("LOSS-01", "LOSS-03", "LOSS-04", "LOSS-05", "RES-05", "RES-09", "DATA-02")
@pytest.mark.scenario("Geometry losses operate on normalized coordinates")
@FEW
@example(random_case(129542))  # a coordinate with all others as neighbours, whose p is nearly 1
@given(CASES)
def test_any_row_under_any_config_has_the_plain_loss(drawn: tuple[Case, list[Tensor]]) -> None:
    hold_against_plain(*drawn, rel=1e-6)


@pytest.mark.req("LOSS-01", "LOSS-03", "LOSS-04", "LOSS-05")
@pytest.mark.parametrize(("row", "channel", "count"), EXAMPLES)
@pytest.mark.parametrize(
    ("dtype", "rel"), [(torch.float64, 1e-6), (torch.float32, 2e-5), (torch.bfloat16, 2e-5)]
)
def test_logits_of_any_type_have_the_plain_loss_of_their_values(
    row: Supervision, channel: Channel, count: int, dtype: torch.dtype, rel: float
) -> None:
    logits = [logits_for(row, seed).to(dtype) for seed in range(count)]
    result = hold_against_plain(Case(EVERYTHING, row, channel), logits, rel)
    assert result.total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(math.isfinite(value) and value > 0 for value in result.atoms.values())


UNUSUAL: dict[str, tuple[list[Role], list[tuple[int, float]], list[list[int]]]] = {
    "only false positives": ([Role.FALSE_POSITIVE] * 5, [], []),
    "no slots": ([Role.APPENDED_STRUCTURE, Role.CLOSURE], [], []),
    "coordinates that are not taught": ([Role.COORD] * 3 + [Role.CLOSURE], [], []),
    "no text": ([Role.COORD] * 4, [(k, 250.0 * k - 250) for k in range(1, 5)], [[0, 1, 2, 3]]),
    "no boxes": ([Role.COORD] * 3, [(1, 0.5), (2, 998.25), (3, 41.0)], []),
    "only a description": ([Role.APPENDED_DESC] * 2, [], []),
    "one of each": ([Role.CLOSURE, Role.COORD], [(2, 500.25)], []),
}


@pytest.mark.req("LOSS-01", "LOSS-03", "LOSS-04", "LOSS-05")
@pytest.mark.parametrize("name", UNUSUAL)
def test_a_row_that_lacks_a_kind_of_token_has_the_plain_loss_of_the_rest(name: str) -> None:
    roles, slots, boxes = UNUSUAL[name]
    row = make_row([Role.PROMPT, *roles], [True] * (len(roles) + 1), slots, boxes)
    case, logits = Case(EVERYTHING, row, "B"), [logits_for(row, 7)]
    hold_against_plain(case, logits, rel=1e-6)
    (gradient,) = case.gradients(logits)
    assert gradient.isfinite().all()
    assert gradient.any().item() == (len(case.plain.text()) + len(slots) > 0)


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


COORD = {"coord_ce", "coord_soft_ce", "coord_w1", "coord_gate"}
BOXES = {"bbox_smoothl1", "bbox_ciou"}
# Names of the terms on text of the first forward and of the last, and on coordinates.
THERE: dict[str, tuple[set[str], set[str], set[str]]] = {
    "only false positives": (set(), set(), set()),
    "no slots": ({"struct_ce"}, {"struct_ce"}, {"text_gate"}),
    "no text": (set(), set(), COORD | BOXES),
    "no boxes": (set(), set(), COORD),
    "only a description": ({"desc_ce"}, set(), {"text_gate"}),
}


@pytest.mark.req("LOSS-01", "LOSS-05")
@pytest.mark.parametrize("name", THERE)
def test_a_term_is_left_out_where_a_pack_has_nothing_for_it(name: str) -> None:
    roles, slots, boxes = UNUSUAL[name]
    row = make_row([Role.PROMPT, *roles], [False] * (len(roles) + 1), slots, boxes)
    first, last, coord = THERE[name]
    result = Case(EVERYTHING, row, "A").loss([logits_for(row, 7), logits_for(row, 8)])
    expected = {f"loss/A1_text/{term}" for term in first}
    expected |= {f"loss/A2_text/{term}" for term in last}
    assert result.atoms.keys() == expected | {f"loss/A2_coord/{term}" for term in coord}


@pytest.mark.req("LOSS-05")
@FEW
@given(CASES)
def test_the_atoms_add_up_to_the_total(drawn: tuple[Case, list[Tensor]]) -> None:
    case, logits = drawn
    result = case.loss([z.float() for z in logits])
    assert sum(result.atoms.values()) == pytest.approx(result.total.item(), abs=1e-4)


@pytest.mark.req("LOSS-05")
def test_atoms_are_told_apart_by_the_forward_they_come_from() -> None:
    coord = ["bbox_smoothl1", "bbox_ciou", "coord_ce", "coord_soft_ce", "coord_w1", "coord_gate"]
    coord.append("text_gate")
    text = ["struct_ce", "desc_ce"]

    def keys(row: Supervision, channel: Channel, count: int) -> set[str]:
        logits = [logits_for(row, seed) for seed in range(count)]
        return set(Case(EVERYTHING, row, channel).loss(logits).atoms)

    in_b, in_a, twice = (keys(*example) for example in EXAMPLES)
    in_text = [*text, "duplicate_ul"]
    assert in_b == {f"loss/B_rollout_text/{k}" for k in in_text} | {
        f"loss/B_coord/{k}" for k in coord
    }
    assert in_a == {f"loss/A1_text/{k}" for k in text} | {f"loss/A2_coord/{k}" for k in coord}
    assert twice == in_a | {"loss/A2_text/struct_ce"}


def part(
    selection: Selection, text: Tensor, boxes: Tensor, alone: Tensor, departures: Tensor
) -> Selection:
    """Some of a row's supervised tokens over the totals of all: masks over T, N, slots and U.

    alone: (K,) the slots in no box that are of this part.
    """
    kept = alone.clone()
    kept[selection.boxes[boxes].flatten()] = True
    renumbered = kept.cumsum(0) - 1
    return replace(
        selection,
        text_rows=selection.text_rows[text],
        text_targets=selection.text_targets[text],
        text_roles=selection.text_roles[text],
        text_weights=selection.text_weights[text],
        slot_rows=selection.slot_rows[kept],
        slot_bins=selection.slot_bins[kept],
        boxes=renumbered[selection.boxes[boxes]],
        departure_rows=selection.departure_rows[departures],
        departure_tokens=selection.departure_tokens[departures],
        departure_targets=selection.departure_targets[departures],
    )


@pytest.mark.req("LOSS-05")
@FEW
@given(CASES, st.integers(0, 2**32))
def test_parts_of_a_row_over_the_totals_of_the_whole_add_up_to_it(
    drawn: tuple[Case, list[Tensor]], seed: int
) -> None:
    case, logits = drawn
    whole, draw = case.select(), torch.Generator().manual_seed(seed)

    def halves(size: int) -> Tensor:
        return torch.rand(size, generator=draw) < 0.5

    text, boxes = halves(len(whole.text_rows)), halves(len(whole.boxes))
    in_box = torch.zeros(len(whole.slot_rows), dtype=torch.bool)
    in_box[whole.boxes.flatten()] = True
    alone = halves(len(whole.slot_rows)) & ~in_box
    left = halves(len(whole.departure_rows))
    parts = [
        part(whole, text, boxes, alone, left),
        part(whole, ~text, ~boxes, ~alone & ~in_box, ~left),
    ]

    losses = [case.loss(logits, selection=one) for one in parts]
    expected = case.loss(logits)
    total = losses[0].total + losses[1].total
    assert total.item() == pytest.approx(expected.total.item(), rel=1e-9, abs=1e-12)
    for key, value in expected.atoms.items():
        found = sum(loss.atoms.get(key, 0.0) for loss in losses)
        assert found == pytest.approx(value, rel=1e-9, abs=1e-12)
    gradients = zip(
        *(case.gradients(logits, selection=one) for one in (*parts, whole)), strict=True
    )
    for one, other, all_ in gradients:
        assert torch.allclose(one + other, all_, rtol=1e-9, atol=1e-15)


@pytest.mark.req("LOSS-01", "LOSS-04")
@pytest.mark.parametrize(
    ("dtype", "temperature"),
    [(torch.float64, 0.7), (torch.float32, 1.0), (torch.float32, 0.7), (torch.bfloat16, 0.7)],
)
def test_a_wide_vocabulary_is_read_as_one_plain_expression(
    dtype: torch.dtype, temperature: float
) -> None:
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
