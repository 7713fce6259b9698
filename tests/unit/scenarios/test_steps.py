"""Scenarios of whole steps on the toy model (seeds 000 and 001)."""

import io
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import nn

from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData, make_data
from learner.distributed.peers import Peers
from learner.rollout.policy import Policy, request_settings
from learner.training.backends import open_backend
from learner.training.input_checks import read_inputs
from learner.training.run_log import ProgressDisplay, log_calls, open_run_folder
from learner.training.step import StepRunner
from learner.training.train import RunParts, build_runner, build_trainer
from learner.training.trainer import StepTrainer, build_optimizer
from tests.unit.config_faults import changed, only_error
from tests.unit.plain_accelerator import PlainAccelerator
from tests.unit.ranks_in_threads import in_ranks
from tests.unit.small_run import small_config
from tests.unit.test_step import Parts, Scripted, policy_over

N_SAMPLES = 4


@pytest.mark.req("CFG-05", "RES-01")
@pytest.mark.scenario(
    "Rollout decode batch size 2 with learner microbatch 1",
    "Rollout decode batch size 4 with learner microbatch 1",
)
@pytest.mark.parametrize("decode_batch_size", [2, 4])
def test_the_decode_batch_size_does_not_change_the_learners_batch_of_one(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path, decode_batch_size: int
) -> None:
    hf = {
        "rollout_backend": "hf",
        "decode_batch_size": decode_batch_size,
        "max_new_tokens": 2,
    }
    schedule = {"stage2_ab": {"schedule": {"b_ratio": 1.0}}}
    config = small_config(toy_checkpoint, toy_data, tmp_path, rollout_matching=hf, **schedule)
    parts = Parts(config)
    generating: set[int] = set()
    learning: set[int] = set()

    def note(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        (generating if kwargs["use_cache"] else learning).add(kwargs["input_ids"].shape[0])

    parts.loaded.model.register_forward_pre_hook(note, with_kwargs=True)
    samples = read_samples(toy_data.train_jsonl, allow_poly=False)[:N_SAMPLES]
    backend = open_backend(config, parts.loaded, [], tmp_path, samples)
    parts.step(parts.runner(config, Policy(backend, request_settings(config))), samples)
    assert (generating, learning) == ({decode_batch_size}, {1})
    old = "custom.extra.rollout_matching.decode_batch_size"
    assert only_error(changed(old, 4)).do == "Use rollout_matching.decode_batch_size"


@pytest.mark.req("STEP-01", "DDP-01", "RES-14")
def test_multi_process_learner_uses_rank0_broadcast_for_step_kind(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    """A rank whose own schedule has no channel B runs the channel of rank 0."""
    samples = read_samples(toy_data.train_jsonl, allow_poly=False)[:N_SAMPLES]
    configs = [
        small_config(toy_checkpoint, toy_data, tmp_path, stage2_ab={"schedule": {"b_ratio": ratio}})
        for ratio in (0.5, 0.0)
    ]
    loaded = [Parts(config) for config in configs]

    def kinds(peers: Peers) -> list[str]:
        config, parts = configs[peers.rank], loaded[peers.rank]
        own = samples[peers.rank :: 2]
        policy = policy_over(Scripted(own, parts))
        runner = StepRunner(config, parts.recipe(config), policy, peers=peers)
        model = parts.loaded.model
        return [runner.run(model, own, step, PlainAccelerator())[1].channel for step in range(4)]

    assert [rank.result() for rank in in_ranks(2, kinds)] == [["A", "B", "A", "B"]] * 2


# --- runs of two channels

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
        run = RunParts(
            config, inputs, parts.loaded, optimizer, policy, partial(log_calls, folder, 0)
        )
        display = ProgressDisplay(Console(file=io.StringIO()), "run")
        self.trainer = build_trainer(run, build_runner(run), lambda step: {}, display)
        self.trainer.train()
        logged = (folder / "metrics.jsonl").read_text().splitlines()
        self.steps = [line for line in map(json.loads, logged) if "loss" in line]
        self.channels = "".join("B" if step["step/channel_b"] else "A" for step in self.steps)

    def _forward(self, _: object, __: object, arguments: dict[str, Any]) -> None:
        self.events.append("forward")
        ids = arguments.get("input_ids")
        self.forwards.append((arguments["inputs_embeds"][..., 0] if ids is None else ids).numel())

    @property
    def by_step(self) -> list[list[str]]:
        """The events before each update."""
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
    """Both channels train, by `stage2_ab`. A step takes its samples whole and updates once."""
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
