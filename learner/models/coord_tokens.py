"""The 1000 coordinate tokens: how a tokenizer and a checkpoint get them, how their rows begin,
and whether training has touched them.

`expand_vocab`: the new rows of the embedding, and of an untied head, are the mean of the old rows
plus small noise: a coordinate starts as likely as an average token, and the noise is smooth in the
bin (`smooth_rows`), so neighbours start alike. A checkpoint with more rows than its tokenizer has
tokens stays padded, to the largest power of two that divided its rows. `describe_expanded` writes
the same without weights, for an estimate.
"""

import math
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AddedToken,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from learner.models.loading import loading
from learner.models.published import write_published_form
from learner.runs.atomic_files import publish_directory, require_free
from learner.stages.coords import COORD_BINS, coord_token
from learner.stages.tokens import IM_END
from shared_contracts.errors import ContractError

FREQUENCIES = 16
DECAY = 4.0

# Shares of their size: how far untrained rows are from their mean, at most; what neighbours have
# in common, at most; what the waves leave over, at most.
_SPREAD, _SIMILARITY, _REST = 0.003, 0.01, 0.05


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
    mix = torch.randn(FREQUENCIES, width, generator=generator) * torch.exp(-n / DECAY)[:, None]
    rows = _waves() @ mix
    rows = rows - rows.mean(dim=0)
    return rows / rows.std()


def untrained(rows: torch.Tensor) -> str | None:
    """Why the coordinate rows [1000, width], in the order of the bins, look untrained; else None.

    The mean row taken off, new rows are nothing (all alike), independent noise (neighbouring
    bins have nothing in common, as `resize_token_embeddings` leaves them), or the few waves of
    `smooth_rows` and nothing else. Training makes neighbours alike and each row its own.
    """
    rows = rows.float()
    whole = rows.square().sum()
    rows = rows - rows.mean(dim=0)
    size = rows.square().sum()
    if size <= _SPREAD**2 * whole:  # as of bfloat16's rounding
        return "all of them are alike"
    if (rows[1:] * rows[:-1]).sum() < _SIMILARITY * size:
        return "neighbouring coordinates have nothing in common, as random rows"
    basis, _ = torch.linalg.qr(_waves() - _waves().mean(dim=0))
    if (rows - basis @ (basis.T @ rows)).square().sum() < _REST**2 * size:
        return "they are as `learner toy make-model` makes them"
    return None


def _waves() -> torch.Tensor:
    """cos(pi * n * k/999) of bin k and n = 1..16; [1000, 16]."""
    n = torch.arange(1, FREQUENCIES + 1)
    k = torch.arange(COORD_BINS) / (COORD_BINS - 1)
    return torch.cos(math.pi * k[:, None] * n)


def vocab_modules(model: PreTrainedModel) -> tuple[nn.Embedding, nn.Linear]:
    """The input embedding and the output head; their weights [rows, hidden] may be one."""
    embedding = model.get_input_embeddings()
    head = model.get_submodule("lm_head")
    assert isinstance(embedding, nn.Embedding)
    assert isinstance(head, nn.Linear)
    return embedding, head


# Standard deviation of the noise, as a share of that of the old rows.
NOISE = 0.1

Processor = ProcessorMixin | PreTrainedTokenizerBase


def expand_vocab(source: Path, out: Path, seed: int, tie: bool | None) -> None:
    """Write `source` with the coordinate tokens added to `out`: model and processor.

    tie: false gives a tied checkpoint a head of its own, a copy of the embedding; true
        asks for a tied one; None leaves it as it is.

    Raises:
        ContractError: `source` is no checkpoint, has coordinate tokens already, lacks
            `<|im_end|>`, or has a head of its own where `tie` is true; `out` not empty.
    """
    require_free(out)
    config, processor = _read_expandable(source)
    if tie and not config.tie_word_embeddings:
        raise ContractError(
            str(source),
            "its output head has weights of its own, which tying would lose",
            "Leave --tie out.",
        )
    is_vlm = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto = AutoModelForImageTextToText if is_vlm else AutoModelForCausalLM
    with _loading(source, "weights"):  # in their own dtype
        model: PreTrainedModel = auto.from_pretrained(source, dtype="auto", trust_remote_code=False)
    tokenizer, (embedding, head) = _tokenizer(processor), vocab_modules(model)
    old_tokens, is_tied = len(tokenizer), head.weight is embedding.weight
    first = add_coord_tokens(tokenizer)
    rows = _rows(embedding.num_embeddings, old_tokens, len(tokenizer))
    model.resize_token_embeddings(rows, mean_resizing=False)
    embedding, head = vocab_modules(model)
    generator = torch.Generator().manual_seed(seed)
    for weight in [embedding.weight] if is_tied else [embedding.weight, head.weight]:
        _start_rows(weight, old_tokens, first, generator)
    if is_tied and tie is False:
        head.weight = nn.Parameter(embedding.weight.detach().clone())
        model.config.tie_word_embeddings = False
        model.config.get_text_config().tie_word_embeddings = False
    with publish_directory(out) as part:
        model.save_pretrained(part)
        processor.save_pretrained(part)
        write_published_form(part)


def describe_expanded(source: Path, out: Path) -> None:
    """Write what `expand_vocab` would, without the weights: config and processor.

    Raises ContractError as `expand_vocab` does.
    """
    config, processor = _read_expandable(source)
    text, tokenizer = config.get_text_config(), _tokenizer(processor)
    old_tokens = len(tokenizer)
    add_coord_tokens(tokenizer)
    text.vocab_size = _rows(text.vocab_size, old_tokens, len(tokenizer))
    with publish_directory(out) as part:
        config.save_pretrained(part)
        processor.save_pretrained(part)
        write_published_form(part)


def _read_expandable(source: Path) -> tuple[PreTrainedConfig, Processor]:
    """The config and the processor of a checkpoint without coordinate tokens."""
    if not (source / "config.json").is_file():
        raise ContractError(
            str(source),
            "there is no config.json in it" if source.is_dir() else "there is no such folder",
            "Name the folder of a Hugging Face checkpoint: config, weights and tokenizer.",
        )
    with _loading(source, "config"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=False)
    with _loading(source, "tokenizer"):
        processor: Processor = AutoProcessor.from_pretrained(source, trust_remote_code=False)
    vocab = _tokenizer(processor).get_vocab()
    present = sum(coord_token(k) in vocab for k in range(COORD_BINS))
    if present:
        raise ContractError(
            str(source), f"it has {present} coordinate tokens already", "Use it as it is."
        )
    if IM_END not in vocab:
        raise ContractError(
            str(source),
            f"its tokenizer has no {IM_END}",
            "Use a model with Qwen's chat tokens: answers end with that one.",
        )
    return config, processor


def _tokenizer(processor: Processor) -> PreTrainedTokenizerBase:
    return processor.tokenizer if isinstance(processor, ProcessorMixin) else processor


def _rows(old_rows: int, old_tokens: int, tokens: int) -> int:
    """Rows of an embedding for `tokens`, padded as the one with `old_rows` for `old_tokens` was."""
    multiple = old_rows & -old_rows if old_rows > old_tokens else 1
    return math.ceil(tokens / multiple) * multiple


def _loading(source: Path, what: str) -> AbstractContextManager[None]:
    return loading(str(source), f"its {what}", "Copy the checkpoint again, whole.")


@torch.no_grad()
def _start_rows(
    weight: torch.Tensor, old_tokens: int, first: int, generator: torch.Generator
) -> None:
    """Set every row [hidden] from `old_tokens` on; those of the coordinates start at `first`."""
    old = weight[:old_tokens].float()
    weight[old_tokens:] = old.mean(dim=0).to(weight.dtype)
    noise = NOISE * old.std() * smooth_rows(weight.shape[1], generator)
    weight[first : first + COORD_BINS] += noise.to(weight.dtype)
