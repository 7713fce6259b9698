"""transformers' Trainer around `StepRunner`: whole steps of raw samples, no batches (RUN-02)."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from learner.config.schema import Config
from learner.config.training import TrainingConfig
from learner.data.order import BatchOrder
from learner.models.families import Family, Part
from learner.models.families.qwen_vl import QWEN_VL
from learner.models.load import sharded_policy
from learner.runs.checkpoint import Checkpoints
from learner.runs.metrics import StepReport
from learner.training.step import StepRunner
from learner.types import Sample
from shared_contracts.errors import RunError

# Only this setting of Trainer and accelerate keeps buffers unchanged. Otherwise each forward
# overwrites them, also between two forwards of one backward (CHA-01).
warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)


@dataclass
class RunArguments(TrainingArguments):
    """Trainer's arguments. rollmatch: the resolved config, which trackers show."""

    rollmatch: dict[str, Any] = field(default_factory=dict)


def training_arguments(config: Config, folder: Path, processes: int = 1) -> RunArguments:
    """Return Trainer's arguments. A dataloader batch is one process's part of an optimizer step.

    `learner.models.load` sets the mixed precision, except for FSDP2.
    """
    training, sharding = config.training, dict[str, Any]()
    if training.data_parallel == "fsdp2":  # each process has a part of every layer
        fsdp_config = {"version": 2, "state_dict_type": "FULL_STATE_DICT"}
        sharding = {"fsdp": True, "fsdp_config": fsdp_config}
    arguments = RunArguments(
        output_dir=str(folder),
        seed=training.seed,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=training.effective_batch_size // processes,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        remove_unused_columns=False,
        label_names=[],
        max_steps=training.max_steps or -1,
        num_train_epochs=training.num_train_epochs or 1.0,
        learning_rate=training.learning_rate,
        lr_scheduler_type=training.lr_scheduler_type,
        warmup_steps=training.warmup_ratio,
        max_grad_norm=training.max_grad_norm,
        eval_strategy=training.eval_strategy,
        eval_steps=training.eval_steps,
        save_strategy=training.save_strategy,
        save_steps=training.save_steps,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        run_name=training.run_name,
        disable_tqdm=True,
        rollmatch=config.model_dump(mode="json"),
        **sharding,
    )
    if sharding:
        policy = sharded_policy(config.model.torch_dtype)
        arguments.fsdp_plugin_args["mixed_precision_policy"] = policy
    if sharding and arguments.use_cpu:  # accelerate shards only on GPUs, without a warning
        arguments.distributed_state.distributed_type = DistributedType.MULTI_GPU
    return arguments


class _RankBatches(Sampler[list[int]]):
    """Indices of one rank's batches, step by step through an epoch."""

    def __init__(self, order: BatchOrder, rank: int) -> None:
        self._order = order
        self._rank = rank
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer before each epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._order.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        first = self._epoch * len(self)
        return (self._order.rank_batch(first + step, self._rank) for step in range(len(self)))


class BatchLoader(DataLoader[Any]):
    """One rank's raw batches, in the order of the run; used without `accelerate.prepare`.

    After a restart the Trainer wraps the batch sampler, and still finds its `set_epoch`.
    """

    def __init__(self, samples: Sequence[Sample], order: BatchOrder, rank: int) -> None:
        self._batches = _RankBatches(order, rank)
        dataset = cast("Dataset[Sample]", samples)  # only the methods of a sequence are used
        super().__init__(dataset, batch_sampler=self._batches, collate_fn=list)

    def set_epoch(self, epoch: int) -> None:
        self._batches.set_epoch(epoch)


def build_optimizer(
    model: nn.Module, training: TrainingConfig, family: Family = QWEN_VL
) -> torch.optim.Optimizer:
    """Return AdamW with parameter groups by part, and by weight decay (matrices only).

    On CUDA it is fused, which saves up to 4 bytes for each parameter.
    """
    rates: dict[Part, float] = {
        "language": training.learning_rate,
        "vision": training.vit_lr,
        "aligner": training.aligner_lr,
    }
    groups: dict[tuple[Part, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((family.part_of(name), parameter.ndim >= 2), []).append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "lr": rates[part],
                "weight_decay": training.weight_decay if decays else 0.0,
            }
            for (part, decays), parameters in groups.items()
        ],
        betas=(training.adam_beta1, training.adam_beta2),
        fused=torch.cuda.is_available(),
    )


class StepTrainer(Trainer):
    """Runs `StepRunner` where Trainer would run a forward.

    A dataloader batch is this process's raw samples of one whole optimizer step.
    """

    def __init__(
        self,
        runner: StepRunner,
        scorer: Callable[[int], dict[str, float]],
        loader: BatchLoader,
        optimizer: Optimizer,
        checkpoints: Checkpoints,
        **trainer: Any,
    ) -> None:
        super().__init__(**trainer)
        self.optimizer = optimizer  # Trainer takes none where weights will be sharded
        self._checkpoints = checkpoints
        self._loader = loader
        self._runner = runner
        self._scorer = scorer
        self._report: StepReport | None = None

    def training_step(
        self,
        model: nn.Module,
        inputs: list[Sample],  # type: ignore[override]  # Trainer knows dicts of tensors only
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        model.train()
        loss, self._report = self._runner.run(
            model, inputs, self.state.global_step, self.accelerator
        )
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm, equal in all processes, before the update.

        Raises RunError if it is not finite: the update would make all weights NaN.
        """
        norm: Any = super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]
        if not math.isfinite(norm):
            raise RunError(
                f"step {self.state.global_step + 1}: the gradient's norm is {float(norm)}; an "
                "update would make all weights NaN. Lower training.learning_rate, and go on "
                "from the last good checkpoint. In the first step, weights of model.model are "
                "NaN or too large"
            )
        return norm

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return this process's raw batches; `accelerate` distributes nothing."""
        return self._loader

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._report is not None:
            logs = {**logs, **self._report.metrics}
        super().log(logs, start_time)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        metrics = self._scorer(self.state.global_step)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._checkpoints.unfinished)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save Trainer's checkpoint; it appears complete or not at all."""
        write = partial(super()._save_checkpoint, model, trial)
        self._checkpoints.save(self.state.global_step, write)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Load whole weights by `from_pretrained`, and all others as Trainer does.

        In the files of some families, names and layouts differ from those of the model.
        """
        whole = self.model
        if self.is_fsdp_enabled or not isinstance(whole, PreTrainedModel):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        loaded: Any = type(whole).from_pretrained(
            resume_from_checkpoint, dtype=whole.dtype, output_loading_info=True
        )
        stored, found = loaded
        known = {n: w for n, w in stored.state_dict().items() if n not in found["missing_keys"]}
        self._issue_warnings_after_load(whole.load_state_dict(known, strict=False))


class StepsOfThisConfig(TrainerCallback):
    """Use the config's steps between saves and evaluations, also after resuming."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        state.compute_steps(args, state.max_steps)
