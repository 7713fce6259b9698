"""Scenarios of which step runs which channel (seed 001)."""

import ast
from inspect import signature
from pathlib import Path

import pytest

from learner.config import parse_config
from learner.schedule import channel_for_step
from learner.types import Channel
from tests.unit.config_faults import changed, only_error, without

LEARNER = Path(__file__).parents[3] / "learner"


def channels(b_ratio: float, steps: range) -> str:
    """Of the steps of a run whose config says this."""
    ratio = parse_config(changed("stage2_ab.schedule.b_ratio", b_ratio)).b_ratio
    return "".join(channel_for_step(step, ratio) for step in steps)


@pytest.mark.req("STEP-01")
def test_b_ratio_0_5_alternates_deterministically_by_optimizer_step() -> None:
    assert channels(0.5, range(4)) == channels(0.5, range(4)) == "ABAB"


@pytest.mark.req("STEP-01")
@pytest.mark.parametrize(("b_ratio", "channel"), [(0.0, "A"), (1.0, "B")])
def test_b_ratio_edge_cases_are_deterministic(b_ratio: float, channel: str) -> None:
    for start in (0, 10**6, 10**15):
        assert channels(b_ratio, range(start, start + 100)) == channel * 100


@pytest.mark.req("RES-06", "CFG-03")
def test_stage2_ab_schedule_pattern_fails_fast() -> None:
    error = only_error(changed("stage2_ab.schedule.pattern", ["A", "B"]))
    assert error.where == "stage2_ab.schedule.pattern"
    assert error.do == "Set stage2_ab.schedule.b_ratio"


@pytest.mark.req("STEP-01", "CFG-02")
def test_missing_b_ratio_fails_fast() -> None:
    error = only_error(without("stage2_ab.schedule.b_ratio"))
    assert error.where == "stage2_ab.schedule.b_ratio"
    assert "missing" in error.found


@pytest.mark.req("RES-06", "CFG-03")
def test_legacy_rollout_buffer_config_fails_fast() -> None:
    error = only_error(changed("rollout_matching.rollout_buffer", {"m_steps": 2}))
    assert error.where == "rollout_matching.rollout_buffer"
    assert "Remove it" in error.do


@pytest.mark.req("ARCH-02", "STEP-01")
def test_scheduling_policy_changes_are_isolated_from_trainer_orchestration() -> None:
    """One function of step and ratio decides; the step alone knows of it, and what simulates it."""
    imports = [
        (str(path.relative_to(LEARNER)), [name.name for name in node.names])
        for path in LEARNER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "learner.schedule"
    ]
    knows = ["channel_for_step"]
    assert sorted(imports) == [("simulate/rank.py", knows), ("step.py", knows)]
    takes = signature(channel_for_step)
    assert (list(takes.parameters), takes.return_annotation) == (["step", "b_ratio"], Channel)
