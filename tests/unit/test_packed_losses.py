"""A segment of a pack has the loss, gradients and logits that it has alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import set_seed

from learner.data.toy import ToyData
from learner.models.attention import attention_of
from learner.models.load import LoadedModel
from learner.models.packed_forward import check_packing
from learner.models.packs import Segment, make_pack, make_segment
from learner.models.self_context import SelfContext
from learner.runs.metrics import rollout_payload
from learner.types import Channel, Sample
from shared_contracts.errors import ContractError
from tests.unit.answers import entry
from tests.unit.loaded_models import load_small, loaded_from
from tests.unit.mixed_samples import box
from tests.unit.small_run import written
from tests.unit.toy_learner import ToyLearner, sharpened

LORA = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4}
# What is changed in the config, and how much larger the coordinate logits are made: up to
# distributions where they have nearly all of the mass at text.
SETUPS: dict[str, tuple[dict[str, Any], float]] = {
    "auto": ({}, 4),
    "sdpa": ({"model": {"attn_implementation": "sdpa"}}, 4),
    "eager": ({"model": {"attn_implementation": "eager"}}, 8),
    "checkpointing": ({"model": {"gradient_checkpointing": True}}, 4),
    "lora": ({"tuner": LORA, "model": {"gradient_checkpointing": True}}, 8),
}


@pytest.fixture(scope="module", params=list(SETUPS.values()), ids=list(SETUPS))
def loaded(
    request: pytest.FixtureRequest,
    toy_checkpoint: Path,
    toy_data: ToyData,
    tmp_path_factory: pytest.TempPathFactory,
) -> LoadedModel:
    changed, factor = request.param
    set_seed(0)  # how far roundoff is amplified depends on the adapters
    out = tmp_path_factory.mktemp("out")
    return sharpened(load_small(toy_checkpoint, toy_data, out, **changed), factor)


def answered(learner: ToyLearner, samples: list[Sample]) -> list[Segment]:
    """Channel B: a right object and a ghost, one with a corner missing, garbage, a ghost."""
    ghost = box("ghost", 900, 900, 999, 999)
    texts = [
        written(samples[0].objects[0], ghost),
        f"{{{entry(1, 'kite', (0, 31, 62))}}}",
        "garbage",
        written(ghost),
    ]
    answers = [learner.answer(*pair) for pair in zip(samples, texts, strict=True)]
    segments, assessed = learner.channel_b.segments(samples, answers)
    counts = rollout_payload(assessed).metrics()
    keys = ("matched", "false_positives", "invalid_rollout", "N_drop_invalid")
    assert [counts[f"stage2_ab/channel_b/{key}"] for key in keys] == [1, 2, 1, 1]
    return segments


CASES: dict[str, tuple[Channel, SelfContext]] = {
    "A, one forward": ("A", SelfContext()),
    "A, two forwards": ("A", SelfContext(2, "st", "unroll")),
    "B": ("B", SelfContext()),
}


@pytest.mark.req("PACK-04", "LOSS-05", "CHA-01", "CHB-01")
@pytest.mark.parametrize(("channel", "context"), CASES.values(), ids=CASES.keys())
def test_segments_add_up_to_their_pack(
    loaded: LoadedModel, samples: list[Sample], channel: Channel, context: SelfContext
) -> None:
    learner = ToyLearner(loaded, context)
    of_a = learner.channel_a.segments
    segments = of_a(samples) if channel == "A" else answered(learner, samples)
    pack = make_pack(segments)
    whole = learner.loss(pack, channel)
    totals = learner.pipeline.select(pack.supervision, channel).totals
    parts = [learner.loss(make_pack([segment]), channel, totals) for segment in segments]

    assert sum(part.total.item() for part in parts) == pytest.approx(whole.total.item(), rel=1e-5)
    assert all(value > 0 for value in whole.atoms.values())
    for name, value in whole.atoms.items():
        # 1e-6 nats: a gate is the difference of two float32 logsumexps.
        expected = pytest.approx(value, rel=1e-4, abs=1e-6)
        assert sum(part.atoms.get(name, 0.0) for part in parts) == expected, name

    together, apart = learner.gradients(whole), learner.gradients(*parts)
    largest = max(float(g.abs().max()) for g in together.values())
    for name, gradient in together.items():
        own, difference = gradient.abs().max(), (gradient - apart[name]).abs().max()
        assert own > 0, name
        assert difference < 1e-5 * largest, name
        assert difference < 1e-4 * own, name


class Spoilt(nn.Module):
    """A model with a fault.

    leaks, bounds: it loses the text row of the position ids, or the bounds of the segments.
    nan: its logits are no numbers.
    """

    def __init__(self, inner: nn.Module, fault: str) -> None:
        super().__init__()
        self.inner = inner
        self.fault = fault

    def forward(self, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        if self.fault == "bounds":
            kwargs = {k: v for k, v in kwargs.items() if not k.startswith(("cu_seq", "max_len"))}
        leaks = self.fault == "leaks"
        output = self.inner(position_ids=position_ids[1:] if leaks else position_ids, **kwargs)
        if self.fault == "nan":
            output.logits.fill_(torch.nan)
        return output


@pytest.mark.req("PACK-04")
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        *((fault, r"training\.packing") for fault in ("leaks", "bounds")),
        ("nan", r"model\.model: the model's logits are NaN"),
    ],
)
def test_the_check_refuses_a_model_that_leaks(toy_checkpoint: Path, fault: str, found: str) -> None:
    model: Any = loaded_from(toy_checkpoint).model
    model.set_attn_implementation(attention_of("auto" if fault == "bounds" else "sdpa"))
    check_packing(model)
    with pytest.raises(ContractError, match=found):
        check_packing(Spoilt(model, fault))


@pytest.mark.req("APPEND-03")
@pytest.mark.scenario("Supervision indices are validated against assistant span")
def test_index_outside_the_answer_is_refused(toy_checkpoint: Path, samples: list[Sample]) -> None:
    loaded = loaded_from(toy_checkpoint)
    good, *_ = ToyLearner(loaded).channel_a.segments(samples)
    group = good.target.coord_groups[0]
    outside = group._replace(positions=(*group.positions[:3], len(good.target.token_ids)))
    broken = replace(good.target, coord_groups=[outside])
    with pytest.raises(ContractError, match=r"s0.*supervised index"):
        make_segment(loaded.inner, "s0", good.prompt, broken, has_dropped=False)
