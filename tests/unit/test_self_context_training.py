"""Self-context: what the model is called with, what is recorded, and what adapters learn by it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import Qwen3VLForConditionalGeneration

from learner.config import merge, parse_config
from learner.config.schema import SoftContextGradMode
from learner.data.toy import ToyData
from learner.models.load import load_model
from learner.models.packs import IMAGE
from learner.models.self_context import SelfContext
from learner.types import Sample
from tests.unit.loaded_models import loaded_from
from tests.unit.small_run import metric_lines, run_quietly, small_mapping
from tests.unit.toy_learner import (
    COORDINATES,
    ToyLearner,
    forwards_of,
    sharpened,
    stated_arguments,
    with_awake_adapters,
)

HELPERS = {"labels", "loss_scale", "compute_loss_func", "text_position_ids", "channel"}
LORA = {
    "train_type": "lora",
    "lora_rank": 2,
    "lora_alpha": 4,
    "train_coordinate_rows": False,
}
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
def test_a_run_calls_the_model_as_often_as_it_says_and_with_its_own_arguments(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    several = {
        "training": {"max_steps": 2},
        "global_max_length": 200,
        "stage2_ab": {"schedule": {"b_ratio": 0.5}, "n_softctx_iter": 3},
        "rollout_matching": {"rollout_backend": "hf", "max_new_tokens": 6},
        "tuner": DORA,
    }
    small = small_mapping(toy_checkpoint, toy_data, tmp_path / "run")
    del small["rollout_matching"]["vllm"]
    with training_calls() as calls:
        folder = run_quietly(parse_config(merge(small, several)))
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
    "tuner",
    [LORA, DORA, OF_EMBEDDINGS],
    ids=["lora", "dora", "lora of embeddings"],
)
def test_adapters_learn_through_what_is_fed_back(
    toy_checkpoint: Path,
    toy_data: ToyData,
    tmp_path: Path,
    samples: list[Sample],
    tuner: dict[str, Any],
) -> None:
    config = parse_config(
        merge(small_mapping(toy_checkpoint, toy_data, tmp_path), {"tuner": tuner})
    )
    loaded = with_awake_adapters(sharpened(load_model(config), 8))
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
