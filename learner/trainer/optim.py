"""AdamW with one learning rate for the language model, the vision tower and the aligner."""

from typing import Literal

import torch
from torch import nn

from learner.config.training import TrainingConfig

Part = Literal["language", "vision", "aligner"]


def part_of(name: str) -> Part:
    """Which part of a Qwen3-VL checkpoint a parameter name belongs to.

    The aligner is everything that merges patches into language tokens: the vision
    tower's `merger` and its `deepstack_merger_list`.
    """
    parts = name.split(".")
    if "visual" not in parts:
        return "language"
    return "aligner" if any("merger" in part for part in parts) else "vision"


def build_optimizer(model: nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    """Groups by part, and by whether weight decay applies (matrices only)."""
    rates: dict[Part, float] = {
        "language": training.learning_rate,
        "vision": training.vit_lr,
        "aligner": training.aligner_lr,
    }
    groups: dict[tuple[Part, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((part_of(name), parameter.ndim >= 2), []).append(parameter)
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
    )
