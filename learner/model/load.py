"""Load the model to train, its processor and its tokenizer; apply the tuner."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
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
from learner.model.loading import loading
from learner.model.packed_forward import Multimodal
from learner.tokens import CoordVocab, Tokenizer
from shared_contracts.errors import ContractError

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
    """The model of the checkpoint directory, on the CPU; ContractError for a directory of none.

    Weights that are trained are float32, whatever `torch_dtype` computes in: an update of
    a bfloat16 weight is mostly lost in rounding. Under LoRA the frozen weights have
    `torch_dtype`, and peft makes the adapters float32.
    """
    with _loading(config):
        model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(
            config.model.model,
            dtype=weight_dtype(config),
            attn_implementation=config.model.attn_implementation,
        )
    return model


def prepared(config: Config, model: PreTrainedModel) -> LoadedModel:
    """`model`, which `load_weights` has loaded, on its device, with its processor and tuner.

    Raises ContractError for a directory without a processor, and for what `tuned` refuses.
    """
    with _loading(config):
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
    """`model` with the adapters that are trained, where there are any.

    Raises ContractError for target modules that the model does not have, or peft cannot adapt.
    """
    if not isinstance(tuner, LoraTuner):
        return model
    targets = tuner.target_modules
    if targets != "all-linear":
        _require_modules(model, targets)
    model.enable_input_require_grads()
    lora = LoraConfig(
        r=tuner.lora_rank,
        lora_alpha=tuner.lora_alpha,
        lora_dropout=tuner.lora_dropout,
        use_dora=tuner.use_dora,
        target_modules=_LANGUAGE_LINEAR if targets == "all-linear" else list(targets),
    )
    try:
        return get_peft_model(model, lora)
    except ValueError as error:
        raise ContractError(
            "tuner.target_modules", f"peft cannot adapt them ({error})", "Name linear layers"
        ) from error


def _require_modules(model: nn.Module, targets: Sequence[str]) -> None:
    """Each name is that of a module or the end of one; peft asks this of only one of them."""
    names = [name for name, _ in model.named_modules()]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ContractError(
                "tuner.target_modules",
                f"the model has no module {target}",
                "Name modules as in peft, such as q_proj, or all-linear",
            )


def _loading(config: Config) -> AbstractContextManager[None]:
    fix = "Give the folder of a whole Qwen3-VL checkpoint, saved with its processor"
    return loading("model.model", str(config.model.model), fix)
