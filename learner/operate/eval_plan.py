"""The plan of `learner eval`, checked before a model is loaded (EVAL-01). Imports no torch."""

import os
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from learner.config.schema import Config, FullTuner
from learner.data.checkpoint import Checkpoint
from learner.rollout.colocate import Placement
from learner.runs.atomic_files import require_free
from learner.runs.checkpoint import MANIFEST, checkpoints_in, read_checkpoint
from learner.runs.run_folder import EVALUATIONS, RUN
from learner.training.checkpoint_checks import check_taught_format
from learner.training.input_checks import (
    check_backend,
    learner_processes,
    read_data,
)
from learner.types import Sample
from shared_contracts.checkpoints import weight_files
from shared_contracts.errors import ContractError


@dataclass(frozen=True)
class EvaluationPlan:
    """config: of the evaluation; its `model.model` is the scored checkpoint, perhaps an adapter.

    data: the file of `samples`. out: the new folder. placement: of a colocated server.
    """

    config: Config
    data: Path
    samples: list[Sample]
    out: Path
    placement: Placement | None

    @property
    def run(self) -> Path | None:
        folder = self.out.parent.parent
        return folder if self.out.parent.name == EVALUATIONS and (folder / RUN).is_file() else None


def plan_evaluation(
    config: Config,
    checkpoint: Path | None = None,
    data: Path | None = None,
    out: Path | None = None,
) -> EvaluationPlan:
    """Check everything but the servers, and return the plan.

    checkpoint: replaces `model.model`. data: replaces `data.val_jsonl`. out: by default a new
    folder below `evaluations` of the run folder.

    Raises ContractError at the option, the key, or the line of the data.
    """
    if (processes := learner_processes(os.environ)) > 1:
        raise ContractError(
            "WORLD_SIZE",
            f"{processes} processes were launched, and one process requests all answers",
            "Start `learner eval` without torchrun; several servers share the answers",
        )
    scored = checkpoint.absolute() if checkpoint else config.model.model
    where = "model.model" if checkpoint is None else "--checkpoint"
    require_whole(scored, where)
    Checkpoint(scored, where).require_vocabulary()
    weight_files(scored, where)
    check_taught_format(scored, config.custom.answer_format, where)
    evaluated = _to_score(config, scored)
    if (file := data.absolute() if data else config.data.val_jsonl) is None:
        found = "is missing, and so is --data"
        raise ContractError("data.val_jsonl", found, "Name a file to evaluate on")
    (file_samples,), bad = read_data(config, [file], scored)
    samples = [sample for sample in file_samples if sample.sample_id not in bad]
    placement = check_backend(evaluated, os.environ)
    folder = out.absolute() if out else evaluation_folder(config.training.output_dir, scored, file)
    require_free(folder)
    return EvaluationPlan(evaluated, file, samples, folder, placement)


def _to_score(config: Config, model: Path) -> Config:
    """Return the config with training-only settings reset: full pushes, no tuner, no sharding."""
    rollout = config.rollout_matching
    sync = rollout.vllm.sync.model_copy(update={"mode": "full"})
    vllm = rollout.vllm.model_copy(update={"sync": sync})
    parts: dict[str, Any] = {
        "model": config.model.model_copy(update={"model": model}),
        "training": config.training.model_copy(update={"data_parallel": "ddp"}),
        "tuner": FullTuner(),
        "rollout_matching": rollout.model_copy(update={"vllm": vllm}),
    }
    return config.model_copy(update=parts)


def require_whole(folder: Path, where: str) -> None:
    """Raise ContractError for a run folder, and for a checkpoint with missing files."""
    if checkpoints := checkpoints_in(folder):
        found = f"{folder} is the folder of a run"
        raise ContractError(where, found, f"Name a checkpoint in it, such as {checkpoints[0]}")
    if (folder / MANIFEST).is_file():
        read_checkpoint(folder, where)


def evaluation_folder(run: Path, checkpoint: Path, data: Path) -> Path:
    """Return the first of `checkpoint-500-val`, `checkpoint-500-val-2`, ... that does not exist."""
    folder, name = run / EVALUATIONS, f"{checkpoint.name}-{data.stem}"
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(folder / each for each in names if not (folder / each).exists())
