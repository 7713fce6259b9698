"""Optimizer steps and runs of two channels on the toy model, with scripted answers."""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from learner.config.schema import Config
from learner.data.toy import ToyData, make_data
from learner.distributed.peers import Peers
from learner.models.load import LoadedModel, load_model
from learner.models.packs import Segment, make_pack
from learner.models.prompts import PromptEncoder
from learner.objectives.logit_stats import ForwardStats
from learner.objectives.pipeline import Pipeline
from learner.rollout.backend import RolloutBackend
from learner.rollout.policy import Policy, RequestSettings, request_settings
from learner.runs.metrics import StepReport
from learner.stages.packing import plan_packs
from learner.training.backends import open_backend
from learner.training.channels import ChannelA, ChannelB, Encoding, Recipe
from learner.training.input_checks import read_inputs
from learner.training.run_log import ProgressDisplay, log_calls, open_run_folder
from learner.training.step import StepRunner
from learner.training.train import RunParts, build_runner, build_trainer
from learner.training.trainer import StepTrainer, build_optimizer
from learner.types import RolloutOutput, Sample
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from tests.unit.answers import encode
from tests.unit.config_faults import changed, only_error
from tests.unit.packed_logits import as_given, packed_logits
from tests.unit.plain_accelerator import PlainAccelerator
from tests.unit.ranks_in_threads import in_ranks
from tests.unit.small_run import ConfigOf, metric_lines, rollout, small_config, written

Gradients = dict[str, Tensor]


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

    def rollout(self, requests: Any, request_config: RequestConfig) -> list[RolloutOutput]:
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


@pytest.fixture(scope="module")
def config_of(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path_factory: pytest.TempPathFactory
) -> ConfigOf:
    out = tmp_path_factory.mktemp("step")

    def make(b_ratio: float = 0.0, **sections: Any) -> Config:
        schedule = {"schedule": {"b_ratio": b_ratio}}
        return small_config(toy_checkpoint, toy_data, out, stage2_ab=schedule, **sections)

    return make


@pytest.fixture(scope="module")
def parts(config_of: ConfigOf) -> Parts:
    return Parts(config_of())


@pytest.fixture(scope="module")
def samples(scenes: list[Sample]) -> list[Sample]:
    return scenes[:6]


def close(a: Gradients, b: Gradients) -> bool:
    return a.keys() == b.keys() and all(
        torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-5) for name in a
    )


@pytest.mark.req("STEP-02", "LOSS-05", "PACK-05")
def test_packs_add_up_to_the_gradient_of_their_shares(
    parts: Parts, samples: list[Sample], config_of: ConfigOf
) -> None:
    config = config_of(global_max_length=210)
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


@pytest.mark.req("SEED-02")
def test_the_calls_of_a_step_that_fails_are_logged(
    parts: Parts, samples: list[Sample], config_of: ConfigOf
) -> None:
    backend, logged, config = Scripted(samples, parts), list[dict[str, Any]](), config_of(1.0)
    backend.meanwhile = lambda calls: calls // 0
    runner = StepRunner(config, parts.recipe(config), policy_over(backend), logged.append)
    with pytest.raises(ZeroDivisionError):
        parts.step(runner, samples)
    assert [record["step"] for record in logged] == [1]


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
    runner = parts.runner(config_of(training=training))
    for step in range(2):
        parts.step(runner, samples[:5], step)
    for words in ("training.packing_min_fill_ratio", "training.packing_min_fill_ratio 90 %"):
        assert caplog.text.count(words) == warnings


@pytest.mark.req("CFG-05", "RES-01")
@pytest.mark.scenario(
    "Rollout decode batch size 2 with learner microbatch 1",
    "Rollout decode batch size 4 with learner microbatch 1",
)
@pytest.mark.parametrize("decode_batch_size", [2, 4])
def test_the_decode_batch_size_does_not_change_the_learners_batch_of_one(
    config_of: ConfigOf, samples: list[Sample], tmp_path: Path, decode_batch_size: int
) -> None:
    hf = {"rollout_backend": "hf", "decode_batch_size": decode_batch_size, "max_new_tokens": 2}
    config = config_of(b_ratio=1.0, rollout_matching=hf)
    parts = Parts(config)
    generating: set[int] = set()
    learning: set[int] = set()

    def note(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        (generating if kwargs["use_cache"] else learning).add(kwargs["input_ids"].shape[0])

    parts.loaded.model.register_forward_pre_hook(note, with_kwargs=True)
    backend = open_backend(config, parts.loaded, [], tmp_path, samples[:4])
    parts.step(parts.runner(config, Policy(backend, request_settings(config))), samples[:4])
    assert (generating, learning) == ({decode_batch_size}, {1})
    old = "custom.extra.rollout_matching.decode_batch_size"
    assert only_error(changed(old, 4)).do == "Use rollout_matching.decode_batch_size"


@pytest.mark.req("STEP-01", "DDP-01", "RES-14")
def test_multi_process_learner_uses_rank0_broadcast_for_step_kind(
    config_of: ConfigOf, samples: list[Sample]
) -> None:
    configs = [config_of(b_ratio=ratio) for ratio in (0.5, 0.0)]
    loaded = [Parts(config) for config in configs]

    def kinds(peers: Peers) -> list[str]:
        config, parts = configs[peers.rank], loaded[peers.rank]
        own = samples[peers.rank : 4 : 2]
        policy = policy_over(Scripted(own, parts))
        runner = StepRunner(config, parts.recipe(config), policy, peers=peers)
        model = parts.loaded.model
        return [runner.run(model, own, step, PlainAccelerator())[1].channel for step in range(4)]

    assert [rank.result() for rank in in_ranks(2, kinds)] == [["A", "B", "A", "B"]] * 2


BATCH, STEPS, SAVED_AT = 4, 4, 2


class Run:
    """A run of the real trainer. events: pushes, rollouts, forwards and updates, in order.

    forwards: tokens of each forward of the model.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        parts, inputs = Parts(config), read_inputs(config)
        self.backend = Scripted(inputs.train, parts)
        self.events = self.backend.done
        with open_run_folder(config, None) as folder:
            model = parts.loaded.model
        optimizer = build_optimizer(model, config.training)
        self.forwards: list[int] = []
        model.register_forward_pre_hook(self._forward, with_kwargs=True)
        optimizer.register_step_post_hook(lambda *_: self.events.append("update"))
        policy = Policy(self.backend, request_settings(config))
        log = partial(log_calls, folder, 0)
        run = RunParts(config, inputs, parts.loaded, optimizer, policy, log)
        display = ProgressDisplay(Console(file=io.StringIO()), "run")
        self.trainer = build_trainer(run, build_runner(run), lambda step: {}, display)
        self.trainer.train()
        self.steps = metric_lines(folder, "loss")
        self.channels = "".join("B" if step["step/channel_b"] else "A" for step in self.steps)

    def _forward(self, _: object, __: object, arguments: dict[str, Any]) -> None:
        self.events.append("forward")
        ids = arguments.get("input_ids")
        self.forwards.append((arguments["inputs_embeds"][..., 0] if ids is None else ids).numel())

    @property
    def by_step(self) -> list[list[str]]:
        *steps, after = " ".join(self.events).split("update")
        assert after == "", "nothing happens after the last update"
        return [step.split() for step in steps]


def mixed_config(model: Path, data: ToyData, out: Path) -> Config:
    """Steps A, B, B, A. A has two forwards a pack. A pack holds about two samples."""
    return small_config(
        model,
        data,
        out,
        training={"max_steps": STEPS, "save_steps": SAVED_AT, "effective_batch_size": BATCH},
        stage2_ab={"schedule": {"b_ratio": 0.7}, "n_softctx_iter": 2},
        global_max_length=170,
    )


@pytest.fixture(scope="module")
def mixed(toy_checkpoint: Path, toy_data: ToyData, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(mixed_config(toy_checkpoint, toy_data, tmp_path_factory.mktemp("mixed")))


@pytest.mark.req("RES-01", "RES-02", "CHA-01", "STEP-01", "STEP-02")
@pytest.mark.req("CHB-01", "PARSE-05", "RES-06", "RES-08")
@pytest.mark.scenario(
    "Selecting the trainer variant with typed `stage2_ab`",
    "Missing opening brace falls back to `{` and trains",
    "Default Stage-2 AB run uses unified Channel-B semantics",
    "n_softctx_iter=2 runs exactly two forwards and uses final logits",
)
def test_selecting_the_trainer_variant(mixed: Run) -> None:
    assert isinstance(mixed.trainer, StepTrainer)
    assert mixed.channels == "ABBA", "of stage2_ab.schedule.b_ratio"
    assert len(mixed.by_step) == len(mixed.steps) == STEPS
    versions = iter("12")
    for channel, step, events in zip(mixed.channels, mixed.steps, mixed.by_step, strict=True):
        packs = int(step["packing/post_rollout_packs"])
        assert 1 < packs < BATCH, "packs are neither samples nor steps"
        assert step["packing/post_rollout_segments"] == BATCH
        forwards = 2 if channel == "A" else 1  # of stage2_ab.n_softctx_iter
        requested = ["push", next(versions), str(BATCH), "rollouts"] if channel == "B" else []
        assert events == requested + ["forward"] * forwards * packs
        if channel == "B":
            names = ("matched", "invalid_rollout")  # of two answers each
            assert [step[f"stage2_ab/channel_b/{name}"] for name in names] == [2, 2]
    error = only_error(changed("custom.trainer_variant", "stage2_ab_training"))
    assert error.do == "Use stage2_two_channel"


@pytest.mark.req("STEP-02", "PACK-03", "RES-08", "CHB-01", "ROLL-02")
@pytest.mark.scenario(
    "Packing enabled does not break rollout-matching training",
    "Packing is never applied during rollout generation",
    "Training uses one sequence and one forward pass",
)
def test_32_raw_rollouts_pack_into_fewer_than_32_packed_sequences(
    toy_checkpoint: Path, tmp_path: Path
) -> None:
    config = small_config(
        toy_checkpoint,
        make_data(tmp_path / "data", train=32, val=1, seed=0),
        tmp_path / "run",
        training={"max_steps": 1, "save_strategy": "no", "effective_batch_size": 32},
        stage2_ab={"schedule": {"b_ratio": 1.0}},
        global_max_length=12000,
    )
    run = Run(config)
    (step,) = run.steps
    packs = int(step["packing/post_rollout_packs"])
    assert step["packing/post_rollout_segments"] == 32
    assert packs < 32
    assert run.events == ["push 1", "32 rollouts", *["forward"] * packs, "update"]
    assert [len(request.images) for request in run.backend.requests] == [1] * 32
    assert max(run.forwards) <= config.global_max_length
    assert 0 < step["grad_norm"] < math.inf
