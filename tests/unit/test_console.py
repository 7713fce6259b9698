"""Numbers, durations and lines on a terminal."""

import io
import math
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text
from transformers import TrainerControl, TrainerState, TrainingArguments

from learner.runs.console import counted, duration, fraction, number, score, tell
from learner.training.run_log import ProgressDisplay

AWKWARD = "/data/:car:/[red]run[/red]/" + 30 * "long " + "end"


@pytest.mark.parametrize("line", [AWKWARD, Text(AWKWARD)], ids=["str", "text"])
def test_line_is_printed_unchanged(line: str | Text) -> None:
    out = io.StringIO()
    tell(Console(file=out, width=40, force_terminal=True, color_system="truecolor"), line)
    assert out.getvalue() == AWKWARD + "\n"


def shown_steps(console: Console, name: str, steps: int, **logs: Any) -> None:
    display = ProgressDisplay(console, name)
    state, control = TrainerState(max_steps=30), TrainerControl()
    arguments = TrainingArguments(output_dir="none")
    display.on_train_begin(arguments, state, control)
    for state.global_step in range(1, steps + 1):
        display.on_log(arguments, state, control, logs=logs)
    display.stop()


def test_progress_shows_the_name_of_the_run_unchanged() -> None:
    shown, name = io.StringIO(), "lr{1e-4} a[/b] x[lora]"
    logs = {"step/channel_b": 1.0, "loss": 0.25, "rollout/per_second": 3.5}
    shown_steps(Console(file=shown, force_terminal=True, width=100), name, 2, **logs)
    line = Text.from_ansi(shown.getvalue().replace("\r", "\n")).plain
    assert name in line
    assert "2/30 channel B loss 0.2500 3.5 rollouts/s" in line


def test_a_step_names_the_reasons_of_answers_that_were_not_read() -> None:
    shown, reasons = io.StringIO(), {"fenced": 3.0, "text_behind": 0.0, "invalid_rollout": 4.0}
    counts = {f"stage2_ab/channel_b/{name}": count for name, count in reasons.items()}
    shown_steps(
        Console(file=shown, width=100), "run", 20, **counts, loss=0.25, **{"step/channel_b": 1}
    )
    assert "loss 0.2500 (answers: 3 fenced, 4 invalid_rollout) " in shown.getvalue()


def test_no_progress_line_is_in_a_log_file() -> None:
    shown = io.StringIO()
    shown_steps(Console(file=shown), "run", 30, **{"step/channel_b": 0.0, "loss": None})
    lines = shown.getvalue().splitlines()
    assert [line[:20] for line in lines] == ["step 20/30 channel A", "step 30/30 channel A"]
    assert "loss not finite" in lines[-1]


def test_figures_are_formatted() -> None:
    seconds = {0.4: "0s", 59.7: "1m00s", 7800: "2h10m", 442_800: "5d03h", math.inf: "?"}
    assert {value: duration(value) for value in seconds} == seconds
    numbers = {None: "not a number", 1920.0: "1,920", 12.3456: "12.35", 1e-4: "1.000e-04"}
    assert {value: number(value) for value in numbers} == numbers
    assert (score(0.78125), score(None)) == ("0.781", "-")
    assert (fraction(1, 3), fraction(1, 0), counted(1200, "step")) == ("33.3%", "-", "1,200 steps")
