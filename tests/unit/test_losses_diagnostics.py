"""`coord_diag` sees what there is to see, and changes nothing (LOSS-06)."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from learner.objectives.config import PipelineConfig
from learner.objectives.logit_stats import Supervision
from learner.types import Channel, Role
from tests.unit.loss_rows import (
    CASES,
    COORD_IDS,
    EVERYTHING,
    EXAMPLES,
    FEW,
    Case,
    annotation_row,
    answer_row,
    coord_diag,
    coord_reg,
    declared,
    logits_for,
    make_row,
    token_ce,
)

NAMES = {"acc_top1", "acc_top5", "p_gt_mean", "expected_bin_mae", "entropy_mean", "coord_mass_mean"}


def temperature(config: PipelineConfig) -> float:
    regs = (m.config for m in config.objective if m.name == "coord_reg" and m.enabled)
    return next((reg.temperature for reg in regs), 1.0)


@pytest.mark.req("LOSS-06")
@FEW
@given(CASES)
def test_any_row_has_the_plain_sums_of_each_forward(drawn: tuple[Case, list[Tensor]]) -> None:
    case, logits = drawn
    result = case.loss(logits)
    assert result.slots == len(case.row.coord_positions)
    seen = dict(zip(["A1", "A2"] if case.channel == "A" else ["B"], logits, strict=False))
    assert set(result.diagnostics) == {f"coord_diag/{p}/{name}" for p in seen for name in NAMES}
    for provenance, forward in seen.items():
        plain = case.plain.diagnostics(forward, temperature(case.config))
        for name, value in plain.items():
            found = result.diagnostics[f"coord_diag/{provenance}/{name}"]
            assert found == pytest.approx(value, rel=1e-6, abs=1e-6), name


@pytest.mark.req("LOSS-06")
@FEW
@given(CASES)
def test_monitors_change_neither_the_total_nor_a_gradient(drawn: tuple[Case, list[Tensor]]) -> None:
    watched, logits = drawn
    alone = watched.config.model_copy(update={"diagnostics": ()})
    case = Case(alone, watched.row, watched.channel)
    assert watched.loss(logits).total.item() == case.loss(logits).total.item()
    assert watched.loss(logits).atoms == case.loss(logits).atoms
    for one, other in zip(watched.gradients(logits), case.gradients(logits), strict=True):
        assert torch.equal(one, other)


@pytest.mark.req("LOSS-06")
@pytest.mark.parametrize(("row", "channel", "count"), EXAMPLES)
def test_keys_name_the_forward_and_a2_is_there_only_for_several(
    row: Supervision, channel: Channel, count: int
) -> None:
    logits = [logits_for(row, seed) for seed in range(count)]
    result = Case(EVERYTHING, row, channel).loss(logits)
    provenance = {key.split("/")[1] for key in result.diagnostics}
    assert provenance == ({"B"} if channel == "B" else {"A1", "A2"} if count == 2 else {"A1"})
    assert all(key.count("/") == 2 for key in result.diagnostics)
    assert not any("coord_diag" in key for key in result.atoms)


@pytest.mark.req("LOSS-06", "CFG-08")
@pytest.mark.parametrize(
    "entry", [{"enabled": False}, {"weight": 0.0}, {"channels": ("A",)}, {"channels": ()}]
)
def test_a_monitor_that_is_off_in_a_channel_says_nothing(
    entry: dict[str, Any],
) -> None:
    config = declared(token_ce(), diagnostics=[coord_diag(**entry)])
    row = answer_row()
    assert Case(config, row, "B").loss([logits_for(row, 0)]).diagnostics == {}


def certain(*bins: int) -> tuple[Supervision, Tensor]:
    """Slots taught 500, where the model is sure of `bins`, one a slot, and of no text."""
    roles = [Role.PROMPT, *[Role.COORD] * len(bins)]
    slots = [(position, 500.0) for position in range(1, len(roles))]
    row = make_row(roles, [False] * len(roles), slots, [])
    logits = torch.full_like(logits_for(row, 0), -200.0)
    for at, k in enumerate(bins):
        logits[at, COORD_IDS[k]] = 200.0
    return row, logits


@pytest.mark.req("LOSS-06")
def test_the_values_of_a_certain_model_are_known_by_hand() -> None:
    row, logits = certain(500, 503, 500, 900)
    values = Case(EVERYTHING, row, "B").loss([logits]).diagnostics
    assert values == pytest.approx(
        {
            "coord_diag/B/acc_top1": 2.0,
            "coord_diag/B/acc_top5": values["coord_diag/B/acc_top5"],
            "coord_diag/B/p_gt_mean": 2.0,
            "coord_diag/B/expected_bin_mae": 3.0 + 400.0,
            "coord_diag/B/entropy_mean": 0.0,
            "coord_diag/B/coord_mass_mean": 4.0,
        }
    )
    assert values["coord_diag/B/acc_top5"] >= 2.0


@pytest.mark.req("LOSS-06")
def test_a_model_that_knows_nothing_has_the_entropy_of_all_bins() -> None:
    row = annotation_row()
    result = Case(EVERYTHING, row, "A").loss([torch.zeros_like(logits_for(row, 0))])
    entropy = result.diagnostics["coord_diag/A1/entropy_mean"] / result.slots
    assert entropy == pytest.approx(math.log(1000))
    assert result.diagnostics["coord_diag/A1/p_gt_mean"] / result.slots == pytest.approx(1e-3)


@pytest.mark.req("LOSS-06")
def test_the_mass_is_seen_at_the_temperature_of_the_gates() -> None:
    row, key = annotation_row(), "coord_diag/A1/coord_mass_mean"
    logits = logits_for(row, 3)
    plain = Case(EVERYTHING, row, "A").plain
    for config, expected in ((declared(coord_reg(), token_ce()), 0.9), (declared(token_ce()), 1.0)):
        watched = config.model_copy(update={"diagnostics": (coord_diag(),)})
        found = Case(watched, row, "A").loss([logits]).diagnostics[key]
        assert found == pytest.approx(plain.diagnostics(logits, expected)["coord_mass_mean"])
