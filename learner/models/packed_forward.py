"""The one forward of a pack, which serves both channels, and its check (PACK-04).

A packed row holds several segments. Its bounds and the family's position ids, which restart per
segment, separate them. The forward gets no attention mask and no cache.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from learner.config.schema import Config
from learner.models.attention import image_bounds, packed_bounds, without_search
from learner.models.families import family_of
from learner.models.head import chunked, output_head, reading, whole_model
from learner.models.load import LoadedModel, load_model
from learner.models.packs import IMAGE, Pack, make_pack, make_segment
from learner.models.prompts import EncodedPrompt
from learner.objectives.logit_stats import HeadInput
from learner.types import Role, Target
from shared_contracts.errors import ContractError

T = TypeVar("T")


def packed_forward(
    model: nn.Module,
    pack: Pack,
    read: Callable[[HeadInput], T],
    embeddings: Tensor | None = None,
) -> T:
    """Run one forward of the pack, without a cache; return `read` of the input of the head.

    The model's forward calls `read` in the place of the head. There FSDP2 has the head's weights,
    and it gathers them again before the backward of the result. The result is also the output of
    all wrappers of the model.

    embeddings: (1, L, hidden) in the place of the token ids. The model finds its image placeholders
        in them and replaces these by image features.
    """
    head, whole = output_head(model), whole_model(model)
    vocabulary = whole.config.get_text_config().vocab_size

    def read_rows(hidden: Tensor) -> T:
        return read(HeadInput(hidden.squeeze(0), chunked(head), vocabulary))

    with _known_on_host(whole, pack), reading(head, read_rows):
        output = model(
            input_ids=pack.input_ids if embeddings is None else None,
            inputs_embeds=embeddings,
            position_ids=pack.position_ids,
            **family_of(whole).vision_inputs(pack, pack.mm_token_types),
            **packed_bounds(pack.bounds, max(pack.lengths)),
            attention_mask=None,
            use_cache=False,
        )
    found: T = output.logits
    return found


@contextmanager
def _known_on_host(model: PreTrainedModel, pack: Pack) -> Iterator[None]:
    """Within the block, forwards of `model` get the values of a pack that are on the host.

    So the host does not wait for the device to compute them. Hooks pass them to the modules inside
    of `model`: DDP and FSDP2 move each tensor argument to the device, and FSDP2 rounds it.
    """
    family = family_of(model)
    inner: Any = model.model
    of_inner = without_search(inner.config.get_text_config(), pack.bounds)
    if family.linear_attention is not None:
        of_inner["segment_lengths"] = pack.lengths
    hooks = []
    if pack.patches is not None:
        of_inner["image_grid_thw"] = pack.image_grid_thw
        windowed = family.windowed(inner)
        bounds = image_bounds(inner.config.vision_config, pack.patches, windowed)
        hooks.append(_adding(inner.visual, {**pack.patches.rows, **bounds}))
    hooks.append(_adding(inner, of_inner))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _adding(module: nn.Module, arguments: dict[str, Any]) -> RemovableHandle:
    def add(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, **arguments}

    return module.register_forward_pre_hook(add, with_kwargs=True)


class StartModel:
    """Forwards packs with the weights that a run started from, without gradients (GROUP-04).

    With adapters it is the trained model with disabled adapters. Without, it is a second copy of
    `model.model` on the same device. A resumed run uses the same folder.
    """

    def __init__(self, config: Config, loaded: LoadedModel) -> None:
        """loaded: the model that the run trains, before anything wraps it."""
        model = loaded.model
        self._adapted = model if isinstance(model, PeftModel) else None
        self._model = model if self._adapted else load_model(config).model.requires_grad_(False)

    def forward(self, pack: Pack, read: Callable[[HeadInput], T]) -> T:
        """Return `read` of a forward; call it before the forward of training."""
        disabled = nullcontext() if self._adapted is None else self._adapted.disable_adapter()
        with torch.no_grad(), disabled:
            return packed_forward(self._model, pack, read)


@torch.no_grad()
def check_packing(model: nn.Module) -> None:
    """Change text and image of the first of two segments, and compare the second one's logits.

    Raises ContractError if they differ: the attention does not separate segments.
    """
    was_training = model.training
    model.eval()
    moved = (_second_of_two(model, 1) - _second_of_two(model, 2)).abs().max().item()
    model.train(was_training)
    if math.isnan(moved):
        raise ContractError(
            "model.model",
            "the model's logits are NaN for a picture of one token and 7 tokens of text",
            "Give a checkpoint whose weights are finite; or set model.torch_dtype to float32, if "
            "they are too large for bfloat16",
        )
    if moved > 1e-3:
        raise ContractError(
            "training.packing",
            f"packed segments affect each other with this model and attention (logits differ by "
            f"{moved:.3g})",
            "Set model.attn_implementation to auto or sdpa, or training.packing to false",
        )


def _second_of_two(model: nn.Module, first: int) -> Tensor:
    """Return the logits (L, V) of the second of two segments in a row.

    first: value of the first segment's pixels and tokens. A segment has an image of one token and
    7 tokens of text.
    """
    whole = whole_model(model)
    inner: Any = whole.model
    tower, patch = inner.visual, inner.visual.patch_embed
    side = tower.spatial_merge_size
    values = patch.in_channels * patch.temporal_patch_size * patch.patch_size**2
    image, types = torch.tensor([inner.config.image_token_id]), torch.tensor([IMAGE])
    grid = torch.tensor([[1, side, side]])
    segments = []
    for scale, text in ((first, [first] * 7), (1, list(range(2, 9)))):
        pixels = torch.full((side * side, values), float(scale))
        target = Target(text, 0, [], np.full(7, Role.CLOSURE, dtype=np.int8), [])
        prompt = EncodedPrompt(image, types, pixels, grid)
        segments.append(make_segment(inner, "packing check", prompt, target, False))
    pack = make_pack(segments).to(next(model.parameters()).device)
    return packed_forward(model, pack, lambda given: given.head(given.hidden[8:]))
