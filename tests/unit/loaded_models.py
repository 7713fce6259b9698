"""A checkpoint as the learner has it in training, without a config."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from learner.config import merge, parse_config
from learner.data.toy import ToyData
from learner.models.load import LoadedModel, load_model
from tests.unit.small_run import small_mapping
from tests.unit.toy_learner import with_awake_adapters


def loaded_from(checkpoint: Path) -> LoadedModel:
    """A model in training whose weights are those of the checkpoint."""
    model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    return LoadedModel(model.train(), AutoProcessor.from_pretrained(checkpoint))


def load_small(checkpoint: Path, data: ToyData, out: Path, **changed: Any) -> LoadedModel:
    """The model of a small run with these sections, in training mode. No adapter is zero."""
    loaded = load_model(parse_config(merge(small_mapping(checkpoint, data, out), changed)))
    loaded.model.train()
    return with_awake_adapters(loaded)
