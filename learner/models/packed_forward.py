"""The one forward of a pack, which serves both channels (PACK-04).

A packed row holds several segments. Its bounds and the family's position ids, which restart per
segment, separate them. The forward gets no attention mask and no cache.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from learner.models.attention import image_bounds, packed_bounds, without_search
from learner.models.families import family_of
from learner.models.head import chunked, output_head, reading, whole_model
from learner.models.packs import Pack
from learner.objectives.logit_stats import HeadInput

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
    """Return a hook that adds these to the arguments of `module`, or replaces them."""

    def add(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, **arguments}

    return module.register_forward_pre_hook(add, with_kwargs=True)
