"""`learner watch` without a terminal, and the liveness of a run's process."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from learner.cli import app
from learner.runs.run_folder import identity_of_this_process, is_alive
from shared_contracts.errors import RunError
from tests.unit.report_folder import MadeRun, step_line
from tests.unit.trained_run import STEPS, TrainedRun

# Above the kernel's own limit of 2^22.
NO_PID = 2**22 + 1


def watch(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["watch", *arguments], env={"COLUMNS": None})


@pytest.mark.req("MET-03")
def test_watch_shows_a_finished_run(trained_run: TrainedRun) -> None:
    frame = watch(str(trained_run.folder), "--once")
    assert frame.exit_code == 0
    assert f"step {STEPS}/{STEPS}" in frame.output
    assert "loss, B" in frame.output
    lines = watch(str(trained_run.folder))
    assert lines.exit_code == 0
    assert f"step {STEPS} training has ended after " in lines.output.splitlines()[-1]


@pytest.mark.req("RES-32")
def test_watch_names_why_objects_and_whole_answers_were_dropped(tmp_path: Path) -> None:
    counts = {"strict_drop/bbox_invalid": 3.0, "fenced": 2.0, "invalid_rollout": 2.0}
    line = step_line(1) | {f"stage2_ab/channel_b/{name}": n for name, n in counts.items()}
    run = MadeRun(tmp_path / "run", [line | {"rollout/per_second": 1.0}]).write()
    assert "dropped: bbox_invalid 3, fenced 2 " in watch(str(run.path), "--once").output


@pytest.mark.req("RUN-01")
def test_watch_of_a_run_whose_process_is_gone_ends_with_an_error(
    trained_run: TrainedRun, tmp_path: Path
) -> None:
    run = trained_run.copy(tmp_path).folder
    metrics = run / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:1]))
    facts = json.loads((run / "run.json").read_text())
    facts["process"] = {**identity_of_this_process(), "pid": NO_PID}
    (run / "run.json").write_text(json.dumps(facts))
    result = watch(str(run))
    assert isinstance(result.exception, RunError)
    assert "at step 1" in str(result.exception)


def test_liveness_is_known_only_for_processes_of_this_kernel() -> None:
    identity = identity_of_this_process()
    assert is_alive(identity) is True
    reused = {**identity, "start_ticks": identity["start_ticks"] - 1}
    assert is_alive(reused) is False, "another process has its pid"
    for other in ({"host": "elsewhere"}, {"pid_namespace": "pid:[1]"}, {"boot_id": "other"}):
        assert is_alive({**identity, **other}) is None
    dead = {**identity, "pid": NO_PID}
    assert is_alive(dead) is False
    del dead["boot_id"]
    assert is_alive(dead) is False, "a run of an earlier version"
