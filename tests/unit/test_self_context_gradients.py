"""Gradients of channel A's self-context, held against finite differences.

What they are the gradients of is written out here once more: a loop of forwards whose
context is the mean embedding, plus or instead of it what the definition of a mode freezes at
the point where the gradient is taken. Finite differences of that, in float64, must agree.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoProcessor

from learner.config.schema import CoordContextMode, SoftContextGradMode
from learner.models.load import LoadedModel
from learner.models.packs import Pack
from learner.models.self_context import SelfContext
from learner.models.toy import build_toy_model, toy_config
from learner.objectives.bbox_geo import BboxGeoConfig
from learner.objectives.logit_stats import ForwardStats
from learner.types import Sample
from tests.unit.packed_logits import as_given
from tests.unit.toy_learner import (
    BOXES,
    Gradients,
    ToyLearner,
    bins,
    sharpened,
    text,
)

STEP = 1e-4
GROUPS = {
    "vision": ("visual.blocks.", "visual.patch_embed."),
    "aligner": ("visual.merger.", "visual.deepstack_merger_list."),
    "attention": ("self_attn.",),
    "embedding": ("embed_tokens.",),
    "head": ("lm_head.",),
}


# CIoU holds a factor of its own constant, which a finite difference does not.
SMOOTH_BOXES = BOXES.model_copy(
    update={"config": BboxGeoConfig(smoothl1_weight=2.0, ciou_weight=0)}
)
SMOOTH = (text(self_context=0.3), SMOOTH_BOXES, bins(text_gate=0.5))


class Wide(TorchFunctionMode):
    """What the model computes in float32 whatever its weights are, in float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        named = {
            name: torch.float64 if value is torch.float32 else value
            for name, value in (kwargs or {}).items()
        }
        return func(*args, **named)


@pytest.fixture
def wide() -> Iterator[None]:
    with Wide():
        yield


@pytest.fixture(scope="module")
def models(toy_checkpoint: Path) -> dict[bool, LoadedModel]:
    """Of random weights in float64, in training; by whether the head is tied."""
    processor = AutoProcessor.from_pretrained(toy_checkpoint)

    def made(tie: bool) -> LoadedModel:
        model = build_toy_model(toy_config(processor.tokenizer, tie), seed=0).double().train()
        return sharpened(LoadedModel(model, processor), 8)

    return {tie: made(tie) for tie in (False, True)}


class WrittenOut:
    """The loss of a pack with several forwards, as a smooth function of the weights.

    The first call fixes what the mode freezes: the likeliest bins, how far their embeddings
    are from the mean (`st`), or, detached, the context itself.
    """

    def __init__(self, learner: ToyLearner, pack: Pack, context: SelfContext) -> None:
        self._learner = learner
        self._pack = pack
        self._context = context
        self._frozen: list[Tensor] = []

    def __call__(self) -> Tensor:
        """The loss, a scalar."""
        learner, pack = self._learner, self._pack
        selection = learner.pipeline.select(pack.supervision, "A")
        reader = learner.pipeline.reader(selection)
        slots = pack.supervision.coord_positions
        embedding = learner.encoding.inner.get_input_embeddings()
        logits = first = self._forward(input_ids=pack.input_ids)
        for iteration in range(1, self._context.iterations):
            probs = logits[slots - 1][:, learner.coord_ids].softmax(-1)
            context = self._fed_back(iteration, probs, embedding(learner.coord_ids))
            embeddings = embedding(pack.input_ids).clone()
            embeddings[0, slots] = context
            logits = self._forward(inputs_embeds=embeddings)
        final = (
            reader.anchor(as_given(first)) if logits is first else reader.final(as_given(logits))
        )
        anchor = final if logits is first else reader.anchor(as_given(first))
        return learner.pipeline(ForwardStats(anchor, final), selection, "A").total

    def _forward(self, **tokens: Tensor) -> Tensor:
        pack = self._pack
        logits: Tensor = self._learner.model(
            **tokens,
            position_ids=pack.position_ids,
            pixel_values=pack.pixel_values,
            image_grid_thw=pack.image_grid_thw,
            use_cache=False,
        ).logits[0]
        return logits

    def _fed_back(self, iteration: int, probs: Tensor, table: Tensor) -> Tensor:
        mean, likeliest = probs @ table, probs.argmax(-1)
        mode, detached = self._context.embed_mode, self._context.grad_mode == "em_detach"
        read = mean if mode == "soft" else table[likeliest]
        if len(self._frozen) < iteration:
            frozen = read if detached else likeliest if mode == "hard" else read - mean
            self._frozen.append(frozen.detach())
        frozen = self._frozen[iteration - 1]
        if detached:
            return frozen
        return table[frozen] if mode == "hard" else mean + frozen


def slope(function: Callable[[], Tensor], weights: dict[str, Tensor], along: Gradients) -> float:
    """Central difference of a function along a direction of unit length."""
    values = []
    with torch.no_grad():
        for sign in (1, -1):
            for name, direction in along.items():
                weights[name].add_(direction, alpha=sign * STEP)
            values.append(function().item())
            for name, direction in along.items():
                weights[name].sub_(direction, alpha=sign * STEP)
    return (values[0] - values[1]) / (2 * STEP)


def direction(weights: dict[str, Tensor], parts: tuple[str, ...], seed: int) -> Gradients:
    """Random, of unit length, over the weights whose name has one of these parts."""
    generator = torch.Generator().manual_seed(seed)
    chosen = {
        name: torch.randn(w.shape, generator=generator, dtype=torch.float64)
        for name, w in weights.items()
        if any(part in name for part in parts)
    }
    length = torch.stack([d.square().sum() for d in chosen.values()]).sum().sqrt()
    return {name: d / length for name, d in chosen.items()}


def weights_of(learner: ToyLearner) -> dict[str, Tensor]:
    return dict(learner.model.named_parameters())


def along(gradients: Gradients, there: Gradients) -> float:
    return sum(float((gradients[name] * d).sum()) for name, d in there.items())


Case = tuple[int, CoordContextMode, SoftContextGradMode, bool]
# The last of each: whether the head is tied.
CASES: list[Case] = [
    (2, "soft", "unroll", True),
    (3, "soft", "unroll", False),
    (2, "st", "unroll", False),
    (2, "hard", "unroll", False),
    (3, "st", "em_detach", False),
]


@pytest.mark.req("CHA-01")
@pytest.mark.scenario("Unroll mode does not detach expected coord embeddings")
@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_gradients_through_the_iterations_are_finite_differences(
    models: dict[bool, LoadedModel], samples: list[Sample], case: Case
) -> None:
    sample = replace(samples[1], images=samples[1].images[1:])  # one object on a small image
    iterations, mode, grad_mode, tied = case
    context = SelfContext(iterations, mode, grad_mode)
    learner = ToyLearner(models[tied], context, SMOOTH)
    pack = learner.pack([sample])
    written = WrittenOut(learner, pack, context)
    loss = learner.loss(pack)
    assert written().item() == pytest.approx(loss.total.item(), rel=1e-12)
    gradients, weights = learner.gradients(loss), weights_of(learner)
    for seed, (group, parts) in enumerate(GROUPS.items()):
        if tied and group == "head":
            continue
        there = direction(weights, parts, seed)
        wanted = slope(written, weights, there)
        assert abs(wanted) > 1e-3, group
        assert along(gradients, there) == pytest.approx(wanted, rel=1e-5, abs=5e-7), group
