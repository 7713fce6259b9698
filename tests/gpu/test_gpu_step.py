"""A training step on a GPU: attention, losses, memory beside the estimate, a trace, offloading."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, Qwen3VLForConditionalGeneration

from learner.config import merge, parse_config
from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.models.attention import attention_of, image_attention, packed_attention, packed_bounds
from learner.models.load import LoadedModel, Offload, load_model, prepared
from learner.models.packed_forward import check_packing
from learner.models.packs import Pack
from learner.objectives.logit_stats import ForwardStats, Supervision
from learner.objectives.pipeline import PackLoss, Pipeline
from learner.operate.step_cost import longest_pack, meta_model, step_costs
from learner.training.channels import Recipe, recipe_of
from learner.training.trainer import build_optimizer
from learner.types import Sample
from tests.unit.full_size_models import make_full_size, make_samples
from tests.unit.loss_rows import COORD_IDS, EVERYTHING, VOCAB, annotation_row
from tests.unit.packed_logits import as_given
from tests.unit.small_run import small_mapping

pytestmark = pytest.mark.gpu

LENGTHS = [300, 17, 513, 64]


def within_segments(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """The attention of text: causal."""
    known = packed_bounds(bounds, max(LENGTHS))
    return packed_attention(nn.Module(), q, k, v, None, 0.125, **known)[0]


def within_images(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """The attention of the vision tower."""
    known: dict[str, Any] = {"patch_bounds": bounds, "longest_image": max(LENGTHS)}
    return image_attention(nn.Module(), q, k, v, None, 0.125, **known)[0]


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


def loss_of(logits: Tensor, row: Supervision) -> PackLoss:
    pipeline = Pipeline(EVERYTHING, COORD_IDS)
    selection = pipeline.select(row.to(logits.device), "A")
    reading = pipeline.reader(selection).anchor(as_given(logits))
    return pipeline(ForwardStats(reading, reading), selection, "A")


@pytest.mark.req("LOSS-05", "LOSS-06")
def test_loss_and_gradient_are_those_of_the_cpu() -> None:
    row = annotation_row()
    draw = torch.Generator().manual_seed(0)
    there = torch.randn(len(row.roles), VOCAB, generator=draw).requires_grad_()
    here = there.detach().cuda().requires_grad_()
    found, expected = loss_of(here, row), loss_of(there, row)
    found.total.backward()
    expected.total.backward()
    assert found.atoms == pytest.approx(expected.atoms, rel=1e-4)
    assert found.diagnostics == pytest.approx(expected.diagnostics, rel=1e-4)
    assert here.grad is not None
    assert there.grad is not None
    assert torch.allclose(here.grad.cpu(), there.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.req("LOSS-04")
def test_a_wide_vocabulary_takes_one_gradient_and_a_few_chunks() -> None:
    row, width = annotation_row(), 2**24
    logits = torch.randn(len(row.roles), width, device="cuda", dtype=torch.bfloat16)
    logits.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss_of(logits, row).total.backward()
    taken = torch.cuda.max_memory_allocated() - before
    chunk = 4 * width
    assert taken < logits.nbytes + 4 * chunk


@dataclass(frozen=True)
class Learning:
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


@pytest.mark.req("ROLL-03")
def test_offloading_frees_the_memory_of_the_gpu() -> None:
    model = nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    weights = [weight.clone() for weight in model.parameters()]
    before_bytes = torch.cuda.memory_allocated()
    offload, buffers = Offload(model, optimizer), []
    for _ in range(2):
        with offload.room():
            assert torch.cuda.memory_allocated() < before_bytes - 3 * 4096 * 4096 * 4 + 2**20
            assert all(weight.is_pinned() for weight in model.parameters())
            buffers.append([weight.data_ptr() for weight in model.parameters()])
        assert {weight.device.type for weight in model.parameters()} == {"cuda"}
        assert all(map(torch.equal, model.parameters(), weights))
    assert buffers[0] == buffers[1]
    optimizer.step()
