"""Load the model to train, its processor and its tokenizer; apply the tuner."""

from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedModel,
    ProcessorMixin,
)

from learner.config.schema import Config, LoraTuner, TunerConfig
from learner.model.packed_forward import Multimodal
from learner.tokens import CoordVocab, Tokenizer

# `all-linear`: every linear layer of the language model; vision stays as it is.
_LANGUAGE_LINEAR = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"


@dataclass(frozen=True)
class LoadedModel:
    """model: to train, possibly wrapped by peft; inner: the multimodal module in it."""

    model: nn.Module
    inner: Multimodal
    processor: ProcessorMixin
    tokenizer: Tokenizer
    vocab: CoordVocab


def load_model(config: Config) -> LoadedModel:
    """Load the checkpoint directory `model.model` onto the GPU, or the CPU."""
    return prepared(config, load_weights(config))


def load_weights(config: Config) -> PreTrainedModel:
    """The model of the checkpoint directory, on the CPU.

    Weights that are trained are float32, whatever `torch_dtype` computes in: an update of
    a bfloat16 weight is mostly lost in rounding. Under LoRA the frozen weights have
    `torch_dtype`, and peft makes the adapters float32.
    """
    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(
        config.model.model,
        dtype=weight_dtype(config),
        attn_implementation=config.model.attn_implementation,
    )
    return model


def prepared(config: Config, model: PreTrainedModel) -> LoadedModel:
    """`model`, which `load_weights` has loaded, on its device, with its processor and tuner."""
    processor = AutoProcessor.from_pretrained(config.model.model)
    vocab = CoordVocab.from_tokenizer(processor.tokenizer)
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.nn.Module.to(model, "cuda" if torch.cuda.is_available() else "cpu")
    inner = model.model
    trained = tuned(model, config.tuner)
    return LoadedModel(trained, inner, processor, processor.tokenizer, vocab)


def weight_dtype(config: Config) -> torch.dtype:
    """What weights are loaded as."""
    if config.tuner.train_type == "lora" and config.model.torch_dtype == "bfloat16":
        return torch.bfloat16
    return torch.float32


def tuned(model: PreTrainedModel, tuner: TunerConfig) -> nn.Module:
    """`model` with the adapters that are trained, where there are any."""
    if not isinstance(tuner, LoraTuner):
        return model
    model.enable_input_require_grads()
    targets = tuner.target_modules
    lora = LoraConfig(
        r=tuner.lora_rank,
        lora_alpha=tuner.lora_alpha,
        lora_dropout=tuner.lora_dropout,
        use_dora=tuner.use_dora,
        target_modules=_LANGUAGE_LINEAR if targets == "all-linear" else list(targets),
    )
    return get_peft_model(model, lora)
