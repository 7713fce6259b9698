"""What a terminal shows of a run while it goes on."""

import io

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments

from learner.training.run_log import ProgressDisplay


@pytest.mark.parametrize("name", ["lr{1e-4}", "a[/b]", "x[lora]"])
def test_a_run_is_shown_by_the_name_it_has(name: str) -> None:
    shown = io.StringIO()
    display = ProgressDisplay(Console(file=shown, force_terminal=True, width=100), name)
    state, control = TrainerState(max_steps=3), TrainerControl()
    display.on_train_begin(TrainingArguments(output_dir="none"), state, control)
    display.stop()
    assert name in shown.getvalue()
