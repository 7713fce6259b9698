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
from learner.rollout.backend import Call, RolloutBackend
from learner.rollout.policy import Asking, Policy
from learner.rollout.seeds import request_seed, rollout_seed_base
from learner.runs.metrics import StepReport
from learner.stages.packing.plan import plan_packs
from learner.training.channels import ChannelA, ChannelB, Encoding
from learner.training.recipes import Recipe
from learner.training.step import PlainEngine, StepRunner
from learner.training.synchronous_rollouts import Packer
from learner.types import RolloutOutput, Sample
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from tests.unit.answers import encode
from tests.unit.packed_logits import as_given, packed_logits
from tests.unit.small_run import rollout, small_config, written

Gradients = dict[str, Tensor]
# Its logger warns of poorly filled packs.
PACKER = Packer.__module__


class Scripted(RolloutBackend):
    """Answers each sample with its first object, and the second of every pair with garbage.

    done: pushes, rollouts and the close, in order. requests: of all rollouts. said: answers all.
    """

    def __init__(self, samples: Sequence[Sample], parts: "Parts") -> None:
        super().__init__()
        self._samples = {sample.sample_id: sample for sample in samples}
        self._parts = parts
        self.done: list[str] = []
        self.seeds: list[int | None] = []
        self.requests: list[RolloutInferRequest] = []
        self.said: str | None = None

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        self.done.append("rollout")
        self.seeds.append(request_config.seed)
        self.requests += requests
        return [self._answer(i, str(request.uuid)) for i, request in enumerate(requests)]

    def push_weights(self, version: int) -> None:
        self.done.append(f"push {version}")

    def close(self) -> None:
        self.done.append("close")

    def _answer(self, index: int, sample_id: str) -> RolloutOutput:
        sample = self._samples[sample_id]
        text = "garbage" if index % 2 else written(*sample.objects[:1])
        prompt = self._parts.encode(sample).ids.tolist()
        return rollout(prompt, encode(self._parts.loaded.tokenizer, self.said or text))


def policy_over(backend: Scripted) -> Policy:
    return Policy(backend, Asking("Detect.", None, RequestConfig()))


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
        loss, report = runner.run(self.loaded.model, samples, step, PlainEngine())
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


@pytest.mark.req("STEP-01", "SYNC-07", "SYNC-09", "ARCH-03")
def test_channels_follow_the_schedule_and_b_pushes_before_it_asks(
    parts: Parts, samples: list[Sample], config_of: ConfigOf
) -> None:
    backend = Scripted(samples, parts)
    policy = policy_over(backend)
    runner = parts.runner(config_of(b_ratio=0.5), policy)
    reports = [parts.step(runner, samples[:2], step)[1] for step in range(4)]
    assert [report.channel for report in reports] == ["A", "B", "A", "B"]
    assert [report.metrics["step/channel_b"] for report in reports] == [0, 1, 0, 1]
    assert backend.done == ["push 1", "rollout", "push 2", "rollout"]
    assert [r.metrics.get("sync/weights_version") for r in reports] == [None, 1, None, 2]


@pytest.mark.req("ROLL-03")
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
        for step in range(4):
            parts.step(runner, samples, step)
    finally:
        hook.remove()
    turn = ("takes the GPU", "push {}", "rollout", "gives it back")
    of_b = [[each.format(version) for each in turn] for version in (1, 2)]
    events = [event for event, _ in groupby(backend.done)]
    assert events == ["forward", *of_b[0], "forward", *of_b[1], "forward"]


@pytest.mark.req("SEED-01", "SEED-02", "DIST-05", "MET-01")
@pytest.mark.scenario("Same step produces identical derived rollout seed base")
def test_a_b_step_logs_its_calls_with_the_seed_of_the_step(
    parts: Parts, samples: list[Sample], config_of: ConfigOf
) -> None:
    class Noting(Scripted):
        def rollout(
            self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
        ) -> list[RolloutOutput]:
            first = request_config.seed or 0
            self.journal.call(Call("http://a:1", 0, len(requests), first, 2, "answered"))
            return super().rollout(requests, request_config)

    backend = Noting(samples, parts)
    asking = Asking("Detect.", None, RequestConfig(max_tokens=5))
    logged: list[dict[str, Any]] = []
    config = config_of(b_ratio=0.5)
    policy = Policy(backend, asking)
    runner = StepRunner(config, parts.recipe(config), policy, logged.append)
    reports = [parts.step(runner, samples[:2], step)[1] for step in range(4)]
    bases = [rollout_seed_base(11, step) for step in (1, 3)]
    assert backend.seeds == [request_seed(base, 0, 0) for base in bases]
    assert [r.metrics.get("rollout/seed_base") for r in reports] == [None, bases[0], None, bases[1]]
    assert [r.metrics.get("rollout/retries") for r in reports] == [None, 1, None, 1]
    assert [record["step"] for record in logged] == [2, 4]
    for record, base in zip(logged, bases, strict=True):
        assert record["rollout_seed_base"] == base
        assert record["decoding"] == {"max_tokens": 5}
        assert [call["seed"] for call in record["calls"]] == [request_seed(base, 0, 0)]


@pytest.mark.req("CHB-01", "MET-02", "PARSE-05", "RES-06", "RES-08")
@pytest.mark.scenario(
    "Missing opening brace falls back to `{` and trains",
    "Default Stage-2 AB run uses unified Channel-B semantics",
)
def test_a_b_step_reports_matches_appended_objects_and_invalid_answers(
    parts: Parts, samples: list[Sample], config_of: ConfigOf
) -> None:
    policy = policy_over(Scripted(samples, parts))
    _, report, gradients = parts.step(parts.runner(config_of(b_ratio=1), policy), samples)
    truths = sum(len(sample.objects) for sample in samples)
    metrics = report.metrics
    assert metrics["stage2_ab/channel_b/matched"] == 3
    assert metrics["stage2_ab/channel_b/fn_appended"] == truths - 3
    assert metrics["stage2_ab/channel_b/invalid_rollout"] == 3
    assert metrics["rollout/per_second"] > 0
    for phase in ("push", "rollout", "target", "pack", "learn"):
        assert metrics[f"time/{phase}_s"] >= 0
    assert all(torch.isfinite(g).all() for g in gradients.values())
    assert any(g.abs().sum() > 0 for g in gradients.values())


@pytest.mark.req("PACK-05")
@pytest.mark.parametrize(
    ("training", "warnings"),
    [
        ({"packing_min_fill_ratio": 0.9}, 1),
        ({"packing_min_fill_ratio": 0.0}, 0),
        ({"packing": False}, 0),
    ],
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
    found = [r.getMessage() for r in caplog.records if r.name == PACKER]
    assert len(found) == warnings
    for warning in found:
        assert "training.packing_min_fill_ratio 90 %" in warning
        assert "global_max_length" in warning
