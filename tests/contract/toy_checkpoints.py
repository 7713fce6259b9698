"""Tiny checkpoints whose greedy answers differ from prompt to prompt and seed to seed."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from learner.models.toy import ToyFamily, make_model

WEIGHTS = "model.safetensors"


def make_checkpoint(out: Path, seed: int, tie: bool = True, family: ToyFamily = "qwen3_vl") -> Path:
    """The toy model with larger random weights, which makes it say different things."""
    make_model(out, seed, tie, family)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(out / WEIGHTS)
    for name, weight in weights.items():
        if weight.ndim >= 2:
            wide = "embed_tokens" in name or "lm_head" in name
            weight.normal_(0.0, 0.25 if wide else 0.12, generator=generator)
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    return out


def read_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / WEIGHTS)


def set_weights(model: torch.nn.Module, checkpoint: Path) -> None:
    """Give a model in memory the weights of another checkpoint."""
    missing, unexpected = model.load_state_dict(read_weights(checkpoint), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}, "tied to the embedding"
