"""A vocabulary of 152,704 (Qwen's and the coordinates), 4,096 tokens, 400 coordinate slots.

The model has the widths of the smallest Qwen3-VL (2B) and 2 of its 28 layers, without images:
the objectives cost the same under any number of layers, so their share is an upper bound.
The row: 100 boxes in 3,600 tokens of answer after 496 of prompt, channel A. The peer is the
same objective with every row that a term needs taken from the logits, as written.
"""

from collections.abc import Iterator
from dataclasses import dataclass

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
from learner.coords import COORD_BINS
from learner.losses.pipeline import Pipeline
from learner.losses.supervision import Supervision
from learner.model.toy import toy_config
from learner.model.toy_tokenizer import make_toy_tokenizer
from learner.types import Role

VOCABULARY = 152_704
FIRST_COORD = 151_669
PROMPT, OBJECTS = 496, 100
DESCRIPTION = 4
OBJECT = [Role.APPENDED_STRUCTURE] * 28 + [Role.APPENDED_DESC] * DESCRIPTION + [Role.COORD] * 4


@dataclass(frozen=True)
class _Round:
    model_s: float
    ours: Cost
    plain: Cost


def measure(bench: Bench) -> list[Result]:
    pipeline = Pipeline(OBJECTIVE, list(range(FIRST_COORD, FIRST_COORD + COORD_BINS)))
    row = _row()
    selection = pipeline.select(row, "A")
    supervised = len(selection.text_rows) + len(selection.slot_rows)
    one_copy = 4 * supervised * VOCABULARY
    rounds = list(_rounds(bench.rounds, pipeline, row))
    sizes = f"{supervised:,} supervised of {len(row.roles):,} rows"
    return [
        median_of(
            "objectives over the model's forward and backward, vocabulary 152,704",
            [r.ours.seconds / r.model_s for r in rounds],
            0.05,
            at_least=False,
            detail=f"{rounds[0].ours.seconds:.1f} s and {rounds[0].model_s:.0f} s; {sizes}",
        ),
        median_of(
            "their memory over one float32 copy of the supervised rows",
            [r.ours.peak / one_copy for r in rounds],
            1.5,
            at_least=False,
            detail=f"{rounds[0].ours.peak / 2**30:.2f} GiB, the gradient of the logits in it; "
            f"peer {rounds[0].plain.peak / one_copy:.2f}",
        ),
        median_of(
            "time of the peer over ours",
            [r.plain.seconds / r.ours.seconds for r in rounds],
            1,
            at_least=True,
            detail=f"{rounds[0].plain.seconds:.1f} and {rounds[0].ours.seconds:.1f} s",
        ),
    ]


def _rounds(count: int, pipeline: Pipeline, row: Supervision) -> Iterator[_Round]:
    model = _model()
    ids = row.input_ids[None]
    for _ in range(count):
        with torch.no_grad():
            logits = _logits(model, ids)
        theirs = plain(pipeline, logits, row, "A")
        mine = ours(pipeline, logits, row, "A")
        _require_equal(mine, theirs)
        theirs.gradient.resize_(0)
        del logits
        model.zero_grad()
        seconds = forward_and_backward(lambda: _logits(model, ids), mine.gradient)
        yield _Round(seconds, mine, theirs)
        mine.gradient.resize_(0)


def _require_equal(mine: Cost, theirs: Cost) -> None:
    assert abs(mine.total - theirs.total) <= 1e-4 * abs(theirs.total)
    off = (mine.gradient - theirs.gradient).abs().max()
    assert off <= 1e-4 * theirs.gradient.abs().max(), f"gradients differ by {off:.2g}"


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, attention_mask=None, use_cache=False).logits[0]
    return logits


def _row() -> Supervision:
    roles = [Role.PROMPT] * PROMPT + OBJECT * OBJECTS
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
