"""One optimizer step on the toy model, with answers from a scripted backend."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.models.load import LoadedModel, load_model
from learner.models.packs import Segment, make_pack
from learner.models.prompts import PromptEncoder
from learner.objectives.logit_stats import ForwardStats
from learner.objectives.pipeline import Pipeline
from learner.rollout.backend import RolloutBackend
from learner.rollout.policy import Policy, RequestSettings
from learner.runs.metrics import StepReport
from learner.stages.packing import plan_packs
from learner.training.channels import ChannelA, ChannelB, Encoding, Recipe
from learner.training.step import StepRunner
from learner.types import RolloutOutput, Sample
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from tests.unit.answers import encode
from tests.unit.packed_logits import as_given, packed_logits
from tests.unit.plain_accelerator import PlainAccelerator
from tests.unit.small_run import rollout, small_config, written

Gradients = dict[str, Tensor]
# Its logger warns of poorly filled packs.


class Scripted(RolloutBackend):
    """Answers each sample with its first object, and the second of every pair with garbage.

    done: pushes, rollouts and the close, in order. requests, seeds: of all rollouts.
    meanwhile: called before each answer with the number of calls so far.
    """

    def __init__(self, samples: Sequence[Sample], parts: "Parts") -> None:
        super().__init__()
        self._samples = {sample.sample_id: sample for sample in samples}
        self._parts = parts
        self.done: list[str] = []
        self.requests: list[RolloutInferRequest] = []
        self.seeds: list[int | None] = []
        self.meanwhile: Callable[[int], object] = lambda calls: None

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        self.done.append(f"{len(requests)} rollouts")
        self.requests += requests
        self.seeds.append(request_config.seed)
        self.meanwhile(len(self.seeds))
        return [self._answer(i, str(request.uuid)) for i, request in enumerate(requests)]

    def push_weights(self, version: int) -> None:
        self.done.append(f"push {version}")

    def close(self) -> None:
        self.done.append("close")

    def _answer(self, index: int, sample_id: str) -> RolloutOutput:
        sample = self._samples[sample_id]
        text = "garbage" if index % 2 else written(*sample.objects[:1])
        prompt = self._parts.encode(sample).ids.tolist()
        return rollout(prompt, encode(self._parts.loaded.tokenizer, text))


def policy_over(backend: Scripted) -> Policy:
    return Policy(backend, RequestSettings("Detect.", None, RequestConfig()))


class Parts:
    """A loaded toy model and what a runner is made of."""

    def __init__(self, config: Config) -> None:
        self.loaded: LoadedModel = load_model(config)
        self.loaded.model.train()
        self.encode = PromptEncoder(self.loaded.processor, config.template.prompt, None)
        self.pipeline = Pipeline(config.pipeline, self.loaded.vocab.ids)
        tokenizer, inner = self.loaded.tokenizer, self.loaded.inner
        self.encoding = Encoding(inner, self.encode, tokenizer, "desc_first")
        self.channel_a = ChannelA(self.encoding)
        self.channel_b = ChannelB(self.encoding, config)

    def recipe(self, config: Config) -> Recipe:
        return Recipe(config, self.channel_a, self.channel_b, self.pipeline)

    def runner(self, config: Config, policy: Policy | None = None) -> StepRunner:
        return StepRunner(config, self.recipe(config), policy)

    def step(
        self, runner: StepRunner, samples: Sequence[Sample], step: int = 0
    ) -> tuple[float, StepReport, Gradients]:
        """Loss, report and gradients of one step."""
        self.loaded.model.zero_grad()
        loss, report = runner.run(self.loaded.model, samples, step, PlainAccelerator())
        return loss.item(), report, self.gradients()

    def gradients(self) -> Gradients:
        named = self.loaded.model.named_parameters()
        return {name: p.grad.clone() for name, p in named if p.grad is not None}

    def reference(self, segments: Sequence[Segment], plan: list[list[int]]) -> Gradients:
        """Gradients of the sum of each pack's loss times its share of the samples (LOSS-05)."""
        self.loaded.model.zero_grad()
        total = torch.zeros(())
        for indices in plan:
            pack = make_pack([segments[i] for i in indices])
            selection = self.pipeline.select(pack.supervision, "A")
            stats = self.pipeline.reader(selection).anchor(
                as_given(packed_logits(self.loaded.model, pack))
            )
            loss = self.pipeline(ForwardStats(stats, stats), selection, "A")
            total = total + loss.total * len(indices) / len(segments)
        total.backward()
        return self.gradients()


ConfigOf = Callable[..., Config]


@pytest.fixture(scope="module")
def config_of(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path_factory: pytest.TempPathFactory
) -> ConfigOf:
    """A config from `training` keys, the packing capacity and the share of channel B."""
    out = tmp_path_factory.mktemp("step")

    def make(capacity: int = 640, b_ratio: float = 0.0, **training: Any) -> Config:
        return small_config(
            toy_checkpoint,
            toy_data,
            out,
            training=training,
            global_max_length=capacity,
            stage2_ab={"schedule": {"b_ratio": b_ratio}},
        )

    return make


@pytest.fixture(scope="module")
def parts(config_of: ConfigOf) -> Parts:
    return Parts(config_of())


@pytest.fixture(scope="module")
def samples(toy_data: ToyData) -> list[Sample]:
    return read_samples(toy_data.train_jsonl, allow_poly=False)[:6]


def close(a: Gradients, b: Gradients) -> bool:
    return a.keys() == b.keys() and all(
        torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-5) for name in a
    )


@pytest.mark.req("STEP-02", "LOSS-05", "PACK-05")
def test_packs_add_up_to_the_gradient_of_their_shares(
    parts: Parts, samples: list[Sample], config_of: ConfigOf
) -> None:
    config = config_of(capacity=210)
    _, report, gradients = parts.step(parts.runner(config), samples[:5])
    segments = parts.channel_a.segments(samples[:5])
    plan = plan_packs([len(s) for s in segments], 210, config.training.packing_min_fill_ratio)
    assert sorted(len(indices) for indices in plan) == [1, 2, 2]
    assert report.metrics["packing/post_rollout_packs"] == len(plan)
    assert report.metrics["packing/post_rollout_segments"] == 5
    length = sum(map(len, segments))
    assert report.metrics["packing/post_rollout_selected_total_len"] == length
    fill = report.metrics["packing/post_rollout_fill"]
    assert fill == pytest.approx(length / (len(plan) * 210))
    assert close(gradients, parts.reference(segments, plan))


@pytest.mark.req("STEP-01", "SYNC-07", "SYNC-09", "ARCH-03", "ROLL-03")
def test_a_backend_has_the_shared_gpu_during_the_push_and_rollouts_of_a_step(
    parts: Parts, samples: list[Sample], config_of: ConfigOf
) -> None:
    class Sharing(Scripted):
        @contextmanager
        def serving(self) -> Iterator[None]:
            self.done.append("takes the GPU")
            yield
            self.done.append("gives it back")

    backend = Sharing(samples, parts)
    runner = parts.runner(config_of(b_ratio=0.5), policy_over(backend))
    hook = parts.loaded.model.register_forward_hook(lambda *_: backend.done.append("forward"))
    try:
        reports = [parts.step(runner, samples, step)[1] for step in range(4)]
    finally:
        hook.remove()
    turn = ("takes the GPU", "push {}", f"{len(samples)} rollouts", "gives it back")
    of_b = [[each.format(version) for each in turn] for version in (1, 2)]
    events = [event for event, _ in groupby(backend.done)]
    assert events == ["forward", *of_b[0], "forward", *of_b[1], "forward"]
    assert [report.channel for report in reports] == ["A", "B", "A", "B"]
    assert [r.metrics.get("sync/weights_version") for r in reports] == [None, 1, None, 2]


@pytest.mark.req("PACK-05")
@pytest.mark.parametrize(
    ("training", "warnings"), [({"packing_min_fill_ratio": 0.9}, 1), ({"packing": False}, 0)]
)
def test_poorly_filled_packs_are_warned_about_once(
    parts: Parts,
    samples: list[Sample],
    config_of: ConfigOf,
    caplog: pytest.LogCaptureFixture,
    training: dict[str, Any],
    warnings: int,
) -> None:
    runner = parts.runner(config_of(**training))
    for step in range(2):
        parts.step(runner, samples[:1], step)
    assert caplog.text.count("training.packing_min_fill_ratio 90 %") == warnings
