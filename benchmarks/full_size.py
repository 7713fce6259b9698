"""A training step at the widths of Qwen3-VL 4B, ours and the plain way, in one run.

    .venv/bin/python -m benchmarks.full_size [--only NAME ...] [--rounds N] [--out FILE.json]

    float32     a forward and backward of one pack with images: two layers, 2k tokens
    bfloat16    the same under autocast
    memory      of 8k tokens on fake tensors, with what operations need for themselves

The peer is transformers' model with the same weights: `sdpa` over the packed position ids, a
convolution as patch embedding, the logits of all rows, and the objectives as their formulas are.
In bfloat16 it has our patch embedding, because torch's convolution takes minutes on a CPU.
Nothing is started: one process, all cores. It needs 14 GiB; the peer would need 25 for 8k tokens.
"""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import get_total_norm
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from benchmarks.command import Bench, run
from benchmarks.results import Result, median_of
from learner.config import load_mapping, merge, parse_config
from learner.config.schema import Config
from learner.data.toy import DESCRIPTIONS
from learner.models.attention import attention_of
from learner.models.families.qwen_vl import QWEN_VL
from learner.models.layers import use_product
from learner.models.load import compute_in, prepared
from learner.models.packed_forward import packed_forward
from learner.models.packs import IMAGE, Pack, make_pack
from learner.models.toy import make_toy_tokenizer, toy_config, toy_processor
from learner.objectives.logit_stats import ForwardStats, LogitStats, Selection
from learner.objectives.numerics import bounded, coord_mass, full_logsumexp
from learner.operate.demo import CONFIGS
from learner.stages.tokens import COORD_BINS
from learner.training.channels import Recipe, recipe_of
from learner.types import GroundTruthObject, Sample, Shape
from shared_contracts.errors import ContractError
from tests.unit.fake_step import Costs, faked, put_on_fakes, step_model


def _module(name: str, **config: float) -> dict[str, Any]:
    """An enabled module of both channels."""
    return {"name": name, "enabled": True, "weight": 1.0, "channels": ["A", "B"], "config": config}


# Every module and every term; those that the canonical profile turns off have a small weight.
OBJECTIVE: dict[str, Any] = {
    "objective": [
        _module(
            "token_ce",
            desc_ce_weight=1.0,
            rollout_fn_desc_weight=1.0,
            rollout_matched_prefix_struct_weight=1.0,
            self_context_struct_ce_weight=0.1,
            rollout_drop_invalid_struct_ce_multiplier=1.5,
        ),
        _module("bbox_geo", smoothl1_weight=2.0, ciou_weight=0.2),
        _module(
            "coord_reg",
            coord_ce_weight=0.02,
            soft_ce_weight=0.1,
            w1_weight=0.1,
            coord_gate_weight=1.0,
            text_gate_weight=0.1,
            temperature=1.0,
            target_sigma=2.0,
            target_truncate=8,
        ),
    ],
    "diagnostics": [_module("coord_diag")],
}


@dataclass(frozen=True)
class Size:
    """A model and a pack.

    The defaults are the widths of Qwen3-VL 4B, with 2 of its 36 layers and 2 of 24 of vision.

    text, vision: of the model's config, in the place of the toy model's.
    segments: of the pack; each has an image of `side` x `side` pixels and `objects` boxes.
    """

    segments: int = 7
    side: int = 448
    objects: int = 4
    text: Mapping[str, Any] = field(
        default_factory=lambda: {
            "vocab_size": 152_936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "initializer_range": 0.02,
            "max_position_embeddings": 16_384,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5_000_000.0,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        }
    )
    vision: Mapping[str, Any] = field(
        default_factory=lambda: {
            "depth": 2,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "patch_size": 16,
            "out_hidden_size": 2560,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.02,
        }
    )


FOUR_B = Size()
LARGE = Size(side=896, objects=17)

# The loss of a pack by a model whose weights both ways share.
Loss = Callable[[Recipe, nn.Module, Pack], Tensor]


@dataclass(frozen=True)
class Side:
    model: nn.Module
    loss: Callable[[], Tensor]


@dataclass(frozen=True)
class Step:
    """seconds: of forward and backward. norm: of all gradients."""

    seconds: float
    loss: float
    norm: float


@dataclass(frozen=True)
class Found:
    """Figures of both sides, ours first, for one pack. peaks: bytes, of a step not timed.

    towers: seconds of forward and backward of both towers alone, without the head and the losses.
    """

    tokens: int
    supervised: int
    rounds: list[tuple[Step, Step]]
    towers: list[float]
    peaks: tuple[int, int]


def float32(bench: Bench) -> list[Result]:
    return _results("float32", compared(bench, FOUR_B, torch.float32))


def bfloat16(bench: Bench) -> list[Result]:
    return _results("bfloat16", compared(bench, FOUR_B, torch.bfloat16))


def _results(dtype: str, found: Found) -> list[Result]:
    ours, plain = found.rounds[0]
    mine, theirs = (peak / 2**30 for peak in found.peaks)
    return [
        median_of(
            f"tokens/s of a step over the plain way's, {dtype}",
            [b.seconds / a.seconds for a, b in found.rounds],
            2,
            at_least=True,
            detail=f"{found.tokens / ours.seconds:.0f} and {found.tokens / plain.seconds:.0f} "
            f"tokens/s; {found.tokens:,} tokens, {found.supervised:,} supervised",
        ),
        median_of(
            f"its limit: both towers alone over the plain way's step, {dtype}",
            [b.seconds / towers for (_, b), towers in zip(found.rounds, found.towers, strict=True)],
            2,
            at_least=True,
            detail="a step without head and losses",
        ),
        median_of(
            f"peak memory over the plain way's, beside weights and gradients, {dtype}",
            [mine / theirs],
            0.4,
            at_least=False,
            detail=f"{mine:.2f} and {theirs:.2f} GiB",
        ),
    ]


def memory(bench: Bench) -> list[Result]:
    return [memory_ratio(bench, LARGE, dtype) for dtype in (torch.float32, torch.bfloat16)]


def memory_ratio(bench: Bench, size: Size, dtype: torch.dtype) -> Result:
    folder = bench.folder / f"memory_{dtype}"
    config, samples = _config(folder, size, dtype), _samples(folder, size)
    mine, theirs = (
        _peak_on_fakes(config, samples, loss) / 2**30 for loss in (_our_loss, _plain_loss)
    )
    return median_of(
        f"peak memory over the plain way's, 8k tokens on fake tensors, {_name(dtype)}",
        [mine / theirs],
        0.4,
        at_least=False,
        detail=f"{mine:.2f} and {theirs:.2f} GiB",
    )


def compared(bench: Bench, size: Size, dtype: torch.dtype) -> Found:
    """Raises ContractError as `prepared` does; AssertionError where losses or gradients differ."""
    ours, plain, pack, supervised = _sides(bench.folder / str(dtype), size, dtype)
    peaks = (_peak(ours), _peak(plain))  # the first step of each warms up, too
    print(f"{_name(dtype)}, bytes at the peak: {peaks}", flush=True)
    rounds, towers = [], []
    for _ in range(bench.rounds):
        rounds.append((_timed(ours), _timed(plain)))
        towers.append(_timed(Side(ours.model, lambda: _towers_alone(ours.model, pack))).seconds)
        print(f"{_name(dtype)}, ours and the plain way: {rounds[-1]}", flush=True)
        _require_equal(*rounds[-1], 1e-4 if dtype == torch.float32 else 2e-2)
    return Found(len(pack), supervised, rounds, towers, peaks)


def _require_equal(ours: Step, plain: Step, tolerance: float) -> None:
    assert abs(ours.loss - plain.loss) <= tolerance * plain.loss, f"{ours} and {plain}"
    assert abs(ours.norm - plain.norm) <= tolerance * plain.norm, f"{ours} and {plain}"


def _timed(side: Side) -> Step:
    side.model.zero_grad(set_to_none=False)
    began = time.perf_counter()
    loss = side.loss()
    loss.backward()
    seconds = time.perf_counter() - began
    gradients = [weight.grad for weight in side.model.parameters() if weight.grad is not None]
    return Step(seconds, loss.item(), get_total_norm(gradients).item())


def _peak(side: Side) -> int:
    """Bytes that a forward and backward allocate at most; gradients are there before."""
    for weight in side.model.parameters():
        weight.grad = torch.zeros_like(weight)
    return peak_of(lambda: side.loss().backward())


def peak_of(work: Callable[[], object]) -> int:
    """Bytes that `work` allocates at most, as torch's profiler sees it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    live = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def _sides(folder: Path, size: Size, dtype: torch.dtype) -> tuple[Side, Side, Pack, int]:
    """Ours, the plain one, their pack, and its supervised rows."""
    config = _config(folder, size, dtype)
    model = _model(size)
    peer = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    if dtype == torch.bfloat16:
        use_product(peer, QWEN_VL.patch_embedding)
    recipe = recipe_of(config, prepared(config, model))
    pack = make_pack(recipe.channel_a.segments(_samples(folder, size)))
    _set_up(model, plain=False)
    _set_up(peer, plain=True)
    compute_in(peer, config.model.torch_dtype)
    chosen = recipe.objective.select(pack.supervision, "A")
    return (
        Side(model, lambda: _our_loss(recipe, model, pack)),
        Side(peer, lambda: _plain_loss(recipe, peer, pack)),
        pack,
        chosen.head_rows,
    )


def _set_up(model: Any, *, plain: bool) -> None:
    model.train()
    if plain:
        model.set_attn_implementation("sdpa")


def _peak_on_fakes(config: Config, samples: list[Sample], loss: Loss) -> int:
    """Bytes beside weights and gradients."""
    loaded = step_model(config)
    recipe = recipe_of(config, loaded)
    pack = make_pack(recipe.channel_a.segments(samples))
    assert pack.pixel_values is not None
    costs = Costs()
    with faked(costs, pack.mm_token_types == IMAGE, "cpu") as mode:
        put_on_fakes(loaded.model)
        _set_up(loaded.model, plain=loss is _plain_loss)
        compute_in(loaded.model, config.model.torch_dtype)
        for weight in loaded.model.parameters():
            weight.grad = torch.zeros_like(weight)
        fakes = replace(pack, pixel_values=mode.from_tensor(pack.pixel_values))
        costs.begin()
        loss(recipe, loaded.model, fakes).backward()
    return costs.peak - costs.base


def _our_loss(recipe: Recipe, model: nn.Module, pack: Pack) -> Tensor:
    return recipe.loss(model, pack, "A").total


def _towers_alone(model: nn.Module, pack: Pack) -> Tensor:
    return packed_forward(model, pack, lambda given: given.hidden.float().square().mean())


def _plain_loss(recipe: Recipe, model: nn.Module, pack: Pack) -> Tensor:
    logits: Tensor = model(
        input_ids=pack.input_ids,
        position_ids=pack.position_ids,
        mm_token_type_ids=pack.mm_token_types,
        pixel_values=pack.pixel_values,
        image_grid_thw=pack.image_grid_thw,
        attention_mask=None,
        use_cache=False,
    ).logits
    pipeline = recipe.objective
    selection = pipeline.select(pack.supervision, "A")
    rows = logits.squeeze(0).float()  # accelerate and the Trainers widen them
    stats = plain_stats(rows, selection, pipeline.reader(selection).coord_ids)
    return pipeline(ForwardStats(stats, stats), selection, "A").total


def plain_stats(logits: Tensor, selection: Selection, coord_ids: Tensor) -> LogitStats:
    """The statistics of (L, V) logits, each by its own formula."""
    text, slots = logits[selection.text_rows], logits[selection.slot_rows]
    return LogitStats(
        text_nll=F.cross_entropy(bounded(text), selection.text_targets, reduction="none"),
        text_mass=1.0 - coord_mass(full_logsumexp(text), text[:, coord_ids]),
        slot_lse=full_logsumexp(slots),
        slot_coord_logits=slots[:, coord_ids],
        departure_nll=F.cross_entropy(
            bounded(logits[selection.departure_rows]),
            selection.departure_tokens,
            reduction="none",
        ),
        kept_nll=F.cross_entropy(
            bounded(logits[selection.kept_rows]), selection.kept_tokens, reduction="none"
        ),
    )


def _config(folder: Path, size: Size, dtype: torch.dtype) -> Config:
    """The demo's, with every term, attention `auto`, and a model without weights in `folder`."""
    _model_config(size).save_pretrained(folder)
    processor = toy_processor(make_toy_tokenizer())
    processor.image_processor.patch_size = size.vision["patch_size"]
    processor.image_processor.size = {"shortest_edge": 1, "longest_edge": size.side**2}
    processor.save_pretrained(folder)
    changed = {
        "model": {"model": str(folder), "torch_dtype": _name(dtype)},
        "stage2_ab": {"pipeline": OBJECTIVE},
    }
    return parse_config(merge(load_mapping(CONFIGS / "warmup.yaml"), changed))


def _model(size: Size) -> Qwen3VLForConditionalGeneration:
    """float32; the same random weights each time.

    With others a text token may have nearly all its probability on coordinates: the plain formula
    of `text_gate`, -log(1 - p), then rounds by more than both sides may differ.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: Qwen3VLForConditionalGeneration = Qwen3VLForConditionalGeneration._from_config(
            _model_config(size), attn_implementation=attention_of("auto")
        )
    return made


def _model_config(size: Size) -> Qwen3VLConfig:
    """Tied as the 4B is."""
    whole = toy_config(make_toy_tokenizer(), tie=True).to_dict()
    text, vision = whole.pop("text_config"), whole.pop("vision_config")
    return Qwen3VLConfig(text_config=text | size.text, vision_config=vision | size.vision, **whole)


def _samples(folder: Path, size: Size) -> list[Sample]:
    path = folder / "noise.png"
    noise = np.random.default_rng(0).integers(0, 256, (size.side, size.side, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    chance = torch.Generator().manual_seed(0)
    return [
        Sample(f"noise:{i}", (path,), size.side, size.side, _objects(size.objects, chance))
        for i in range(size.segments)
    ]


def _objects(count: int, chance: torch.Generator) -> tuple[GroundTruthObject, ...]:
    corners = torch.randint(0, COORD_BINS, (count, 2, 2), generator=chance).sort(1).values
    return tuple(
        GroundTruthObject(DESCRIPTIONS[i % len(DESCRIPTIONS)], Shape("bbox_2d", tuple(box)))
        for i, box in enumerate(corners.flatten(1).tolist())
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    parts = {"float32": float32, "bfloat16": bfloat16, "memory": memory}
    run("full_size", __doc__, parts, rounds=3, errors=(ContractError,))
