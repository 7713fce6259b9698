"""Attention within the segments of a packed row: as separate rows have it, and at what cost."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3VLForConditionalGeneration

from learner.data.toy import ToyData
from learner.models.attention import (
    packed_attention,
    packed_bounds,
)
from learner.models.load import LoadedModel
from learner.models.packing_check import check_packing
from learner.objectives.numerics import as_on_cuda
from learner.types import Sample
from shared_contracts.errors import ContractError
from tests.unit.loaded_models import load_small
from tests.unit.mixed_samples import mixed_samples
from tests.unit.packed_logits import packed_logits
from tests.unit.toy_learner import ToyLearner

pytestmark = pytest.mark.req("FULL-01")

LORA = {"train_type": "lora", "lora_rank": 4, "lora_alpha": 8}


Load = Callable[..., LoadedModel]


@pytest.fixture
def load(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> Load:
    """The toy model by a small run's config with these sections."""
    return partial(load_small, toy_checkpoint, toy_data, tmp_path)


@pytest.fixture
def loaded(load: Load) -> LoadedModel:
    return load()


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    return mixed_samples(tmp_path_factory.mktemp("images"))


def of_lengths(lengths: list[int], heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    """Queries, keys and values of segments in one row."""
    generator = torch.Generator().manual_seed(len(lengths))
    shape = (1, heads, sum(lengths), 8), (1, kv_heads, sum(lengths), 8)
    return [torch.randn(s, generator=generator) for s in (shape[0], shape[1], shape[1])]


def bounds_of(lengths: list[int]) -> dict[str, Any]:
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return packed_bounds(starts, max(lengths))


def dense(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """By a mask over the whole row."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (owner[:, None] == owner) & torch.ones(len(owner), len(owner)).tril().bool()
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(2, 3) * 0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize(
    "lengths", [[5], [7, 7, 7], [9, 10, 8], [3, 30, 1, 12]], ids=["one", "equal", "padded", "loop"]
)
def test_every_way_equals_the_mask_over_the_whole_row(lengths: list[int]) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in of_lengths(lengths))
    found, _ = packed_attention(torch.nn.Module(), q, k, v, None, 0.5, **bounds_of(lengths))
    wanted = dense(q, k, v, lengths)
    assert torch.allclose(found, wanted, atol=1e-6)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0))
    ours = torch.autograd.grad((found * weights).sum(), (q, k, v))
    theirs = torch.autograd.grad((wanted * weights).sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_forward_without_bounds_is_that_of_sdpa(
    loaded: LoadedModel, toy_checkpoint: Path, samples: list[Sample]
) -> None:
    """Generation with a cache and a padded batch, and one sequence alone."""
    plain: Any = Qwen3VLForConditionalGeneration.from_pretrained(
        toy_checkpoint, dtype=torch.float32
    )
    own: Any = loaded.model.eval()
    ids = torch.arange(40, 64).view(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    for model in (own, plain):
        model.generation_config.eos_token_id = None
    ours, theirs = (
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        for model in (own, plain)
    )
    assert torch.equal(ours, theirs)
    alone, wanted = (model(input_ids=ids[:1]).logits for model in (own, plain))
    assert torch.allclose(alone, wanted, atol=1e-5)


class CudaCalls(TorchDispatchMode):
    """As on CUDA: counts the calls of its kernel by tokens and heads, and waits for a value.

    A wait: a number is asked for, or a mask decides the size of a result.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = Counter[tuple[int, ...]]()
        self.waits = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name == "torch_attn::_varlen_attn":
            self.kernels[tuple(args[0].shape)[:2]] += 1
            return args[0], torch.empty(0), torch.empty(0)  # the CPU has no such kernel
        masks = [each for each in tree_leaves(args) if getattr(each, "dtype", None) == torch.bool]
        if name in ("aten::_local_scalar_dense", "aten::nonzero") or (masks and "index" in name):
            self.waits[name] += 1
        return func(*args, **(kwargs or {}))


def twice_as_deep(model: Any) -> None:
    """Append a copy of all layers of text and of images."""
    text, vision = model.model.language_model, model.model.visual
    for layers in (text.layers, vision.blocks):
        layers.extend(deepcopy(layers))
    text.config.num_hidden_layers *= 2
    vision.config.depth *= 2


def test_on_cuda_one_call_of_each_layer_takes_all_images_and_no_layer_waits(
    loaded: LoadedModel, samples: list[Sample]
) -> None:
    pack = ToyLearner(loaded).pack(samples)
    assert pack.pixel_values is not None
    waits = []
    for _ in range(2):
        calls = CudaCalls()
        with torch.no_grad(), calls, as_on_cuda():
            packed_logits(loaded.model, pack)
        config: Any = loaded.model.config
        text, vision = config.text_config, config.vision_config
        assert calls.kernels == {
            (len(pack), text.num_attention_heads): text.num_hidden_layers,
            (len(pack.pixel_values), vision.num_heads): vision.depth,
        }
        waits.append(calls.waits)
        twice_as_deep(loaded.model)
    assert waits[0] == waits[1]


@pytest.mark.req("PACK-04")
def test_images_whose_bounds_are_wrong_are_noticed(loaded: LoadedModel) -> None:
    tower: Any = loaded.inner.visual  # type: ignore[attr-defined]

    def lose(_: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        bounds = kwargs["patch_bounds"]
        return args, {**kwargs, "patch_bounds": bounds[[0, -1]], "longest_image": int(bounds[-1])}

    check_packing(loaded.model, loaded.family)
    for block in tower.blocks:
        block.register_forward_pre_hook(lose, with_kwargs=True)
    with pytest.raises(ContractError, match=r"training\.packing"):
        check_packing(loaded.model, loaded.family)


@pytest.mark.parametrize("choice", ["flash_attention_2", "flash_attention_3"])
def test_flash_attention_that_is_not_installed_is_refused(load: Load, choice: str) -> None:
    with pytest.raises(ContractError, match=rf"attn_implementation: {choice} is not installed"):
        load(model={"attn_implementation": choice})
