"""The 1000 coordinate tokens: adding them to a checkpoint, and a check for untrained rows."""

import math
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AddedToken,
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from learner.models.checkpoint_files import PROCESSOR_FILES, loading, write_published_form
from learner.runs.atomic_files import publish_directory, require_free
from learner.stages.tokens import COORD_BINS, IM_END, coord_token
from shared_contracts.errors import ContractError

FREQUENCIES = 16
DECAY = 4.0
# Standard deviation of the noise over that of the old rows.
NOISE = 0.1

# Upper limits for untrained rows: their distance from the mean over their norm, the correlation of
# neighbours, and the residual without the waves over the norm.
_SPREAD, _SIMILARITY, _REST = 0.003, 0.01, 0.05


def add_coord_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Append `<|coord_0|>` .. `<|coord_999|>` as single tokens; return the id of the first."""
    first = len(tokenizer)
    added = tokenizer.add_tokens(
        [AddedToken(coord_token(k), special=False, normalized=False) for k in range(COORD_BINS)]
    )
    assert added == COORD_BINS
    assert tokenizer.convert_tokens_to_ids(coord_token(0)) == first
    return first


def smooth_rows(width: int, generator: torch.Generator) -> torch.Tensor:
    """Return random float32 rows (1000, width), mean 0 and variance 1, smooth in the bin.

    Each column is a random sum of cos(pi * n * k/999), n = 1..16, with weights exp(-n/4).
    Neighbouring bins start alike and distant bins do not, so training of one bin also helps its
    neighbours.
    """
    n = torch.arange(1, FREQUENCIES + 1)
    mix = torch.randn(FREQUENCIES, width, generator=generator) * torch.exp(-n / DECAY)[:, None]
    rows = _waves() @ mix
    rows = rows - rows.mean(dim=0)
    return rows / rows.std()


def untrained(rows: torch.Tensor) -> str | None:
    """Return why the coordinate rows (1000, width), by bin, look untrained; None if they do not.

    Without their mean, untrained rows are one of three: about zero, independent noise (as
    `resize_token_embeddings` makes them), or the few waves of `smooth_rows`. Training makes
    neighbours alike, and gives each row a part of its own.
    """
    rows = rows.float()
    whole = rows.square().sum()
    rows = rows - rows.mean(dim=0)
    size = rows.square().sum()
    if size <= _SPREAD**2 * whole:  # the limit leaves room for the rounding of bfloat16
        return "all of them are alike"
    if (rows[1:] * rows[:-1]).sum() < _SIMILARITY * size:
        return "neighbouring coordinates do not correlate, as random rows"
    basis, _ = torch.linalg.qr(_waves() - _waves().mean(dim=0))
    if (rows - basis @ (basis.T @ rows)).square().sum() < _REST**2 * size:
        return "they are as `learner toy make-model` makes them"
    return None


def _waves() -> torch.Tensor:
    """Return cos(pi * n * k/999) for bin k and n = 1..16; (1000, 16)."""
    n = torch.arange(1, FREQUENCIES + 1)
    k = torch.arange(COORD_BINS) / (COORD_BINS - 1)
    return torch.cos(math.pi * k[:, None] * n)


def vocab_modules(model: PreTrainedModel) -> tuple[nn.Embedding, nn.Linear]:
    """Return the input embedding and the output head; their (rows, hidden) weight may be shared."""
    embedding = model.get_input_embeddings()
    head = model.get_submodule("lm_head")
    assert isinstance(embedding, nn.Embedding)
    assert isinstance(head, nn.Linear)
    return embedding, head


def expand_vocab(source: Path, out: Path, seed: int, tie: bool | None) -> None:
    """Write model and processor of `source`, with coordinate tokens, to `out`.

    The new rows of the embedding, and of an untied head, are the mean of the old rows plus small
    noise: a coordinate starts as likely as an average token. The noise is that of `smooth_rows`. A
    checkpoint with more rows than tokens stays padded to the largest power of two that divides its
    number of rows.

    tie: false unties the head, which becomes a copy of the embedding; true requires a tied
        checkpoint; None keeps it as it is.

    Raises ContractError if `source` is no checkpoint, is of text alone, has coordinate tokens,
    lacks `<|im_end|>`, or is untied and `tie` is true; and if `out` is not empty.
    """
    require_free(out)
    config, processor = _read_expandable(source)
    if tie and not config.tie_word_embeddings:
        raise ContractError(
            str(source),
            "its output head has weights of its own, which tying would lose",
            "Leave --tie out.",
        )
    with _loading(source, "weights"):  # in their own dtype
        model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(
            source, dtype="auto", trust_remote_code=False
        )
    tokenizer, (embedding, head) = processor.tokenizer, vocab_modules(model)
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
        write_published_form(part, source, PROCESSOR_FILES)


def describe_expanded(source: Path, out: Path) -> None:
    """Write config and processor as `expand_vocab` does, without weights; for an estimate."""
    config, processor = _read_expandable(source)
    text, tokenizer = config.get_text_config(), processor.tokenizer
    old_tokens = len(tokenizer)
    add_coord_tokens(tokenizer)
    text.vocab_size = _rows(text.vocab_size, old_tokens, len(tokenizer))
    with publish_directory(out) as part:
        config.save_pretrained(part)
        processor.save_pretrained(part)
        write_published_form(part)


def _read_expandable(source: Path) -> tuple[PreTrainedConfig, ProcessorMixin]:
    if not (source / "config.json").is_file():
        raise ContractError(
            str(source),
            "it has no config.json" if source.is_dir() else "there is no such folder",
            "Name the folder of a Hugging Face checkpoint: config, weights and tokenizer.",
        )
    with _loading(source, "config"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=False)
    with _loading(source, "tokenizer"):
        processor = AutoProcessor.from_pretrained(source, trust_remote_code=False)
    if not isinstance(processor, ProcessorMixin):
        raise ContractError(
            str(source), "it is a model of text alone", "Use a model of the Qwen-VL family."
        )
    vocab = processor.tokenizer.get_vocab()
    present = sum(coord_token(k) in vocab for k in range(COORD_BINS))
    if present:
        raise ContractError(
            str(source), f"it has {present} coordinate tokens already", "Use it as it is."
        )
    if IM_END not in vocab:
        raise ContractError(
            str(source),
            f"its tokenizer has no {IM_END}",
            f"Use a model with Qwen's chat tokens: answers end with {IM_END}.",
        )
    return config, processor


def _rows(old_rows: int, old_tokens: int, tokens: int) -> int:
    multiple = old_rows & -old_rows if old_rows > old_tokens else 1
    return math.ceil(tokens / multiple) * multiple


def _loading(source: Path, what: str) -> AbstractContextManager[None]:
    return loading(str(source), f"its {what}", "Copy the checkpoint again, whole.")


@torch.no_grad()
def _start_rows(
    weight: torch.Tensor, old_tokens: int, first: int, generator: torch.Generator
) -> None:
    old = weight[:old_tokens].float()
    weight[old_tokens:] = old.mean(dim=0).to(weight.dtype)
    noise = NOISE * old.std() * smooth_rows(weight.shape[1], generator)
    weight[first : first + COORD_BINS] += noise.to(weight.dtype)
