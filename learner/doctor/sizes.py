"""What a checkpoint weighs, from its config and the headers of its files; no weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from learner.config.schema import Config
from learner.model.load import tuned
from shared_contracts.errors import ContractError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint and the file it is in."""

    file: Path
    shape: Shape


@dataclass(frozen=True)
class Tower:
    """A transformer: `layers` blocks of `heads` heads over vectors of `hidden`."""

    layers: int
    hidden: int
    heads: int


@dataclass(frozen=True)
class Sizes:
    """shapes: of every parameter, each tied one once, in the model's order.

    trained: parameters that get gradients. frozen: the others.
    kv_width: elements of a key, and of a value, over all heads of a layer.
    vision: None for a model without a vision tower. merged: patches that make an image token.
    """

    shapes: Mapping[str, Shape]
    trained: int
    frozen: int
    language: Tower
    kv_width: int
    vocabulary: int
    vision: Tower | None = None
    merged: int = 1

    @property
    def parameters(self) -> int:
        return sum(map(_count, self.shapes.values()))


def read_sizes(config: Config) -> Sizes:
    """Of the model that a run would train.

    Raises ContractError where the folder's config describes no model that is known.
    """
    folder = config.model.model
    try:
        described = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForImageTextToText.from_config(described)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        do = "Give the folder of a Qwen3-VL checkpoint"
        raise ContractError(f"{folder}/config.json", f"describes no model ({error})", do) from error
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    with torch.device("meta"):
        trained = tuned(model, config.tuner)
    counts = {True: 0, False: 0}
    for weight in trained.parameters():
        counts[weight.requires_grad] += weight.numel()
    text: Any = described.get_text_config()
    vision: Any = getattr(described, "vision_config", None)
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Sizes(
        shapes=shapes,
        trained=counts[True],
        frozen=counts[False],
        language=Tower(text.num_hidden_layers, text.hidden_size, text.num_attention_heads),
        kv_width=text.num_key_value_heads * head,
        vocabulary=text.vocab_size,
        vision=None
        if vision is None
        else Tower(vision.depth, vision.hidden_size, vision.num_heads),
        merged=1 if vision is None else vision.spatial_merge_size**2,
    )


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """What the safetensors files of a checkpoint hold, by name, from their headers.

    Raises ContractError for a file that is none.
    """
    found: dict[str, Stored] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  not a mapping
                    found[name] = Stored(file, tuple(tensors.get_slice(name).get_shape()))
        except (OSError, SafetensorError) as error:
            do = "Save the checkpoint again, or copy it whole"
            raise ContractError(str(file), f"is no safetensors file ({error})", do) from error
    return found


def _count(shape: Shape) -> int:
    return torch.Size(shape).numel()
