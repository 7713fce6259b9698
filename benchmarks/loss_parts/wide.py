"""A vocabulary of 152,704 (Qwen's and the coordinates), 4,096 tokens, 400 coordinate slots.

The model has the widths of the smallest Qwen3-VL (2B) and 2 of its 28 layers, without images:
the objectives cost the same under any number of layers, so their share is an upper bound.
The row: 100 boxes in 3,600 tokens of answer after 496 of prompt, channel A. The peer is the
same objective with every row that a term needs taken from the logits, as written, over a
quarter of the row: the whole does not fit into 24 GiB with it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from benchmarks.loss_parts.measuring import (
    OBJECTIVE,
    Bench,
    Cost,
    forward_and_backward,
    ours,
    plain,
)
from benchmarks.results import Result, median_of
from learner.models.toy import make_toy_tokenizer, toy_config
from learner.objectives.logit_stats import Supervision
from learner.objectives.pipeline import Pipeline
from learner.stages.coords import COORD_BINS
from learner.types import Role

VOCABULARY = 152_704
FIRST_COORD = 151_669
PROMPT, OBJECTS = 496, 100
DESCRIPTION = 4
OBJECT = [Role.APPENDED_STRUCTURE] * 28 + [Role.APPENDED_DESC] * DESCRIPTION + [Role.COORD] * 4


@dataclass(frozen=True)
class _Round:
    """model_s: seconds of forward and backward. quarter, plain: over a quarter of the row."""

    model_s: float
    whole: Cost
    quarter: Cost
    plain: Cost


def measure(bench: Bench) -> list[Result]:
    pipeline = Pipeline(OBJECTIVE, list(range(FIRST_COORD, FIRST_COORD + COORD_BINS)))
    row, quarter = _row(PROMPT, OBJECTS), _row(PROMPT // 4, OBJECTS // 4)
    rounds = list(_rounds(bench.rounds, pipeline, row, quarter))
    supervised, copy = _supervised(pipeline, row)
    _, part = _supervised(pipeline, quarter)
    first = rounds[0]
    return [
        median_of(
            "objectives over the model's forward and backward, vocabulary 152,704",
            [r.whole.seconds / r.model_s for r in rounds],
            0.05,
            at_least=False,
            detail=f"{first.whole.seconds:.1f} and {first.model_s:.0f} s; "
            f"{supervised:,} supervised of {len(row.roles):,} rows",
        ),
        median_of(
            "their memory over one float32 copy of the supervised rows",
            [r.whole.peak / copy for r in rounds],
            1.5,
            at_least=False,
            detail=f"{first.whole.peak / 2**30:.2f} GiB, the gradient of the logits in it",
        ),
        median_of(
            "memory of the peer over ours, a quarter of the row",
            [r.plain.peak / r.quarter.peak for r in rounds],
            1,
            at_least=True,
            detail=f"{first.plain.peak / part:.1f} and {first.quarter.peak / part:.2f} copies",
        ),
        median_of(
            "time of the peer over ours, a quarter of the row",
            [r.plain.seconds / r.quarter.seconds for r in rounds],
            1,
            at_least=True,
            detail=f"{first.plain.seconds:.1f} and {first.quarter.seconds:.1f} s",
        ),
    ]


def _supervised(pipeline: Pipeline, row: Supervision) -> tuple[int, int]:
    """Supervised rows, and the bytes of one float32 copy of their logits."""
    selection = pipeline.select(row, "A")
    count = len(selection.text_rows) + len(selection.slot_rows)
    return count, 4 * count * VOCABULARY


def _rounds(
    count: int, pipeline: Pipeline, row: Supervision, quarter: Supervision
) -> Iterator[_Round]:
    model = _model()
    for _ in range(count):
        mine, theirs = _both(pipeline, _logits(model, quarter), quarter)
        whole = ours(pipeline, _logits(model, row), row, "A")
        model.zero_grad()
        forward = partial(_forward, model, row.input_ids[None])
        seconds = forward_and_backward(forward, whole.gradient)
        whole.free()
        yield _Round(seconds, whole, mine, theirs)


def _both(pipeline: Pipeline, logits: Tensor, row: Supervision) -> tuple[Cost, Cost]:
    mine, theirs = ours(pipeline, logits, row, "A"), plain(pipeline, logits, row, "A")
    _require_equal(mine, theirs)
    for cost in (mine, theirs):
        cost.free()
    return mine, theirs


def _require_equal(mine: Cost, theirs: Cost) -> None:
    assert abs(mine.total - theirs.total) <= 1e-4 * abs(theirs.total)
    off = (mine.gradient - theirs.gradient).abs().max()
    assert off <= 1e-4 * theirs.gradient.abs().max(), f"gradients differ by {off:.2g}"


@torch.no_grad()
def _logits(model: nn.Module, row: Supervision) -> Tensor:
    return _forward(model, row.input_ids[None])


def _forward(model: nn.Module, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, attention_mask=None, use_cache=False).logits
    return logits.squeeze(0)


def _row(prompt: int, objects: int) -> Supervision:
    roles = [Role.PROMPT] * prompt + OBJECT * objects
    roles[-2:] = [Role.CLOSURE] * 2
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(0, FIRST_COORD, (len(roles),), generator=chance)
    slots = torch.tensor([i for i, role in enumerate(roles) if role == Role.COORD])
    bins = torch.randint(0, COORD_BINS, (len(slots),), generator=chance)
    ids[slots] = FIRST_COORD + bins
    boxes = len(slots) // 4
    return Supervision(
        input_ids=ids,
        roles=torch.tensor([int(role) for role in roles], dtype=torch.int8),
        has_dropped=torch.zeros(len(roles), dtype=torch.bool),
        coord_positions=slots,
        coord_bins=bins.float(),
        boxes=torch.arange(4 * boxes).view(boxes, 4),
    )


def _model() -> nn.Module:
    """float32, random weights, tied as the 2B is."""
    whole = toy_config(make_toy_tokenizer(), tie=True).to_dict()
    text, vision = whole.pop("text_config"), whole.pop("vision_config")
    text |= {
        "vocab_size": VOCABULARY,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "initializer_range": 0.02,
        "max_position_embeddings": 8192,
    }
    text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [24, 20, 20]}
    vision["out_hidden_size"] = 2048
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **whole)
    return Qwen3VLForConditionalGeneration(config)
