"""The run folder: what was asked, with what, and a line of numbers per logged step.

<output_dir>/resolved_config.yaml   the config as it was understood
<output_dir>/run.json               versions, commit, command, process, who generates
<output_dir>/metrics.jsonl          one JSON object per logged step
<output_dir>/rollout_calls.jsonl    one per step with rollouts, and per evaluation
<output_dir>/rollouts/              the answers of channel B, a file per step (`rollout_log`)
<output_dir>/tensorboard/           the same numbers for TensorBoard
<output_dir>/report.html            all of it on a page, when training has ended (`report`)
"""

import json
import math
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from learner.config import Config, dump_resolved
from learner.config.sync_mode import resolved_sync_mode
from learner.process_mark import mark_of_this
from learner.publish import append_line, publish_text
from learner.resume import BEGINNING, METRICS, RESOLVED, RUN, Start, data_digest, prepare_folder
from learner.rollout.colocate import Placement
from learner.rollout.describe import describe_backend

_LIBRARIES = (
    *("rollmatch", "torch", "transformers", "accelerate", "peft"),
    *("tokenizers", "numpy", "scipy", "pycocotools"),  # what became of an answer depends on them
)


def open_run_folder(config: Config, placement: Placement | None, start: Start = BEGINNING) -> Path:
    """Create the folder, or bring it back to `start`; write what is known before the first step.

    placement: of a colocated server, where one is started.
    """
    folder = Path(config.training.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    prepare_folder(folder, start)
    facts = {**_run_facts(config, placement), "started_at_step": start.step}
    publish_text(folder / RESOLVED, dump_resolved(config))
    publish_text(folder / RUN, json.dumps(facts, indent=2) + "\n")
    return folder


def _run_facts(config: Config, placement: Placement | None) -> dict[str, Any]:
    rollout = config.rollout_matching
    server = rollout.vllm.server if rollout.backend == "server" else None
    return {
        "command": sys.argv,
        "process": mark_of_this(),
        **software(),
        "tokenizer_sha256": _tokenizer_digest(Path(config.model.model)),
        "rollout_backend": rollout.backend,
        "rollouts": describe_backend(config, placement),
        "servers": [entry.model_dump() for entry in server.servers] if server else [],
        "sync_mode": None if rollout.backend == "hf" else resolved_sync_mode(config, 1),
    }


def software() -> dict[str, Any]:
    """What runs here: versions, and the commit of this package."""
    return {
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _LIBRARIES},
        "commit": _commit(),
    }


def _tokenizer_digest(checkpoint: Path) -> str | None:
    """By which `learner replay` knows it again; None where there is none."""
    file = checkpoint / "tokenizer.json"
    return data_digest(file) if file.is_file() else None


def _commit() -> str | None:
    """Commit of the source tree this package runs from; None outside a checkout or without git."""
    here = Path(__file__)
    try:
        if _git(here.parent, "ls-files", here.name):  # else the checkout around it is another's
            return _git(here.parent, "rev-parse", "HEAD") or None
    except FileNotFoundError:
        pass
    return None


def _git(folder: Path, *arguments: str) -> str:
    """What git says there; nothing where it fails."""
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


class CallLog:
    """Appends what it took to get rollouts to `rollout_calls.jsonl` (SEED-02, DIST-05).

    Every process but the first has a file of its own, `rollout_calls.rank1.jsonl` and so on.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        of_rank = f".rank{rank}" if rank else ""
        self._path = folder / f"rollout_calls{of_rank}.jsonl"

    def write(self, record: dict[str, Any]) -> None:
        _append(self._path, record)


class JsonlLog(TrainerCallback):
    """Appends every log event to `metrics.jsonl`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        values = {key: _finite(value) for key, value in (logs or {}).items()}
        _append(self._path, {"step": state.global_step, **values})


def _append(path: Path, record: dict[str, Any]) -> None:
    append_line(path, json.dumps(record, allow_nan=False))


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
