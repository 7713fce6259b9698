"""Channel A's self-context: its gradients, and what adapters learn by it.

The gradients are held against finite differences, in float64, of a loop of forwards that is written
out here once more: its context is the mean embedding, plus or instead of it what the definition of
a mode freezes at the point where the gradient is taken.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from learner.config.schema import CoordContextMode, SoftContextGradMode
from learner.models.load import LoadedModel, load_model
from learner.models.packs import IMAGE, Pack
from learner.models.self_context import SelfContext
from learner.models.toy import build_toy_model, toy_config
from learner.objectives.bbox_geo import BboxGeoConfig
from learner.objectives.logit_stats import ForwardStats
from learner.types import Sample
from tests.unit.loaded_models import loaded_from
from tests.unit.packed_logits import as_given
from tests.unit.small_run import ConfigOf, metric_lines, run_quietly
from tests.unit.toy_learner import (
    BOXES,
    COORDINATES,
    Gradients,
    ToyLearner,
    bins,
    forwards_of,
    sharpened,
    stated_arguments,
    text,
    with_awake_adapters,
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
    """Computes in float64 where the model asks for float32."""

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
    """Models with random float64 weights in training mode. Key: whether the head is tied."""
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


HELPERS = {"labels", "loss_scale", "compute_loss_func", "text_position_ids", "channel"}
LORA = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4, "train_coordinate_rows": False}
DORA = {**LORA, "use_dora": True}
OF_EMBEDDINGS = {**LORA, "target_modules": ["embed_tokens", "v_proj"]}


@contextmanager
def training_calls() -> Iterator[list[dict[str, Any]]]:
    """Arguments of every call of a Qwen3-VL in training, whatever is wrapped around it."""
    calls: list[dict[str, Any]] = []

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any], _: Any) -> None:
        if isinstance(module, Qwen3VLForConditionalGeneration) and module.training:
            assert args == ()
            calls.append(kwargs)

    hook = register_module_forward_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


@pytest.mark.req("CHA-01", "CHA-02", "CHB-01", "PACK-04", "RES-08", "RUN-02")
@pytest.mark.scenario("Multimodal forward does not fail under iterative inputs_embeds")
def test_a_run_calls_the_model_as_often_as_it_says_with_its_arguments(config_of: ConfigOf) -> None:
    config = config_of(
        training={"max_steps": 2},
        global_max_length=200,
        stage2_ab={"schedule": {"b_ratio": 0.5}, "n_softctx_iter": 3},
        rollout_matching={"rollout_backend": "hf", "max_new_tokens": 6},
        tuner=DORA,
    )
    with training_calls() as calls:
        folder = run_quietly(config)
    a, b = metric_lines(folder, "loss")
    assert [a["step/channel_b"], b["step/channel_b"]] == [0, 1]
    assert a["grad_norm"] > 0

    by_ids = [call["input_ids"] is not None for call in calls]
    packs_of_a, packs_of_b = (int(step["packing/post_rollout_packs"]) for step in (a, b))
    assert packs_of_a > 1
    assert by_ids == [True, False, False] * packs_of_a + [True] * packs_of_b
    for call in calls:
        assert call.keys() <= stated_arguments()
        assert not call.keys() & (HELPERS | {"past_key_values", "logits_to_keep"})
        assert (call["input_ids"] is None) != (call["inputs_embeds"] is None)
        assert call["use_cache"] is False
        assert call["attention_mask"] is None
        assert call["pixel_values"] is not None
        assert call["position_ids"].shape[:2] == (4, 1)
    for first in range(0, 3 * packs_of_a, 3):
        for later in (first + 1, first + 2):
            assert calls[later].keys() == calls[first].keys()
            for name, value in calls[first].items():
                if isinstance(value, torch.Tensor) and name != "input_ids":
                    assert torch.equal(calls[later][name], value), name


@pytest.mark.req("CHA-01", "CHA-02")
@pytest.mark.parametrize(
    "tuner", [LORA, DORA, OF_EMBEDDINGS], ids=["lora", "dora", "lora of embeddings"]
)
def test_adapters_learn_through_what_is_fed_back(
    config_of: ConfigOf, samples: list[Sample], tuner: dict[str, Any]
) -> None:
    loaded = with_awake_adapters(sharpened(load_model(config_of(tuner=tuner)), 8))
    unrolled = ToyLearner(loaded, SelfContext(2, "st", "unroll"), COORDINATES)
    detached = ToyLearner(loaded, SelfContext(2, "st", "em_detach"), COORDINATES)
    pack = unrolled.pack(samples[1:2])
    with forwards_of(loaded.model) as seen:
        before = unrolled.loss(pack)
    embedding = loaded.inner.get_input_embeddings()
    placeholders = pack.mm_token_types[0] == IMAGE
    others = ~placeholders
    others[pack.supervision.coord_positions] = False
    read = seen[1].arguments["inputs_embeds"][0]
    assert torch.equal(read[others], embedding(pack.input_ids)[0, others])
    lone = embedding(pack.input_ids[0, placeholders][0])
    assert torch.equal(read[placeholders], lone.expand(int(placeholders.sum()), -1))

    gradients, last_alone = unrolled.gradients(before), detached.gradients(detached.loss(pack))
    weights = dict(loaded.model.named_parameters())
    for name, gradient in gradients.items():
        assert "lora_" in name
        assert (gradient - last_alone[name]).abs().max() > 1e-3 * gradient.abs().max() > 0, name
        weights[name].data -= 1e-3 * gradient
    assert unrolled.loss(pack).total < before.total


@pytest.mark.req("CHA-01")
@pytest.mark.parametrize(
    ("grad_mode", "recorded"),
    [("unroll", [True, True, True, True]), ("em_detach", [True, False, False, True])],
)
def test_detached_iterations_between_the_first_and_the_last_record_no_graph(
    toy_checkpoint: Path,
    samples: list[Sample],
    grad_mode: SoftContextGradMode,
    recorded: list[bool],
) -> None:
    learner = ToyLearner(loaded_from(toy_checkpoint), SelfContext(4, "soft", grad_mode))
    with forwards_of(learner.model) as seen:
        learner.loss(learner.pack(samples[2:3]))
    assert [forward.recorded for forward in seen] == recorded
