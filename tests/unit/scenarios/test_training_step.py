"""Scenarios of a whole channel-B step on the toy model (seed 000)."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.models.load import LoadedModel, load_model
from learner.models.packed_forward import PromptEncoder
from learner.objectives.pipeline import Pipeline
from learner.rollout.policy import Asking, OpenBackend, Policy
from learner.stages import targets
from learner.stages.tokens import PLACEHOLDERS
from learner.training.channels import ChannelA, ChannelB, Encoding
from learner.training.recipes import Recipe
from learner.training.step import PlainEngine, StepRunner
from learner.types import RolloutOutput
from shared_contracts.errors import ContractError
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from tests.unit.answers import encode, entry
from tests.unit.small_run import rollout, small_config, written

pytestmark = pytest.mark.usefixtures("one_thread")

N_SAMPLES = 4


class World:
    """A toy model that counts its forwards, and a backend that notes what it was asked."""

    def __init__(self, checkpoint: Path, data: ToyData, out: Path) -> None:
        self.config = small_config(
            checkpoint, data, out, stage2_ab={"schedule": {"b_ratio": 1.0}}, global_max_length=640
        )
        self.loaded: LoadedModel = load_model(self.config)
        self.encode = PromptEncoder(self.loaded.processor, self.config.template.prompt, None)
        self.samples = read_samples(data.train_jsonl, allow_poly=False)[:N_SAMPLES]
        self.asked: list[RolloutInferRequest] = []
        self.forwards: list[int] = []
        self.losses = 0
        self.said = ""
        self.loaded.model.register_forward_pre_hook(
            lambda _, __, kwargs: self.forwards.append(kwargs["input_ids"].numel()),
            with_kwargs=True,
        )

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        self.asked += requests
        texts = [self.said or written(*sample.objects[:1]) for sample in self.samples]
        prompts = [self.encode(sample).ids.tolist() for sample in self.samples]
        return [
            rollout(prompt, encode(self.loaded.tokenizer, text))
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    def push_weights(self, version: int) -> None:
        pass

    def close(self) -> None:
        pass

    def channel_b(self) -> ChannelB:
        matching = self.config.rollout_matching.matching
        return ChannelB(self.encoding, matching, allow_poly=False)

    @property
    def encoding(self) -> Encoding:
        return Encoding(self.loaded.inner, self.encode, self.loaded.tokenizer, "desc_first")

    def step(self) -> dict[str, float]:
        policy = Policy(OpenBackend(self), Asking("Detect.", None, RequestConfig()))
        runner = StepRunner(
            self.config,
            Recipe(
                self.config,
                ChannelA(self.encoding),
                self.channel_b(),
                Pipeline(self.config.pipeline, self.loaded.vocab.ids),
            ),
            policy,
        )

        world = self

        class Counting(PlainEngine):
            def backward(self, loss: torch.Tensor) -> None:
                world.losses += 1
                super().backward(loss)

        _, report = runner.run(self.loaded.model, self.samples, 0, Counting())
        return report.metrics


@pytest.fixture
def world(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> World:
    return World(toy_checkpoint, toy_data, tmp_path)


@pytest.mark.req("RES-08", "CHB-01")
def test_training_uses_one_sequence_and_one_forward_pass(world: World) -> None:
    metrics = world.step()
    packs = metrics["packing/post_rollout_packs"]
    assert len(world.forwards) == world.losses == packs


@pytest.mark.req("RES-08", "CHB-01", "ROLL-02")
def test_packing_enabled_does_not_break_rollout_matching_training(world: World) -> None:
    metrics = world.step()
    assert len(world.asked) == N_SAMPLES, "rollouts are not packed"
    assert len(world.forwards) < N_SAMPLES, "the teacher-forced forward is"
    assert max(world.forwards) <= world.config.global_max_length
    grads = [p.grad for p in world.loaded.model.parameters() if p.grad is not None]
    assert grads
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert metrics["packing/post_rollout_segments"] == N_SAMPLES


@pytest.mark.req("PARSE-02", "CHB-01")
@pytest.mark.parametrize("placeholder", PLACEHOLDERS)
def test_answers_that_hold_the_token_of_an_image_are_trained_on(
    world: World, placeholder: str
) -> None:
    world.said = "{" + entry(1, f"a {placeholder}") + "}"
    assert len(encode(world.loaded.tokenizer, placeholder)) == 1
    metrics = world.step()
    assert metrics["packing/post_rollout_segments"] == N_SAMPLES
    assert metrics["rollout/parse_truncated_rate"] == 1


@pytest.mark.req("ROLL-02")
def test_packing_is_never_applied_during_rollout_generation(world: World) -> None:
    world.step()
    assert [request.uuid for request in world.asked] == [s.sample_id for s in world.samples]
    assert [len(request.images) for request in world.asked] == [1] * N_SAMPLES


@pytest.mark.req("APPEND-03")
def test_supervision_indices_are_validated_against_assistant_span(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_target = targets.build_target

    def misaligned(*args: object, **kwargs: object) -> object:
        target = build_target(*args, **kwargs)  # type: ignore[arg-type]
        group = target.coord_groups[0]
        positions = (len(target.token_ids), *group.positions[1:])
        target.coord_groups[0] = group._replace(positions=positions)
        return target

    monkeypatch.setattr(targets, "build_target", misaligned)
    with pytest.raises(ContractError) as error:
        world.step()
    assert error.value.where == world.samples[0].sample_id
    assert "assistant" in error.value.found
    assert not world.forwards
