"""Scenarios of the rollout-aligned losses (seed 000)."""

import math

import pytest
import torch
from torch import Tensor

from learner.config import parse_config
from learner.objectives.config import PipelineConfig
from learner.objectives.coord_diag import CoordDiagModule
from learner.objectives.coord_reg import CoordRegConfig, CoordRegModule
from learner.objectives.logit_stats import ForwardStats, Supervision
from learner.objectives.numerics import coord_gate, full_logsumexp
from learner.objectives.pipeline import PackLoss, Pipeline
from learner.stages.coords import COORD_BINS
from learner.types import Channel, Role
from shared_contracts.strict_model import EmptySection
from tests.unit.config_faults import ALIGNED
from tests.unit.packed_logits import as_given

FIRST_COORD = 40
COORD_IDS = list(range(FIRST_COORD, FIRST_COORD + COORD_BINS))
TEMPERATURE = 0.7


def one_slot() -> Supervision:
    """A prompt token and one coordinate, which the logits of row 0 predict."""
    return Supervision(
        input_ids=torch.tensor([0, FIRST_COORD]),
        roles=torch.tensor([int(Role.PROMPT), int(Role.COORD)], dtype=torch.int8),
        has_dropped=torch.zeros(2, dtype=torch.bool),
        coord_positions=torch.tensor([1]),
        coord_bins=torch.tensor([500.0]),
        boxes=torch.zeros(0, 4, dtype=torch.long),
    )


def gate_alone(temperature: float) -> tuple[CoordRegModule, CoordDiagModule]:
    both: tuple[Channel, ...] = ("A", "B")
    weights = dict.fromkeys(
        ("coord_ce_weight", "soft_ce_weight", "w1_weight", "text_gate_weight"), 0.0
    )
    config = CoordRegConfig(
        **weights,
        coord_gate_weight=1.0,
        temperature=temperature,
        target_sigma=2.0,
        target_truncate=None,
    )
    return (
        CoordRegModule(name="coord_reg", enabled=True, weight=1.0, channels=both, config=config),
        CoordDiagModule(
            name="coord_diag", enabled=True, weight=1.0, channels=both, config=EmptySection()
        ),
    )


def gate_loss(pipeline: Pipeline, logits: Tensor, channel: Channel) -> PackLoss:
    selection = pipeline.select(one_slot(), channel)
    stats = pipeline.reader(selection).anchor(as_given(logits))
    return pipeline(ForwardStats(stats, stats), selection, channel)


def awkward_rows() -> Tensor:
    """(R, V): small, spread and huge logits, infinities and NaN in and out of the coordinates."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(6, FIRST_COORD + COORD_BINS + 9, generator=generator)
    rows[1] *= 30
    rows[2, FIRST_COORD + 3] = 1e9
    rows[3, 5] = torch.inf
    rows[4, 7:60] = -torch.inf
    rows[5, [3, FIRST_COORD + 8]] = torch.nan
    return rows


@pytest.mark.req("LOSS-04", "LOSS-06")
@pytest.mark.parametrize("row", range(6))
def test_gate_loss_numeric_fences_are_consistent_across_training_and_rollout_paths(
    row: int,
) -> None:
    logits = awkward_rows()[row : row + 1].expand(2, -1)
    module, monitor = gate_alone(TEMPERATURE)
    pipeline = Pipeline(PipelineConfig(objective=(module,), diagnostics=(monitor,)), COORD_IDS)
    lse, coord = full_logsumexp(logits[0], TEMPERATURE), logits[0, COORD_IDS]
    helper = coord_gate(lse, coord, TEMPERATURE).item()
    assert math.isfinite(helper)
    tolerance = 2e-3 if helper > 100 else 1e-5
    paths: list[tuple[Channel, str, str]] = [("A", "A2_coord", "A1"), ("B", "B_coord", "B")]
    for channel, family, provenance in paths:
        loss = gate_loss(pipeline, logits, channel)
        assert loss.atoms[f"loss/{family}/coord_gate"] == pytest.approx(
            helper, rel=1e-5, abs=tolerance
        )
        mass = loss.diagnostics[f"coord_diag/{provenance}/coord_mass_mean"]
        assert mass == pytest.approx(math.exp(-helper), rel=1e-3, abs=1e-6)


@pytest.mark.req("LOSS-04", "RES-02")
def test_the_rollout_aligned_profile_takes_its_gate_from_the_same_helper() -> None:
    logits = awkward_rows()[1:2].expand(2, -1)
    shipped = parse_config(ALIGNED).pipeline
    loss = gate_loss(Pipeline(shipped, COORD_IDS), logits, "B")
    gate = coord_gate(full_logsumexp(logits[0]), logits[0, COORD_IDS]).item()
    assert loss.atoms["loss/B_coord/coord_gate"] == pytest.approx(gate, rel=1e-5)
