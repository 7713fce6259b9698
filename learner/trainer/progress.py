"""Live progress of a run: step, loss, channel, rollouts per second, seconds per phase."""

from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from learner.console import tell
from learner.metrics.step_line import PHASES, channel_of, step_line

_PLAIN_EVERY = 20


class ProgressDisplay(TrainerCallback):
    """A live table on a terminal; a plain line every 20 steps elsewhere."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task(title, total=None)
        self._live: Live | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._progress.update(self._task, total=state.max_steps, completed=state.global_step)
        if self._console.is_terminal:
            self._live = Live(self._progress, console=self._console, refresh_per_second=4)
            self._live.start()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if not logs or "step/channel_b" not in logs:
            return
        self._progress.update(self._task, completed=state.global_step)
        if self._live is not None:
            self._live.update(Group(self._progress, _table(logs)))
        elif state.global_step % _PLAIN_EVERY == 0 or state.global_step == state.max_steps:
            line = step_line(state.global_step, state.max_steps, logs)
            tell(self._console, line)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Give the terminal back; idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _table(logs: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    values = {"channel": channel_of(logs), "loss": f"{logs['loss']:.4f}"}
    values |= {p: f"{logs[f'time/{p}_s']:.2f} s" for p in PHASES if f"time/{p}_s" in logs}
    values["rollouts/s"] = f"{logs.get('rollout/per_second', 0.0):.1f}"
    for name in values:
        table.add_column(name, justify="right")
    table.add_row(*values.values())
    return table
