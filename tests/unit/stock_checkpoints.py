"""Checkpoints as others publish them: without coordinate tokens."""

from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3VLForConditionalGeneration

from learner.models.toy import make_text_tokenizer, toy_config, toy_processor


def make_stock(path: Path, *, tie: bool, rows: int | None = None) -> Path:
    """A tiny bfloat16 Qwen3-VL without coordinate tokens; `rows` above its vocabulary pads it."""
    tokenizer = make_text_tokenizer()
    config = toy_config(tokenizer, tie)
    config.get_text_config().vocab_size = rows or len(tokenizer)
    torch.manual_seed(0)
    model: PreTrainedModel = Qwen3VLForConditionalGeneration(config)
    model.bfloat16().save_pretrained(path)
    toy_processor(tokenizer).save_pretrained(path)
    return path
