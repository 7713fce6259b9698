"""The 1000 coordinate tokens: how a tokenizer gets them and how their rows begin."""

import math

import torch
from torch import nn
from transformers import AddedToken, PreTrainedModel, PreTrainedTokenizerBase

from learner.coords import COORD_BINS, coord_token

FREQUENCIES = 16
DECAY = 4.0


def add_coord_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Append `<|coord_0|>` .. `<|coord_999|>` as single tokens; returns the id of the first."""
    first = len(tokenizer)
    added = tokenizer.add_tokens(
        [AddedToken(coord_token(k), special=False, normalized=False) for k in range(COORD_BINS)]
    )
    assert added == COORD_BINS
    assert tokenizer.convert_tokens_to_ids(coord_token(0)) == first
    return first


def smooth_rows(width: int, generator: torch.Generator) -> torch.Tensor:
    """Random float32 rows [1000, width], mean 0 and variance 1, that vary slowly with the bin.

    Each column is a random sum of cos(pi * n * k/999), n = 1..16, of weight exp(-n/4):
    neighbouring bins start alike, far ones do not, so what is learnt for one bin holds
    for those around it.
    """
    n = torch.arange(1, FREQUENCIES + 1)
    k = torch.arange(COORD_BINS) / (COORD_BINS - 1)
    waves = torch.cos(math.pi * k[:, None] * n)
    mix = torch.randn(FREQUENCIES, width, generator=generator) * torch.exp(-n / DECAY)[:, None]
    rows = waves @ mix
    rows = rows - rows.mean(dim=0)
    return rows / rows.std()


def vocab_modules(model: PreTrainedModel) -> tuple[nn.Embedding, nn.Linear]:
    """The input embedding and the output head; their weights [rows, hidden] may be one."""
    embedding = model.get_input_embeddings()
    head = model.get_submodule("lm_head")
    assert isinstance(embedding, nn.Embedding)
    assert isinstance(head, nn.Linear)
    return embedding, head
