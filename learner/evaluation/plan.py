"""What `learner eval` is to score, found and checked before anything is loaded (EVAL-01).

    config, options -> EvaluationPlan

Imports no torch.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from learner.checkpoint import MANIFEST, BrokenCheckpoint, checkpoints_in, read_checkpoint
from learner.config.schema import Config
from learner.config.tuner import FullTuner, LoraTuner
from learner.data.jsonl import read_samples
from learner.data.lines import BadLine, strict_json
from learner.log_cut import EVALUATIONS
from learner.preflight import check_backend, check_checkpoint, check_launcher, learner_processes
from learner.publish import require_free
from learner.rollout.colocate import Placement
from learner.types import Sample
from shared_contracts.errors import ContractError, ContractErrors

ADAPTER = "adapter_config.json"


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
    _require_one_process()
    scored = checkpoint.absolute() if checkpoint else config.model.model
    adapter = checkpoint is not None and (scored / ADAPTER).is_file()
    if adapter:
        _check_adapter(config, scored)
        check_checkpoint(config.model.model)
    else:
        _check_weights(scored, "model.model" if checkpoint is None else "--checkpoint")
    evaluated = _to_score(config, config.model.model if adapter else scored, adapter=adapter)
    file = _data_of(config, data)
    samples = read_samples(file, allow_poly=config.allow_poly)
    placement = check_backend(evaluated, os.environ)
    folder = out.absolute() if out else _new_folder(config, f"{scored.name}-{file.stem}")
    require_free(folder)
    return EvaluationPlan(evaluated, scored, adapter, file, samples, folder, placement)


def _require_one_process() -> None:
    check_launcher(os.environ)
    if (processes := learner_processes(os.environ)) > 1:
        raise ContractError(
            "WORLD_SIZE",
            f"{processes} processes were launched, and one asks for all answers",
            "Start `learner eval` without torchrun; several servers share the answers",
        )


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


def _data_of(config: Config, data: Path | None) -> Path:
    if data is not None:
        return data.absolute()
    if config.data.val_jsonl is None:
        raise ContractError(
            "data.val_jsonl", "is missing, and so is --data", "Name a file to evaluate on"
        )
    return config.data.val_jsonl


def _check_weights(folder: Path, where: str) -> None:
    """A folder that a model can be loaded from; where: what names it."""
    if checkpoints := checkpoints_in(folder):
        found = f"{folder} is the folder of a run"
        raise ContractError(where, found, f"Name a checkpoint in it, such as {checkpoints[0]}")
    if (folder / MANIFEST).is_file():
        try:
            read_checkpoint(folder)
        except BrokenCheckpoint as error:
            raise ContractError(where, f"is not whole: {error}", "Name another one") from error
    try:
        check_checkpoint(folder)
    except ContractError as error:
        raise ContractError(where, error.found, error.do) from error
    if not any(folder.glob("*.safetensors")):
        found = f"{folder} holds no *.safetensors file"
        raise ContractError(where, found, "Give the folder of a checkpoint saved with its weights")


def _check_adapter(config: Config, folder: Path) -> None:
    """The adapter is of the kind that the config makes, which nothing else tells."""
    tuner = config.tuner
    if not isinstance(tuner, LoraTuner):
        raise ContractError(
            "--checkpoint",
            f"{folder} is an adapter, and tuner.train_type of the config is {tuner.train_type}",
            "Give the config of the run that made it, such as its resolved_config.yaml",
        )
    try:
        made = strict_json((folder / ADAPTER).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, BadLine) as error:
        said = error.found if isinstance(error, BadLine) else error
        found = f"{folder / ADAPTER} cannot be read ({said})"
        raise ContractError("--checkpoint", found, "Name another one") from error
    if errors := list(_differences(tuner, made)):
        raise ContractErrors(errors)


def _differences(tuner: LoraTuner, made: dict[str, Any]) -> Iterator[ContractError]:
    """made: `adapter_config.json`, as peft writes it."""
    asked = {
        "lora_rank": (tuner.lora_rank, made.get("r")),
        "lora_alpha": (tuner.lora_alpha, made.get("lora_alpha")),
        "use_dora": (tuner.use_dora, made.get("use_dora", False)),
    }
    for key, (ours, its) in asked.items():
        if ours != its:
            yield ContractError(
                f"tuner.{key}",
                f"is {ours}, and that of the adapter is {its}",
                "Give the config of the run that made it, such as its resolved_config.yaml",
            )


def _new_folder(config: Config, name: str) -> Path:
    """The first of `name`, `name-2`, ... that is not there."""
    folder = config.training.output_dir / EVALUATIONS
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(folder / each for each in names if not (folder / each).exists())
