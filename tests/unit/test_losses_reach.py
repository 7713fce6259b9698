"""The rows and columns of logits whose gradient each weight of a pipeline changes.

Each weight changes in a pipeline without other terms and in one with all terms. The changed
entries must equal the table, so an inert weight fails. Gradients are of sums: a weight that changes
a denominator would change every row of a mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from learner.objectives.bbox_geo import BboxGeoConfig
from learner.objectives.config import ObjectiveModule, PipelineConfig
from learner.objectives.coord_reg import CoordRegConfig
from learner.objectives.logit_stats import Supervision, Totals
from learner.objectives.token_ce import TokenCEConfig
from learner.types import Channel, Role
from tests.unit.loss_rows import (
    BBOX_GEO,
    COORD_IDS,
    COORD_REG,
    TOKEN_CE,
    VOCAB,
    Case,
    annotation_row,
    answer_row,
    bbox_geo,
    coord_reg,
    declared,
    logits_for,
    token_ce,
)

# Rows of logits by what they predict: a role, or for coordinates where they are taught.
STRUCTURE = ("MATCHED_STRUCTURE", "APPENDED_STRUCTURE")
TEXT = (*STRUCTURE, "APPENDED_DESC", "CLOSURE")
BOX, SLOTS = ("box",), ("box", "polygon")

ROWS: dict[Channel, Supervision] = {"A": annotation_row(), "B": answer_row()}


def kinds(row: Supervision) -> list[tuple[str, bool]]:
    """(kind, whether its sample lost an invalid object) of what each row of logits predicts."""
    names = [Role(role).name for role in row.roles.tolist()]
    for index, position in enumerate(row.coord_positions.tolist()):
        names[position] = "box" if index in row.boxes else "polygon"
    return list(zip(names[1:], row.has_dropped[1:].tolist(), strict=True))


@dataclass(frozen=True)
class Reach:
    """Kinds of rows that a weight moves in a forward, in all columns or those of coordinates."""

    kinds: Sequence[str]
    columns: Sequence[int] = range(VOCAB)
    only_dropped: bool = False

    def mask(self, row: Supervision) -> Tensor:
        """(L, V), true where the gradient moves."""
        mask = torch.zeros(len(row.roles), VOCAB, dtype=torch.bool)
        for at, (kind, dropped) in enumerate(kinds(row)):
            if kind in self.kinds and (dropped or not self.only_dropped):
                mask[at, list(self.columns)] = True
        return mask


NOTHING = Reach(())
Modules = dict[str, ObjectiveModule]
ALL_ON: Modules = {"token_ce": token_ce(), "bbox_geo": bbox_geo(), "coord_reg": coord_reg()}


def zeros(config: TokenCEConfig | BboxGeoConfig | CoordRegConfig) -> dict[str, float]:
    return {key: 0.0 for key in type(config).model_fields if key.endswith("_weight")}


# Text is still chosen, which the text gate needs, but has no cross-entropy.
ALL_OFF: Modules = {
    "token_ce": token_ce(weight=0.0),
    "bbox_geo": bbox_geo(BBOX_GEO.model_copy(update=zeros(BBOX_GEO))),
    "coord_reg": coord_reg(COORD_REG.model_copy(update=zeros(COORD_REG))),
}
BARE_TEXT = token_ce(TOKEN_CE.model_copy(update=zeros(TOKEN_CE)))


def with_field(base: Modules, name: str, field: str, value: float) -> PipelineConfig:
    module = base[name]
    entry = module.model_copy(update={"config": module.config.model_copy(update={field: value})})
    return declared(*{**base, name: entry}.values())


def summed(config: PipelineConfig, channel: Channel, count: int) -> list[Tensor]:
    """Gradients of the sums of an objective, for each of the forwards."""
    case = Case(config, ROWS[channel], channel)
    one = torch.ones(())
    selection = replace(case.select(), totals=Totals(one, one, text=1, slots=1, boxes=1))
    logits = [logits_for(case.row, 30 + seed, scale=2.0, peak=3.0) for seed in range(count)]
    return case.gradients(logits, selection)


def check_reach(
    base: Modules,
    name: str,
    field: str,
    values: tuple[float, float],
    channel: Channel,
    expected: Sequence[Reach],
) -> None:
    """The gradients that differ between two values of a field, for each of the forwards."""
    low, high = (
        summed(with_field(base, name, field, value), channel, len(expected)) for value in values
    )
    named = kinds(ROWS[channel])
    for one, other, reach in zip(low, high, expected, strict=True):
        moved = ~torch.isclose(one, other, rtol=0.0, atol=0.0)
        off = (moved != reach.mask(ROWS[channel])).nonzero().tolist()
        wrong = sorted({(named[at][0], bool(moved[at, column])) for at, column in off})
        assert not off, f"(kind, moved without being expected to): {wrong}"


@dataclass(frozen=True)
class Knob:
    """A weight that is moved from 0, and its reach in each kind of forward.

    first: in A1 where a second forward follows. last: in A2. once: in the one forward of A.
    """

    module: str
    field: str
    in_b: Reach = NOTHING
    once: Reach = NOTHING
    first: Reach = NOTHING
    last: Reach = NOTHING


def of_last(module: str, field: str, reach: Reach) -> Knob:
    """A weight of something read from the last forward."""
    return Knob(module, field, in_b=reach, once=reach, last=reach)


DESC = Reach(("APPENDED_DESC",))
WEIGHTS = [
    Knob("token_ce", "desc_ce_weight", once=DESC, first=DESC),
    Knob("token_ce", "rollout_fn_desc_weight", in_b=DESC),
    Knob("token_ce", "rollout_matched_prefix_struct_weight", in_b=Reach(("MATCHED_STRUCTURE",))),
    Knob(
        "token_ce",
        "self_context_struct_ce_weight",
        last=Reach(("APPENDED_STRUCTURE", "CLOSURE")),
    ),
    of_last("bbox_geo", "smoothl1_weight", Reach(BOX, COORD_IDS)),
    of_last("bbox_geo", "ciou_weight", Reach(BOX, COORD_IDS)),
    of_last("coord_reg", "coord_ce_weight", Reach(SLOTS, COORD_IDS)),
    of_last("coord_reg", "soft_ce_weight", Reach(SLOTS, COORD_IDS)),
    of_last("coord_reg", "w1_weight", Reach(SLOTS, COORD_IDS)),
    of_last("coord_reg", "coord_gate_weight", Reach(SLOTS)),
    of_last("coord_reg", "text_gate_weight", Reach(TEXT)),
]


def test_the_table_has_every_weight_there_is() -> None:
    listed = {(knob.module, knob.field) for knob in WEIGHTS}
    known = {(name, field) for name, module in ALL_ON.items() for field in zeros(module.config)}
    assert listed == known


@pytest.mark.req("LOSS-01", "LOSS-03", "LOSS-04", "CFG-08", "RES-05", "RES-09")
@pytest.mark.scenario("Desc can be fully masked while keeping structure CE")
@pytest.mark.parametrize("knob", WEIGHTS, ids=lambda knob: knob.field)
def test_a_weight_reaches_what_it_weighs_and_nothing_else(knob: Knob) -> None:
    alone = ALL_OFF if knob.module != "token_ce" else {**ALL_OFF, "token_ce": BARE_TEXT}
    forwards: list[tuple[Channel, list[Reach]]] = [
        ("B", [knob.in_b]),
        ("A", [knob.once]),
        ("A", [knob.first, knob.last]),
    ]
    for channel, expected in forwards:
        check_reach(alone, knob.module, knob.field, (0.0, 0.6), channel, expected)
        if knob.field == "desc_ce_weight" and len(expected) == 2:
            # The text gate covers text with a weight, in the last forward.
            expected = [DESC, DESC]
        check_reach(ALL_ON, knob.module, knob.field, (0.0, 0.6), channel, expected)


@pytest.mark.req("LOSS-01")
@pytest.mark.scenario("Dropped invalid instances may upweight B3 structure CE")
@pytest.mark.parametrize("base", [{**ALL_OFF, "token_ce": token_ce()}, ALL_ON])
def test_the_drop_multiplier_reaches_the_structure_of_samples_that_lost_an_object(
    base: Modules,
) -> None:
    field = "rollout_drop_invalid_struct_ce_multiplier"
    in_b = Reach(STRUCTURE, only_dropped=True)
    check_reach(base, "token_ce", field, (1.0, 2.0), "B", [in_b])
    check_reach(base, "token_ce", field, (1.0, 2.0), "A", [NOTHING, NOTHING])


@pytest.mark.req("LOSS-01", "LOSS-03", "LOSS-04")
@pytest.mark.scenario("Channel-B geometry includes matched and FN but excludes FP")
def test_what_is_not_taught_has_no_gradient_with_everything_on() -> None:
    silent = {"PROMPT", "MATCHED_DESC", "FALSE_POSITIVE", "COORD"}
    (gradient,) = summed(declared(*ALL_ON.values()), "B", 1)
    by_row = [bool(row.any()) for row in gradient]
    assert by_row[:-1] == [kind not in silent for kind, _ in kinds(ROWS["B"])]
    assert not by_row[-1]
    assert {kind for kind, _ in kinds(ROWS["B"])} == {*silent, *TEXT, *SLOTS}
