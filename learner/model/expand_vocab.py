"""Add the 1000 coordinate tokens to a checkpoint that has none.

The new rows of the embedding, and of an untied head, are the mean of the old rows plus
small noise: a coordinate starts as likely as an average token, and the noise is smooth in
the bin (`smooth_rows`), so neighbours start alike. A checkpoint with more rows than its
tokenizer has tokens stays padded, to the largest power of two that divided its rows.
"""

from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn
from transformers import (
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

from learner.coords import COORD_BINS, coord_token
from learner.model.coord_tokens import add_coord_tokens, smooth_rows, vocab_modules
from learner.model.loading import loading
from learner.publish import publish_directory, require_free
from learner.tokens import IM_END
from shared_contracts.errors import ContractError

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
    config = _load_config(source)
    _require_tying_possible(source, config, tie)
    processor = _load_processor(source)
    tokenizer = processor.tokenizer if isinstance(processor, ProcessorMixin) else processor
    _require_expandable(source, tokenizer)
    model = _load_model(source, config)
    _expand(model, tokenizer, torch.Generator().manual_seed(seed))
    if tie is False:
        _untie(model)
    with publish_directory(out) as part:
        model.save_pretrained(part)
        processor.save_pretrained(part)


def _loading(source: Path, what: str) -> AbstractContextManager[None]:
    return loading(str(source), f"its {what}", "Copy the checkpoint again, whole.")


def _load_config(source: Path) -> PreTrainedConfig:
    if not (source / "config.json").is_file():
        raise ContractError(
            str(source),
            "there is no config.json in it" if source.is_dir() else "there is no such folder",
            "Name the folder of a Hugging Face checkpoint: config, weights and tokenizer.",
        )
    with _loading(source, "config"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(source)
    return config


def _require_tying_possible(source: Path, config: PreTrainedConfig, tie: bool | None) -> None:
    if tie and not config.tie_word_embeddings:
        raise ContractError(
            str(source),
            "its output head has weights of its own, which tying would lose",
            "Leave --tie out.",
        )


def _load_processor(source: Path) -> Processor:
    with _loading(source, "tokenizer"):
        processor: Processor = AutoProcessor.from_pretrained(source)
    return processor


def _require_expandable(source: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    vocab = tokenizer.get_vocab()
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


def _load_model(source: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """The model in its own dtype."""
    is_vlm = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto = AutoModelForImageTextToText if is_vlm else AutoModelForCausalLM
    with _loading(source, "weights"):
        model: PreTrainedModel = auto.from_pretrained(source, dtype="auto")
    return model


def _expand(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, generator: torch.Generator
) -> None:
    """Add the tokens to the tokenizer and their rows to the model."""
    embedding, head = vocab_modules(model)
    old_tokens, old_rows = len(tokenizer), embedding.num_embeddings
    is_tied = head.weight is embedding.weight
    first = add_coord_tokens(tokenizer)
    multiple = old_rows & -old_rows if old_rows > old_tokens else 1
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=multiple, mean_resizing=False)
    embedding, head = vocab_modules(model)
    _start_rows(embedding.weight, old_tokens, first, generator)
    if not is_tied:
        _start_rows(head.weight, old_tokens, first, generator)


@torch.no_grad()
def _start_rows(
    weight: torch.Tensor, old_tokens: int, first: int, generator: torch.Generator
) -> None:
    """Set every row [hidden] from `old_tokens` on; those of the coordinates start at `first`."""
    old = weight[:old_tokens].float()
    weight[old_tokens:] = old.mean(dim=0).to(weight.dtype)
    noise = NOISE * old.std() * smooth_rows(weight.shape[1], generator)
    weight[first : first + COORD_BINS] += noise.to(weight.dtype)


def _untie(model: PreTrainedModel) -> None:
    """Give a tied model a head of its own, equal to the embedding."""
    embedding, head = vocab_modules(model)
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(embedding.weight.detach().clone())
        model.config.tie_word_embeddings = False
        model.config.get_text_config().tie_word_embeddings = False
