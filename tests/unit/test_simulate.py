"""`learner simulate` on a small input."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from learner.cli import app
from learner.config import dump_resolved
from tests.unit.simulated import simulated_config

LENGTHS = "samples: 64\nprompt: [40, 90]\nanswer: [5, 80]\ntarget: [10, 85]\n"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(dump_resolved(simulated_config()))
    (tmp_path / "lengths.yaml").write_text(LENGTHS)
    return tmp_path


def simulated(files: Path, *options: str) -> str:
    """The printed text; an error of the command is raised."""
    base = ["simulate", "--config", str(files / "run.yaml")]
    lengths = ["--lengths", str(files / "lengths.yaml")]
    result = CliRunner().invoke(app, [*base, *lengths, *options], catch_exceptions=False)
    return result.output


@pytest.mark.req("FULL-05")
def test_command_prints_steps_of_both_channels_and_names_speeds_that_were_not_measured(
    files: Path,
) -> None:
    printed = simulated(files, "--json", str(files / "out.json"))
    report: dict[str, Any] = json.loads((files / "out.json").read_text())
    for channel in ("A", "B"):
        (row,) = [line for line in printed.splitlines() if line.startswith(f"{channel}  ")][:1]
        assert f"{report['channels'][channel]['step_s']:.2f} s" in row
    assert len(report["steps"]) == report["run_steps"] == 12
    unmeasured = "note: the speeds are round numbers that were not measured"
    assert unmeasured in printed
    (files / "speeds.yaml").write_text("engine: {step_s: 0.5}\n")
    assert unmeasured not in simulated(files, "--speeds", str(files / "speeds.yaml"))
