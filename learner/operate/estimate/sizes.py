"""What a model weighs, and what a server keeps of it, from its config alone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from learner.config.schema import Config
from learner.models.load import on_meta, tuned
from shared_contracts.footprint import GIB, cache_elements, run_context

Shape = tuple[int, ...]

# Of a GPU, what the driver, kernels and a fragmented allocator leave.
USABLE = 0.92
# Of a server's GPU, what an engine needs beside weights and cache: the CUDA context, kernels,
# graphs, activations of a prefill. An engine that sleeps keeps this at most.
ENGINE_BYTES = 4 * GIB


def gib(count: float) -> str:
    return f"{count / GIB:.3g} GiB"


@dataclass(frozen=True)
class Sizes:
    """shapes: of every parameter, each tied one once, in the model's order.

    trained: parameters that get gradients. cache: elements of the KV cache of a token.
    """

    shapes: Mapping[str, Shape]
    trained: int
    cache: int

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    @property
    def largest(self) -> int:
        """Elements of the largest tensor."""
        return max(map(math.prod, self.shapes.values()))


def sizes_of(model: PreTrainedModel) -> Sizes:
    """Of a model as it is, without a tuner."""
    text: Any = model.config.get_text_config()
    return Sizes(
        shapes={name: tuple(weight.shape) for name, weight in model.named_parameters()},
        trained=_trained(model),
        cache=cache_elements(text.to_dict()),
    )


def read_sizes(config: Config) -> Sizes:
    """Of the model that a run would train. Raises as `on_meta`, and as `tuned` does."""
    model = on_meta(config)
    sizes = sizes_of(model)
    with torch.device("meta"):
        return replace(sizes, trained=_trained(tuned(model, config.tuner)))


def _trained(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


@dataclass(frozen=True)
class Serving:
    """Bytes on one device of a server.

    weights: certain. sequence: KV cache of one sequence of `length` tokens. at_once: sequences
    that the config asks of a device at once. largest: of a tensor, which a push brings whole.
    context: the `max_model_len` of the server.
    """

    weights: float
    sequence: float
    length: int
    at_once: int
    largest: float
    context: int

    @property
    def token(self) -> float:
        """KV cache of one token."""
        return self.sequence / self.length

    def sequences(self, room: float) -> int:
        """How many sequences `room` bytes hold beside the weights."""
        return max(0, int((room - self.weights) / self.sequence))

    def __str__(self) -> str:
        return (
            f"{gib(self.weights)} of weights and {gib(self.sequence)} of KV cache for a sequence "
            f"of {self.length} tokens ({self.token / 1024:.3g} KiB a token), of which "
            f"decode_batch_size asks {self.at_once} at once (max_model_len {self.context})"
        )


def serving(config: Config, sizes: Sizes, longest_prompt: int, devices: int) -> Serving:
    """What a server keeps on each of the `devices` of a replica."""
    rollout = config.rollout_matching
    element = served_bytes(config)
    length = longest_prompt + rollout.max_new_tokens
    stated = rollout.vllm.max_model_len
    if stated is not None:
        length = min(length, stated)
    return Serving(
        weights=sizes.parameters * element / devices,
        sequence=length * sizes.cache * element / devices,
        length=length,
        at_once=rollout.decode_batch_size * devices,
        largest=sizes.largest * element,
        context=stated or run_context(config.model.model, longest_prompt, rollout.max_new_tokens),
    )


def served_bytes(config: Config) -> int:
    """Of one weight of the servers."""
    return 4 if config.model.torch_dtype == "float32" else 2
