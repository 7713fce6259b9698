"""A training step on a GPU: attention by torch's kernel, memory beside the estimate, a trace."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, Qwen3VLForConditionalGeneration

from learner.config import merge, parse_config
from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.models.attention import (
    attention_of,
    image_attention,
    packed_attention,
    packed_bounds,
)
from learner.models.load import LoadedModel, load_model, prepared
from learner.models.packed_forward import check_packing
from learner.models.packs import Pack
from learner.operate.step_cost import longest_pack, meta_model, step_costs
from learner.training.channels import Recipe, recipe_of
from learner.training.trainer import build_optimizer
from learner.types import Sample
from tests.unit.full_size_models import make_full_size, make_samples
from tests.unit.small_run import small_mapping

pytestmark = pytest.mark.gpu

LENGTHS = [300, 17, 513, 64]


def within_segments(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Of text: causal."""
    known = packed_bounds(bounds, max(LENGTHS))
    return packed_attention(torch.nn.Module(), q, k, v, None, 0.125, **known)[0]


def within_images(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Of the vision tower."""
    known: dict[str, Any] = {"patch_bounds": bounds, "longest_image": max(LENGTHS)}
    return image_attention(torch.nn.Module(), q, k, v, None, 0.125, **known)[0]


@pytest.mark.req("FULL-01", "PACK-04")
@pytest.mark.parametrize(
    ("attend", "heads", "width"),
    [
        (within_segments, (8, 2, 2), 64),
        (within_images, (8, 8, 8), 64),
        (within_images, (4,) * 3, 72),
    ],
    ids=["text", "images", "images_of_8b"],
)
def test_torchs_kernel_equals_attention_segment_by_segment(
    attend: Callable[..., Tensor], heads: tuple[int, ...], width: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, count, sum(LENGTHS), width) for count in heads]
    on_cpu = [torch.randn(shape, generator=generator) for shape in shapes]
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    wanted = [tensor.clone().requires_grad_() for tensor in on_cpu]
    given = [tensor.to("cuda", torch.bfloat16).requires_grad_() for tensor in on_cpu]
    plain = attend(*wanted, bounds=bounds)
    found = attend(*given, bounds=bounds.cuda())
    assert torch.allclose(found.float().cpu(), plain, atol=3e-2)
    plain.square().sum().backward()
    found.float().square().sum().backward()
    for ours, theirs in zip(given, wanted, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        distance = (ours.grad.float().cpu() - theirs.grad).norm() / theirs.grad.norm()
        assert distance < 3e-2


@dataclass(frozen=True)
class Learning:
    """A model with its optimizer and a pack on the GPU."""

    loaded: LoadedModel
    recipe: Recipe
    optimizer: torch.optim.Optimizer
    pack: Pack

    @classmethod
    def of(cls, config: Config, loaded: LoadedModel, samples: list[Sample]) -> "Learning":
        loaded.model.train()
        check_packing(loaded.model)
        recipe = recipe_of(config, loaded)
        pack = longest_pack(config, recipe.channel_a.segments(samples))[0].to(torch.device("cuda"))
        optimizer = build_optimizer(loaded.model, config.training, loaded.family)
        return cls(loaded, recipe, optimizer, pack)

    def step(self) -> Tensor:
        """Gradients are kept: the second step has them and the moments from its start."""
        total = self.recipe.loss(self.loaded.model, self.pack, "A").total
        total.backward()
        self.optimizer.step()
        return total

    def peak(self) -> int:
        """Bytes of the second step."""
        self.step()
        torch.cuda.reset_peak_memory_stats()
        assert torch.isfinite(self.step())
        return torch.cuda.max_memory_allocated()


@pytest.mark.req("FULL-03", "FULL-05", "PACK-04")
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_a_step_takes_the_memory_that_was_estimated(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path, again: bool
) -> None:
    small = small_mapping(toy_checkpoint, toy_data, tmp_path / "run")
    model = {"torch_dtype": "bfloat16", "gradient_checkpointing": again}
    config = parse_config(merge(small, {"model": model, "global_max_length": 8000}))
    samples = read_samples(toy_data.train_jsonl, allow_poly=False) * 4
    peak = Learning.of(config, load_model(config), samples).peak()
    assert peak == pytest.approx(
        step_costs(config, meta_model(config), samples)["A"].total, rel=0.15
    )


def wide_mapping(folder: Path, toy_data: ToyData) -> dict[str, Any]:
    """A run at the widths of 4B with 2 layers of each tower, and packs of 12,000 tokens."""
    model = make_full_size(folder / "4b", "4b")
    described = json.loads((model / "config.json").read_text())
    described["text_config"]["num_hidden_layers"] = 2
    described["vision_config"] |= {"depth": 2, "deepstack_visual_indexes": [0]}
    (model / "config.json").write_text(json.dumps(described))
    return merge(
        small_mapping(model, toy_data, folder / "run"),
        {
            "model": {"torch_dtype": "bfloat16", "gradient_checkpointing": True},
            "global_max_length": 12000,
        },
    )


def wide_model(config: Config) -> LoadedModel:
    """Random weights on the GPU."""
    described = AutoConfig.from_pretrained(config.model.model)
    model = Qwen3VLForConditionalGeneration._from_config(
        described, attn_implementation=attention_of("auto")
    )
    return prepared(config, model)


@pytest.mark.req("FULL-01", "FULL-02", "FULL-05")
def test_a_pack_of_12k_tokens_takes_the_memory_that_was_estimated(
    toy_data: ToyData, tmp_path: Path
) -> None:
    config, samples = parse_config(wide_mapping(tmp_path, toy_data)), make_samples(tmp_path, 8)
    cost = step_costs(config, meta_model(config), samples)["A"]
    assert cost.tokens > 11_000
    peak = Learning.of(config, wide_model(config), samples).peak()
    assert peak - cost.total + cost.working == pytest.approx(cost.working, rel=0.2)


@pytest.mark.req("FULL-01", "FULL-03", "FULL-04")
def test_the_kernels_of_a_step_are_the_fast_ones(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    """A trace: flash attention within segments, fused AdamW, no convolution of patches."""
    small = small_mapping(toy_checkpoint, toy_data, tmp_path / "run")
    config = parse_config(merge(small, {"model": {"torch_dtype": "bfloat16"}}))
    samples = read_samples(toy_data.train_jsonl, allow_poly=False)
    learning = Learning.of(config, load_model(config), samples)
    learning.step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        learning.step()
    names = {event.key for event in seen.key_averages()}
    assert any("flash_attention_forward" in name for name in names), sorted(names)
    assert any("fused_adamw" in name for name in names), sorted(names)
    assert not any("conv3d" in name or "efficient_attention" in name for name in names)
