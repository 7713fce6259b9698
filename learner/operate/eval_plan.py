"""What `learner eval` is to score, found and checked before anything is loaded (EVAL-01).

    config, options -> EvaluationPlan

Imports no torch.
"""

import os
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from learner.config.schema import Config, FullTuner, LoraTuner
from learner.data.lengths import read_json
from learner.data.show import watch
from learner.rollout.colocate import Placement
from learner.runs.atomic_files import require_free
from learner.runs.checkpoint import MANIFEST, BrokenCheckpoint, checkpoints_in, read_checkpoint
from learner.runs.run_folder import EVALUATIONS, RUN
from learner.training.checkpoint_checks import check_checkpoint, check_taught_format
from learner.training.input_checks import (
    check_backend,
    check_launcher,
    learner_processes,
    read_data,
)
from learner.types import Sample
from shared_contracts.adapters import ADAPTER, weight_files
from shared_contracts.errors import ContractError, ContractErrors


@dataclass(frozen=True)
class EvaluationPlan:
    """config: as it is evaluated: `model.model` is what is loaded first.

    checkpoint: what is scored. adapter: it is one, on top of `model.model`.
    data: the file of `samples`. out: the folder that is made. placement: of a colocated server.
    """

    config: Config
    checkpoint: Path
    adapter: bool
    data: Path
    samples: list[Sample]
    out: Path
    placement: Placement | None

    @property
    def run(self) -> Path | None:
        """The folder of the run that the evaluation is in, if any."""
        folder = self.out.parent.parent
        return folder if self.out.parent.name == EVALUATIONS and (folder / RUN).is_file() else None


def plan_evaluation(
    config: Config,
    checkpoint: Path | None = None,
    data: Path | None = None,
    out: Path | None = None,
) -> EvaluationPlan:
    """Check everything but the servers.

    checkpoint: in the place of `model.model`. data: of `data.val_jsonl`. out: by default a new
    folder in `evaluations` of the run folder, which is none of the run's own.

    Raises ContractError: names the option, the key, or the line of the data.
    """
    check_launcher(os.environ)
    if (processes := learner_processes(os.environ)) > 1:
        raise ContractError(
            "WORLD_SIZE",
            f"{processes} processes were launched, and one asks for all answers",
            "Start `learner eval` without torchrun; several servers share the answers",
        )
    scored = checkpoint.absolute() if checkpoint else config.model.model
    where = "model.model" if checkpoint is None else "--checkpoint"
    adapter = checkpoint is not None and (scored / ADAPTER).is_file()
    if adapter:
        _check_adapter(config, scored)
        check_checkpoint(config.model.model)
    else:
        _check_weights(scored, where)
    check_taught_format(scored, config.custom.answer_format, where)
    evaluated = _to_score(config, config.model.model if adapter else scored, adapter=adapter)
    if (file := data.absolute() if data else config.data.val_jsonl) is None:
        found = "is missing, and so is --data"
        raise ContractError("data.val_jsonl", found, "Name a file to evaluate on")
    processor = config.model.model if adapter else scored
    (everyone,), bad = read_data(config, [file], processor, watch)
    samples = [sample for sample in everyone if sample.sample_id not in bad]
    if not samples:
        first = bad[everyone[0].sample_id]
        found = f"none of {len(everyone)} samples can be evaluated; first {first}"
        raise ContractError(str(file), found, "Mend the images, or their paths")
    placement = check_backend(evaluated, os.environ)
    folder = out.absolute() if out else evaluation_folder(config.training.output_dir, scored, file)
    require_free(folder)
    return EvaluationPlan(evaluated, scored, adapter, file, samples, folder, placement)


def _to_score(config: Config, model: Path, *, adapter: bool) -> Config:
    """The config without what is of training alone.

    Whole weights are pushed, whatever the servers have loaded; nothing is sharded.
    """
    rollout = config.rollout_matching
    sync = rollout.vllm.sync.model_copy(update={"mode": "full"})
    vllm = rollout.vllm.model_copy(update={"sync": sync})
    parts: dict[str, Any] = {
        "model": config.model.model_copy(update={"model": model}),
        "training": config.training.model_copy(update={"data_parallel": "ddp"}),
        "rollout_matching": rollout.model_copy(update={"vllm": vllm}),
    }
    if not adapter:
        parts["tuner"] = FullTuner()
    return config.model_copy(update=parts)


def require_whole(folder: Path, where: str) -> None:
    """Raise ContractError for a folder of a run, and a checkpoint of which files are missing."""
    if checkpoints := checkpoints_in(folder):
        found = f"{folder} is the folder of a run"
        raise ContractError(where, found, f"Name a checkpoint in it, such as {checkpoints[0]}")
    if (folder / MANIFEST).is_file():
        try:
            read_checkpoint(folder)
        except BrokenCheckpoint as error:
            raise ContractError(where, f"is not whole: {error}", "Name another one") from error


def _check_weights(folder: Path, where: str) -> None:
    """A folder that a model can be loaded from; where: what names it."""
    require_whole(folder, where)
    try:
        check_checkpoint(folder)
    except ContractError as error:
        raise ContractError(where, error.found, error.do) from error
    weight_files(folder, where)


def _check_adapter(config: Config, folder: Path) -> None:
    """The adapter is of the kind that the config makes."""
    tuner, do = config.tuner, "Give the config of its run, such as its resolved_config.yaml"
    if not isinstance(tuner, LoraTuner):
        found = f"{folder} is an adapter, and tuner.train_type of the config is {tuner.train_type}"
        raise ContractError("--checkpoint", found, do)
    made = read_json(folder / ADAPTER)
    values = {  # by the names of peft's file
        "lora_rank": (tuner.lora_rank, made.get("r")),
        "lora_alpha": (tuner.lora_alpha, made.get("lora_alpha")),
        "use_dora": (tuner.use_dora, made.get("use_dora", False)),
    }
    if errors := [
        ContractError(f"tuner.{key}", f"is {ours}, and that of the adapter is {its}", do)
        for key, (ours, its) in values.items()
        if ours != its
    ]:
        raise ContractErrors(errors)


def evaluation_folder(run: Path, checkpoint: Path, data: Path) -> Path:
    """The first of `checkpoint-500-val`, `checkpoint-500-val-2`, ... that the run does not have."""
    folder, name = run / EVALUATIONS, f"{checkpoint.name}-{data.stem}"
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(folder / each for each in names if not (folder / each).exists())
