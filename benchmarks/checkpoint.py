"""A toy checkpoint whose greedy answers are varied, whole text and never end by themselves."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from learner.models.toy import make_model

WEIGHTS = "model.safetensors"


def make_checkpoint(folder: Path) -> Path:
    """The toy model with larger random weights, which makes it say different things.

    The output rows of special tokens, and of tokens that are no whole characters, are zero:
    a logit of zero is never the largest of the others' thousand random ones.
    """
    out = folder / "checkpoint"
    make_model(out, seed=0, tie=False)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(out / WEIGHTS)
    for name, weight in weights.items():
        if weight.ndim >= 2:
            wide = "embed_tokens" in name or "lm_head" in name
            weight.normal_(0.0, 0.25 if wide else 0.12, generator=generator)
    weights["lm_head.weight"][_never_answered(out)] = 0.0
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    return out


def _never_answered(checkpoint: Path) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))], skip_special_tokens=True)
    return [i for i, text in enumerate(texts) if not text or "\ufffd" in text]
