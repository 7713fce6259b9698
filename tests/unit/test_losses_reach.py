"""What each knob of a pipeline reaches: the rows and columns of logits whose gradient it moves.

Every knob is moved under a pipeline that has nothing else on and under one that has everything
on; what it moves must be what the table says, no more and no less, so an inert knob fails.
Gradients are of sums, not of means: a weight that changes a denominator would move every row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    BOTH,
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

Rows = dict[Channel, Supervision]
ROWS: Rows = {"A": annotation_row(), "B": answer_row()}
# With bins of 300 to 700: to the left of all mass, or to the right, W1 has but one slope.
CENTRAL = {
    channel: replace(row, coord_bins=300 + row.coord_bins * 0.4) for channel, row in ROWS.items()
}


def kinds(row: Supervision) -> list[tuple[str, bool]]:
    """(kind, whether its sample lost an invalid object) of what each row of logits predicts."""
    names = [Role(role).name for role in row.roles.tolist()]
    for index, position in enumerate(row.coord_positions.tolist()):
        names[position] = "box" if index in row.boxes else "polygon"
    return list(zip(names[1:], row.has_dropped[1:].tolist(), strict=True))


@dataclass(frozen=True)
class Reach:
    """Kinds of rows that a knob moves in a forward, and their columns.

    columns: `all`, the `coordinates`, or those within so many bins of the target.
    """

    kinds: Sequence[str]
    columns: str | int = "all"
    only_dropped: bool = False

    def mask(self, row: Supervision) -> Tensor:
        """(L, V), true where the gradient moves."""
        mask = torch.zeros(len(row.roles), VOCAB, dtype=torch.bool)
        for at, (kind, dropped) in enumerate(kinds(row)):
            if kind in self.kinds and (dropped or not self.only_dropped):
                mask[at, self._columns(row, at + 1)] = True
        return mask

    def _columns(self, row: Supervision, position: int) -> list[int]:
        if self.columns == "all":
            return list(range(VOCAB))
        if self.columns == "coordinates":
            return COORD_IDS
        slot = row.coord_positions.tolist().index(position)
        target, far = row.coord_bins[slot].item(), float(self.columns)
        return [index for k, index in enumerate(COORD_IDS) if abs(k - target) <= far]


NOTHING = Reach(())

ALL_ON: dict[str, ObjectiveModule] = {
    "token_ce": token_ce(),
    "bbox_geo": bbox_geo(),
    "coord_reg": coord_reg(),
}


def zeros(config: TokenCEConfig | BboxGeoConfig | CoordRegConfig) -> dict[str, float]:
    return {key: 0.0 for key in type(config).model_fields if key.endswith("_weight")}


# Text is still chosen, which the text gate needs, but has no cross-entropy.
ALL_OFF: dict[str, ObjectiveModule] = {
    "token_ce": token_ce(weight=0.0),
    "bbox_geo": bbox_geo(BBOX_GEO.model_copy(update=zeros(BBOX_GEO))),
    "coord_reg": coord_reg(COORD_REG.model_copy(update=zeros(COORD_REG))),
}
BARE_TEXT = token_ce(TOKEN_CE.model_copy(update=zeros(TOKEN_CE)))


def changed(base: dict[str, ObjectiveModule], name: str, **fields: Any) -> PipelineConfig:
    """The pipeline of `base` with fields of a module, or of its config, set."""
    module = base[name]
    own = {key: value for key, value in fields.items() if key in type(module).model_fields}
    rest = {key: value for key, value in fields.items() if key not in own}
    config = module.config.model_copy(update=rest)
    entry = module.model_copy(update={**own, "config": config})
    return declared(*{**base, name: entry}.values())


def summed(config: PipelineConfig, channel: Channel, count: int, rows: Rows = ROWS) -> list[Tensor]:
    """Gradients of the sums of an objective, for each of the forwards."""
    case = Case(config, rows[channel], channel)
    one = torch.ones(())
    selection = replace(case.select(), totals=Totals(one, one, text=1, slots=1, boxes=1))
    logits = [logits_for(case.row, 30 + seed, scale=2.0, peak=3.0) for seed in range(count)]
    return case.gradients(logits, selection)


def moved(
    base: dict[str, ObjectiveModule],
    module: str,
    before: dict[str, Any],
    after: dict[str, Any],
    channel: Channel,
    count: int,
    rows: Rows = ROWS,
    rtol: float = 0.0,
) -> list[Tensor]:
    """(L, V) masks of the logits whose gradient differs, for each of the forwards."""
    low = summed(changed(base, module, **before), channel, count, rows)
    high = summed(changed(base, module, **after), channel, count, rows)
    pairs = zip(low, high, strict=True)
    return [~torch.isclose(one, other, rtol=rtol, atol=0.0) for one, other in pairs]


def assert_reach(
    found: list[Tensor], expected: Sequence[Reach], channel: Channel, rows: Rows = ROWS
) -> None:
    named = kinds(rows[channel])
    for mask, reach in zip(found, expected, strict=True):
        off = (mask != reach.mask(rows[channel])).nonzero().tolist()
        wrong = sorted({(named[at][0], bool(mask[at, column])) for at, column in off})
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
    of_last("bbox_geo", "smoothl1_weight", Reach(BOX, "coordinates")),
    of_last("bbox_geo", "ciou_weight", Reach(BOX, "coordinates")),
    of_last("coord_reg", "coord_ce_weight", Reach(SLOTS, "coordinates")),
    of_last("coord_reg", "soft_ce_weight", Reach(SLOTS, "coordinates")),
    of_last("coord_reg", "w1_weight", Reach(SLOTS, "coordinates")),
    of_last("coord_reg", "coord_gate_weight", Reach(SLOTS)),
    of_last("coord_reg", "text_gate_weight", Reach(TEXT)),
]


def forwards_of(knob: Knob) -> Iterator[tuple[Channel, list[Reach]]]:
    yield "B", [knob.in_b]
    yield "A", [knob.once]
    yield "A", [knob.first, knob.last]


def test_the_table_has_every_weight_there_is() -> None:
    listed = {(knob.module, knob.field) for knob in WEIGHTS}
    known = {(name, field) for name, module in ALL_ON.items() for field in zeros(module.config)}
    assert listed == known


@pytest.mark.req("LOSS-01", "LOSS-03", "LOSS-04", "CFG-08", "RES-05", "RES-09")
@pytest.mark.scenario("Desc can be fully masked while keeping structure CE")
@pytest.mark.parametrize("knob", WEIGHTS, ids=lambda knob: knob.field)
def test_a_weight_reaches_what_it_weighs_and_nothing_else(knob: Knob) -> None:
    alone = ALL_OFF if knob.module != "token_ce" else {**ALL_OFF, "token_ce": BARE_TEXT}
    for channel, expected in forwards_of(knob):
        for base in (alone, ALL_ON):
            before, after = {knob.field: 0.0}, {knob.field: 0.6}
            found = moved(base, knob.module, before, after, channel, len(expected))
            assert_reach(found, _with_gate(knob, base, expected), channel)


def _with_gate(
    knob: Knob, base: dict[str, ObjectiveModule], expected: Sequence[Reach]
) -> Sequence[Reach]:
    """Text that gets a weight is gated, too, and the gate looks at the last forward."""
    gated = base is ALL_ON and knob.field == "desc_ce_weight" and len(expected) == 2
    return [DESC, DESC] if gated else expected


@pytest.mark.req("LOSS-01")
@pytest.mark.scenario("Dropped invalid instances may upweight B3 structure CE")
@pytest.mark.parametrize("base", [{**ALL_OFF, "token_ce": token_ce()}, ALL_ON])
def test_the_drop_multiplier_reaches_the_structure_of_samples_that_lost_an_object(
    base: dict[str, ObjectiveModule],
) -> None:
    knob = "rollout_drop_invalid_struct_ce_multiplier"
    reached: dict[Channel, list[Reach]] = {
        "B": [Reach(STRUCTURE, only_dropped=True)],
        "A": [NOTHING, NOTHING],
    }
    for channel, expected in reached.items():
        found = moved(base, "token_ce", {knob: 1.0}, {knob: 2.0}, channel, len(expected))
        assert_reach(found, expected, channel)


# (the loss that is on, the knob, from, to, its reach)
SHAPES: list[tuple[str, str, Any, Any, Reach]] = [
    ("coord_ce_weight", "temperature", 1.0, 0.5, Reach(SLOTS, "coordinates")),
    ("soft_ce_weight", "temperature", 1.0, 0.5, Reach(SLOTS, "coordinates")),
    ("w1_weight", "temperature", 1.0, 0.5, Reach(SLOTS, "coordinates")),
    ("coord_gate_weight", "temperature", 1.0, 0.5, Reach(SLOTS)),
    ("text_gate_weight", "temperature", 1.0, 0.5, Reach(TEXT)),
    ("coord_ce_weight", "target_sigma", 2.0, 4.0, NOTHING),
    ("soft_ce_weight", "target_sigma", 2.0, 4.0, Reach(SLOTS, 8)),
    ("w1_weight", "target_sigma", 1.0, 60.0, Reach(SLOTS, "coordinates")),
    ("coord_ce_weight", "target_truncate", 4, 8, NOTHING),
    ("soft_ce_weight", "target_truncate", 4, 8, Reach(SLOTS, 8)),
    ("soft_ce_weight", "target_truncate", 4, None, Reach(SLOTS, "coordinates")),
    ("w1_weight", "target_truncate", 1, None, Reach(SLOTS, "coordinates")),
    ("coord_gate_weight", "target_sigma", 2.0, 4.0, NOTHING),
    ("text_gate_weight", "target_truncate", 4, None, NOTHING),
]


@pytest.mark.req("LOSS-04", "CFG-08")
@pytest.mark.parametrize(("loss", "knob", "low", "high", "reach"), SHAPES)
def test_a_shape_reaches_the_losses_it_shapes(
    loss: str, knob: str, low: Any, high: Any, reach: Reach
) -> None:
    wide = {} if knob == "target_sigma" else {"target_sigma": 200.0}
    on = {loss: 0.6, "target_truncate": 8 if loss == "soft_ce_weight" else None, **wide}
    reached: list[tuple[Channel, list[Reach]]] = [
        ("B", [reach]),
        ("A", [reach]),
        ("A", [NOTHING, reach]),
    ]
    for channel, expected in reached:
        before, after = {**on, knob: low}, {**on, knob: high}
        # Soft targets are float32: they add up to 1 but for its rounding, which all columns see.
        count, rtol = len(expected), 1e-6 if loss == "soft_ce_weight" else 0.0
        found = moved(ALL_OFF, "coord_reg", before, after, channel, count, CENTRAL, rtol)
        assert_reach(found, expected, channel, CENTRAL)


@pytest.mark.req("LOSS-03")
def test_boxes_are_decoded_at_temperature_1() -> None:
    modules = {**ALL_OFF, "bbox_geo": bbox_geo()}
    found = moved(modules, "coord_reg", {"temperature": 1.0}, {"temperature": 0.5}, "B", 1)
    assert_reach(found, [NOTHING], "B")


@pytest.mark.req("LOSS-04")
def test_text_that_has_no_weight_is_not_gated() -> None:
    silent = token_ce(TOKEN_CE.model_copy(update=zeros(TOKEN_CE)), weight=0.0)
    modules = {**ALL_OFF, "token_ce": silent}
    found = moved(modules, "coord_reg", {}, {"text_gate_weight": 0.6}, "B", 1)
    assert_reach(found, [Reach(("APPENDED_STRUCTURE", "CLOSURE"))], "B")


# Switches of a whole module, from off to on.
SWITCHES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("weight", {"weight": 0.0}, {"weight": 0.6}),
    ("enabled", {"enabled": False}, {"enabled": True}),
    ("channels", {"channels": ()}, {"channels": BOTH}),
]
TEXT_IN_A = Reach(("APPENDED_STRUCTURE", "CLOSURE"))
MODULES: list[tuple[str, list[Reach], list[Reach]]] = [
    ("token_ce", [Reach(TEXT)], [Reach(TEXT), TEXT_IN_A]),
    ("bbox_geo", [Reach(BOX, "coordinates")], [NOTHING, Reach(BOX, "coordinates")]),
    ("coord_reg", [Reach((*SLOTS, *TEXT))], [NOTHING, Reach((*SLOTS, *TEXT))]),
]


@pytest.mark.req("LOSS-05", "CFG-08", "RES-10")
@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch[0])
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module[0])
def test_a_switch_of_a_module_reaches_what_the_module_reaches(
    switch: tuple[str, dict[str, Any], dict[str, Any]],
    module: tuple[str, list[Reach], list[Reach]],
) -> None:
    _, off, on = switch
    name, in_b, in_a = module
    ungated = coord_reg(COORD_REG.model_copy(update={"text_gate_weight": 0.0}))
    base = {**ALL_ON, "coord_reg": ungated} if name == "token_ce" else ALL_ON
    assert_reach(moved(base, name, off, on, "B", 1), in_b, "B")
    assert_reach(moved(base, name, off, on, "A", 2), in_a, "A")


@pytest.mark.req("CFG-08")
@pytest.mark.parametrize("name", list(ALL_ON))
@pytest.mark.parametrize("channel", BOTH)
def test_a_channel_that_a_module_does_not_list_is_none_of_its_business(
    name: str, channel: Channel
) -> None:
    ungated = coord_reg(COORD_REG.model_copy(update={"text_gate_weight": 0.0}))
    base = {**ALL_ON, "coord_reg": ungated}
    other = tuple(c for c in BOTH if c != channel)
    found = moved(base, name, {"channels": other}, {"enabled": False}, channel, 1)
    assert_reach(found, [NOTHING], channel)


@pytest.mark.req("CFG-08")
@pytest.mark.parametrize("entry", [{"channels": ("A",)}, {"enabled": False}])
def test_no_text_is_read_where_no_cross_entropy_is_declared(entry: dict[str, Any]) -> None:
    config = declared(token_ce(**entry), bbox_geo())
    assert len(Case(config, ROWS["B"], "B").select().text_rows) == 0


@pytest.mark.req("LOSS-01", "LOSS-03", "LOSS-04")
@pytest.mark.scenario("Channel-B geometry includes matched and FN but excludes FP")
def test_what_is_not_taught_has_no_gradient_with_everything_on() -> None:
    silent = {"PROMPT", "MATCHED_DESC", "FALSE_POSITIVE", "COORD"}
    (gradient,) = summed(declared(*ALL_ON.values()), "B", 1)
    by_row = [bool(row.any()) for row in gradient]
    assert by_row[:-1] == [kind not in silent for kind, _ in kinds(ROWS["B"])]
    assert not by_row[-1]
    assert {kind for kind, _ in kinds(ROWS["B"])} == {*silent, *TEXT, *SLOTS}
