"""A checkpoint as the learner has it in training, without a config."""

from pathlib import Path

import torch
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from learner.model.load import LoadedModel
from learner.tokens import CoordVocab


def loaded_from(checkpoint: Path) -> LoadedModel:
    """A model in training whose weights are those of the checkpoint."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(checkpoint)
    tokenizer = processor.tokenizer
    model.train()
    return LoadedModel(
        model, model.model, processor, tokenizer, CoordVocab.from_tokenizer(tokenizer)
    )
