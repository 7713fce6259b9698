"""The files of a run folder.

<output_dir>/resolved_config.yaml   the config with its defaults
<output_dir>/run.json               versions, commit, command, process, backend
<output_dir>/metrics.jsonl          one JSON object per logged step
<output_dir>/rollout_calls.jsonl    one per step with rollouts, and per evaluation
<output_dir>/bad_samples.jsonl      samples that were replaced (`learner.data.order`)
<output_dir>/rollouts/              the answers of channel B, a file per step (`rollout_log`)
<output_dir>/tensorboard/           the same numbers for TensorBoard
<output_dir>/report.html            the report page, after training (`report`)

`tracker_callbacks` makes transformers' own callbacks for `training.report_to`, in process 0 alone.
A tracker that does not start ends the run before its first step. A tracker that breaks later gives
one warning. `ProgressDisplay` shows a run on its terminal.
"""

import json
import logging
import math
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerCallback, TrainerState
from transformers.integrations import TensorBoardCallback, get_reporting_integration_callbacks

from learner.config import dump_resolved
from learner.config.schema import Config, resolved_sync_mode
from learner.config.training import TrainingConfig
from learner.data.checkpoint import TOKENIZER, Checkpoint
from learner.rollout.colocate import Placement, describe_backend
from learner.runs.atomic_files import append_line, publish_text
from learner.runs.checkpoint import BEGINNING, Start, data_digest, prepare_folder
from learner.runs.console import channel_and_loss, step_line, tell
from learner.runs.run_folder import METRICS, RESOLVED, RUN, lock_folder
from shared_contracts.errors import RunError

_LIBRARIES = (
    *("rollmatch", "torch", "transformers", "accelerate", "peft"),
    *("tokenizers", "numpy", "scipy", "pycocotools"),  # parsing and matching depend on them
)


@contextmanager
def open_run_folder(
    config: Config, placement: Placement | None, start: Start = BEGINNING
) -> Iterator[Path]:
    """Create the folder, or truncate it to `start`; write config and facts of the run.

    The folder is locked within the block. placement: of a colocated server, if one is started.
    """
    folder = config.training.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder):
        prepare_folder(folder, start)
        facts = {**_run_facts(config, placement), "started_at_step": start.step}
        publish_text(folder / RESOLVED, dump_resolved(config))
        publish_text(folder / RUN, json.dumps(facts, indent=2) + "\n")
        yield folder


def _run_facts(config: Config, placement: Placement | None) -> dict[str, Any]:
    rollout = config.rollout_matching
    server = rollout.vllm.server if rollout.backend == "server" else None
    tokenizer = Checkpoint(config.model.model).processor / TOKENIZER
    return {
        "command": sys.argv,
        "process": {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        **software(),
        # For `learner replay`; None without a tokenizer.
        "tokenizer_sha256": data_digest(tokenizer) if tokenizer.is_file() else None,
        "rollout_backend": rollout.backend,
        "rollouts": describe_backend(config, placement),
        "servers": [entry.model_dump() for entry in server.servers] if server else [],
        "sync_mode": None if rollout.backend == "hf" else resolved_sync_mode(config, 1),
    }


def software() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _LIBRARIES},
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Return the commit of this source tree; None outside of a checkout or without git."""
    here = Path(__file__)
    # The second name fails if the checkout is of another project.
    names = ["HEAD", f"HEAD:./{here.name}"]
    command = ["git", "-C", str(here.parent), "rev-parse", *names]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return found.stdout.split()[0]


def log_calls(folder: Path, rank: int, record: dict[str, Any]) -> None:
    """Append a record of rollout calls to `rollout_calls.jsonl` (SEED-02, DIST-05).

    Other processes than process 0 have their own files: `rollout_calls.rank1.jsonl` and so on.
    """
    of_rank = f".rank{rank}" if rank else ""
    append_line(folder / f"rollout_calls{of_rank}.jsonl", json.dumps(record, allow_nan=False))


class JsonlLog(TrainerCallback):
    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS

    def on_log(self, args: Any, state: TrainerState, control: Any, **given: Any) -> None:
        logs: dict[str, Any] = given["logs"]
        values = {  # JSON has no NaN and no infinity: null
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in logs.items()
        }
        record = {"step": state.global_step, **values}
        append_line(self._path, json.dumps(record, allow_nan=False))


_PLAIN_EVERY = 20


class ProgressDisplay(TrainerCallback):
    """One progress line on a terminal; a plain line every 20 steps elsewhere."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[step]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(title, total=None, step="")

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._progress.update(self._task, total=state.max_steps, completed=state.global_step)
        if self._console.is_terminal:
            self._progress.start()

    def on_log(self, args: Any, state: TrainerState, control: Any, **given: Any) -> None:
        logs: dict[str, Any] = given["logs"]
        if "step/channel_b" not in logs:
            return
        step = channel_and_loss(logs)
        if rate := logs.get("rollout/per_second"):
            step = f"{step} {rate:.1f} rollouts/s"
        self._progress.update(self._task, completed=state.global_step, step=step)
        every = state.global_step % _PLAIN_EVERY == 0 or state.global_step == state.max_steps
        if every and not self._console.is_terminal:
            tell(self._console, step_line(state.global_step, state.max_steps, logs))

    def stop(self) -> None:
        if self._console.is_terminal:
            self._progress.stop()


_LOG = logging.getLogger(__name__)


def tracker_callbacks(training: TrainingConfig, start: Start) -> list[TrainerCallback]:
    """Return a callback for each tracker of the run.

    TensorBoard's drops the events after the step at which the run resumes.
    """

    def made(name: str) -> TrainerCallback:
        if name == "tensorboard":
            again_from = start.step + 1 if start.goes_on else None
            return TensorBoardCallback(SummaryWriter(training.logging_dir, purge_step=again_from))
        (tracker,) = get_reporting_integration_callbacks([name])
        callback: TrainerCallback = tracker()
        return callback

    return [
        # Each of its own class: transformers warns about two callbacks of one.
        type(name, (GuardedTracker,), {})(name, made(name))
        for name in training.trackers
    ]


class GuardedTracker(TrainerCallback):
    """Calls the hooks of a tracker's callback, and names the tracker in their errors.

    An error before the first step ends the run. Later the first error is a warning.
    """

    def __init__(self, name: str, tracker: TrainerCallback) -> None:
        self._name = name
        self._warned = False
        for event in dir(TrainerCallback):
            if event.startswith("on_"):
                setattr(self, event, partial(self._call, event, getattr(tracker, event)))

    def _call(self, event: str, hook: Callable[..., Any], *given: Any, **named: Any) -> Any:
        try:
            return hook(*given, **named)
        except Exception as error:  # trackers raise errors of any type
            if event in ("on_init_end", "on_train_begin"):
                raise RunError(
                    f"the tracker {self._name} does not start: {error}. Correct this, or remove it "
                    "from training.report_to"
                ) from error
            if not self._warned:
                text = "the tracker %s misses numbers of this run, which are in metrics.jsonl: %s"
                _LOG.warning(text, self._name, error)
            self._warned = True
