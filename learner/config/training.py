"""`training`: the optimizer, steps, packing, saving and logging; types of single values."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from shared_contracts.errors import ContractError
from shared_contracts.strict_model import FreeOnResume, Refusal, StrictModel
from shared_contracts.yaml12 import written_path


def _absolute(value: Any) -> Path:
    return written_path(value).absolute()


# Relative paths start at the current working directory.
AbsolutePath = Annotated[Path, BeforeValidator(_absolute)]

# transformers' schedules that need no further arguments.
SchedulerName = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
]
Strategy = Literal["no", "steps"]
DataParallel = Literal["ddp", "fsdp2"]
# transformers' trackers, by its names; `learner.training.run_log` starts them.
Tracker = Literal[
    "azure_ml",
    "clearml",
    "codecarbon",
    "comet_ml",
    "dagshub",
    "dvclive",
    "flyte",
    "kubeflow",
    "mlflow",
    "neptune",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
]
ReportTo = Literal[Tracker, "none"]

# Keys of `training` where null is the same as leaving them out.
NULL_MEANS_DERIVED = ("logging_dir", "vit_lr", "aligner_lr")


class TrainingConfig(StrictModel):
    """`training`: the optimizer, the step budget, packing, saving and logging."""

    run_name: FreeOnResume[str] = Field(min_length=1)
    """name of the run in logs and trackers"""
    output_dir: FreeOnResume[AbsolutePath]
    """run folder: checkpoints, logs, metrics"""
    logging_dir: FreeOnResume[AbsolutePath] = Field(
        default_factory=lambda data: Path(data["output_dir"]) / "tensorboard",
        description="TensorBoard's folder; null: `tensorboard` in `output_dir`",
    )
    seed: int = Field(default=42, ge=0, lt=2**32)
    """seed of initial state, data order and rollouts"""

    learning_rate: float = Field(gt=0, description="peak learning rate of the language model")
    vit_lr: float = Field(default_factory=lambda data: float(data["learning_rate"]), ge=0)
    """peak learning rate of the vision tower; 0: it is frozen, without gradients; null:
    `learning_rate`"""
    aligner_lr: float = Field(default_factory=lambda data: float(data["learning_rate"]), ge=0)
    """peak learning rate of the aligner; 0: it is frozen; null: `learning_rate`"""
    lr_scheduler_type: SchedulerName = "cosine"
    """schedule of the learning rate, by transformers' name"""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """fraction of the steps in which the learning rate rises"""
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay of AdamW")
    max_grad_norm: float = Field(default=1.0, gt=0)
    """gradients are clipped to this norm"""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="beta1 of AdamW")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="beta2 of AdamW")

    max_steps: FreeOnResume[int | None] = Field(default=None, ge=1)
    """number of optimizer steps; set this or `num_train_epochs`"""
    num_train_epochs: FreeOnResume[float | None] = Field(default=None, gt=0)
    """passes over the data; set this or `max_steps`"""
    effective_batch_size: int = Field(ge=1)
    """samples per optimizer step, of all processes together"""
    per_device_train_batch_size: FreeOnResume[int] = Field(default=1, ge=1)
    """`effective_batch_size` must be a multiple of this times the number of processes; no effect on
    forwards, which take packs"""
    gradient_accumulation_steps: FreeOnResume[int | None] = Field(default=None, ge=1)
    """null: derived; else it must equal the derived value"""
    data_parallel: DataParallel = "ddp"
    """with several processes: `ddp`, each has the whole model; `fsdp2`, each has a part of it"""

    packing: bool = Field(default=True, description="several samples share one forward")
    packing_buffer: int = Field(default=256, ge=1)
    """most segments of a process that wait for a pack"""
    packing_min_fill_ratio: FreeOnResume[float] = Field(default=0.6, ge=0, le=1)
    """warn if packs are filled less than this"""
    packing_drop_last: bool = Field(default=True, description="must be true when packing")

    eval_strategy: FreeOnResume[Strategy] = "no"
    """`steps`: evaluate by rollouts on `data.val_jsonl`"""
    eval_steps: FreeOnResume[int | None] = Field(default=None, ge=1)
    """optimizer steps between evaluations"""
    per_device_eval_batch_size: FreeOnResume[int] = Field(default=1, ge=1)
    """no effect on rollouts; they use `rollout_matching.decode_batch_size`"""
    save_strategy: FreeOnResume[Strategy] = "steps"
    """`steps`: write checkpoints"""
    save_steps: FreeOnResume[int] = Field(default=500, ge=1)
    """optimizer steps between checkpoints"""
    save_total_limit: FreeOnResume[int | None] = Field(default=None, ge=1)
    """checkpoints kept; null: all"""
    resume: FreeOnResume[Literal["never", "auto"]] = "never"
    """`auto`: continue from the newest complete checkpoint in `output_dir`, or start from the
    beginning if there is none; `never`: refuse a folder that holds a run"""
    report_to: FreeOnResume[Annotated[tuple[ReportTo, ...], Field(strict=False)]] = ("tensorboard",)
    """trackers that get the metrics and the config, by transformers' names; `[none]`: only the run
    folder"""
    log_rollouts: FreeOnResume[bool] = True
    """log the answers of channel B and how they were used"""
    push_to_hub: FreeOnResume[bool] = False
    """when training has ended, push the model of the last checkpoint, with merged adapters and a
    model card, to the Hugging Face Hub; the token is that of `HF_TOKEN` or of `hf auth login`"""
    hub_model_id: FreeOnResume[str | None] = None
    """repository on the Hub, such as `my-name/my-detector`"""
    hub_private_repo: FreeOnResume[bool] = True
    """a repository that a push creates is private"""

    @model_validator(mode="before")
    @classmethod
    def _null_means_derived(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if v is not None or k not in NULL_MEANS_DERIVED}

    @field_validator("report_to")
    @classmethod
    def _no_tracker_twice(cls, report_to: tuple[ReportTo, ...]) -> tuple[ReportTo, ...]:
        if "none" in report_to and len(report_to) > 1:
            raise Refusal("none beside trackers", "Write [none] alone, or take none out")
        if len(set(report_to)) < len(report_to):
            raise Refusal("a tracker is named twice", "Name each once")
        return report_to

    @property
    def trackers(self) -> list[Tracker]:
        return [tracker for tracker in self.report_to if tracker != "none"]

    def disagreements(self) -> Iterator[Refusal]:
        yield from self._of_steps()
        yield from self._of_batches()
        if self.packing and not self.packing_drop_last:
            yield Refusal(
                "is false with packing", "Set it to true, or packing to false", "packing_drop_last"
            )
        if self.warmup_ratio > 0 and self.lr_scheduler_type == "constant":
            found = f"{self.warmup_ratio} has no effect with lr_scheduler_type: constant"
            yield Refusal(found, "Use constant_with_warmup, or set it to 0", "warmup_ratio")
        if self.resume == "auto" and self.save_strategy == "no":
            found = "auto, and save_strategy is no: there would be nothing to resume from"
            yield Refusal(found, "Set save_strategy to steps, or resume to never", "resume")
        if self.push_to_hub:
            yield from self._of_hub()

    def _of_hub(self) -> Iterator[Refusal]:
        if self.hub_model_id is None:
            do = "Name the repository, such as my-name/my-detector"
            yield Refusal("is missing with push_to_hub: true", do, "hub_model_id")
        elif (fault := repository_fault(self.hub_model_id)) is not None:
            yield Refusal(fault, "Write it like my-name/my-detector", "hub_model_id")
        if self.save_strategy == "no":
            found = "true, and save_strategy is no: there would be no checkpoint to push"
            do = "Set save_strategy to steps, or push_to_hub to false"
            yield Refusal(found, do, "push_to_hub")

    def _of_steps(self) -> Iterator[Refusal]:
        if (self.max_steps is None) == (self.num_train_epochs is None):
            found = "is missing" if self.max_steps is None else "is set beside num_train_epochs"
            yield Refusal(found, "Set one of max_steps and num_train_epochs", "max_steps")
        if self.eval_strategy == "no":
            return
        if self.eval_steps is None:
            yield Refusal("is missing", "Set it, or eval_strategy to no", "eval_steps")
        elif self.max_steps is not None and self.eval_steps > self.max_steps:
            yield Refusal(
                f"{self.eval_steps}, and the run ends after {self.max_steps} steps: it evaluates "
                "nothing",
                "Lower it, or set eval_strategy to no",
                "eval_steps",
            )

    def _of_batches(self) -> Iterator[Refusal]:
        batch, micro = self.effective_batch_size, self.per_device_train_batch_size
        steps = self.gradient_accumulation_steps
        if batch % micro:
            yield _indivisible(batch, micro)
        elif steps is not None and batch // micro % steps:
            yield Refusal(
                f"{steps}, but effective_batch_size {batch} / per_device_train_batch_size {micro} "
                f"makes {batch // micro}, divided by the number of processes",
                "Leave it out",
                "gradient_accumulation_steps",
            )

    def total_steps(self, samples: int) -> int:
        if self.max_steps is not None:
            return self.max_steps
        assert self.num_train_epochs is not None, "checked with the config"
        return math.ceil(self.num_train_epochs * (samples // self.effective_batch_size))

    def resolve_accumulation(self, world_size: int) -> int:
        """Return the micro batches of each process in an optimizer step (CFG-07).

        Raises ContractError if `effective_batch_size` cannot be divided evenly, or if
        `gradient_accumulation_steps` is set and differs from the derived value.
        """
        per_micro_step = self.per_device_train_batch_size * world_size
        derived, rest = divmod(self.effective_batch_size, per_micro_step)
        if rest:
            fault = _indivisible(self.effective_batch_size, per_micro_step)
            raise ContractError(f"training.{fault.key}", fault.found, fault.do)
        if self.gradient_accumulation_steps not in (None, derived):
            raise ContractError(
                "training.gradient_accumulation_steps",
                f"is {self.gradient_accumulation_steps}, but effective_batch_size "
                f"{self.effective_batch_size} over per_device_train_batch_size * world_size "
                f"{per_micro_step} makes {derived}",
                f"Leave it out, or set it to {derived}",
            )
        return derived


def repository_fault(name: str) -> str | None:
    """Return why the Hub allows no repository of this name; None if it does."""
    from huggingface_hub.errors import HFValidationError  # most configs load without it
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        return str(error)
    return None


def _indivisible(effective_batch_size: int, per_micro_step: int) -> Refusal:
    below = effective_batch_size // per_micro_step * per_micro_step
    choices = [str(n) for n in (below, below + per_micro_step) if n]
    return Refusal(
        f"{effective_batch_size} is not divisible by per_device_train_batch_size * world_size "
        f"= {per_micro_step}",
        f"Use a multiple of it, such as {' or '.join(choices)}",
        "effective_batch_size",
    )
