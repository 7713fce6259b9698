"""What the Trainer of transformers is told of a config."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import DistributedType
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import TrainingArguments

from learner.config.load import dump_resolved
from learner.config.schema import Config

# Trainer and accelerate know no other way to leave buffers alone, which every forward would
# overwrite, also between two forwards of which one backward needs both (CHA-01).
warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)


@dataclass
class RunArguments(TrainingArguments):
    """Trainer's arguments, and what they come from: trackers show a run's arguments.

    rollmatch: the resolved config.
    """

    rollmatch: dict[str, Any] = field(default_factory=dict)


def training_arguments(config: Config, folder: Path, processes: int = 1) -> RunArguments:
    """Trainer's arguments; one dataloader batch is one process's share of an optimizer step."""
    training = config.training
    arguments = RunArguments(
        output_dir=str(folder),
        seed=training.seed,
        use_cpu=not torch.cuda.is_available(),
        bf16=config.model.torch_dtype == "bfloat16",
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
        rollmatch=yaml.safe_load(dump_resolved(config)),
        **_sharding(config),
    )
    if arguments.fsdp:
        _complete_sharding(arguments)
    return arguments


def _sharding(config: Config) -> dict[str, Any]:
    """FSDP2: a piece of every layer in each process; checkpoints have whole weights."""
    if config.training.data_parallel != "fsdp2":
        return {}
    return {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "FULL_STATE_DICT"}}


def _complete_sharding(arguments: TrainingArguments) -> None:
    """What `fsdp_config` has no keys for."""
    if arguments.bf16:  # gradients of all processes are summed in float32, as under DDP
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        arguments.fsdp_plugin_args["mixed_precision_policy"] = policy
    if arguments.use_cpu:  # accelerate shards what it takes for GPUs alone, and does not say so
        arguments.distributed_state.distributed_type = DistributedType.MULTI_GPU
