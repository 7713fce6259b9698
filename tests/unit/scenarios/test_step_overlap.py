"""Scenarios of what happens within one optimizer step (seed 001)."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.models.packs import Pack
from learner.objectives.logit_stats import ForwardStats, Reader
from learner.rollout.policy import Asking, OpenBackend, Policy
from learner.runs.metrics import StepReport
from learner.training.channels import ChannelB
from learner.training.recipes import Recipe
from learner.training.step import PlainEngine, StepRunner
from learner.training.train import order_of
from learner.training.trainer import BatchLoader
from learner.types import RolloutOutput, Sample
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from tests.unit.small_run import small_config
from tests.unit.streams import in_chunks
from tests.unit.test_step import Parts, Scripted

CHUNK, CHUNKS = 2, 7
WAIT_S = 60.0


class Servers(Scripted):
    """Answers at once; lets a test wait for the n-th call."""

    def __init__(self, samples: list[Sample], parts: Parts) -> None:
        super().__init__(samples, parts)
        self.asked: list[int] = []
        self._changed = threading.Condition()

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        with self._changed:
            self.asked.append(len(requests))
            self._changed.notify_all()
        return super().rollout(requests, request_config)

    def wait_for(self, calls: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.asked) >= calls, WAIT_S)


class Watched(ChannelB):
    """Calls `before` at the begin of every forward."""

    before: Callable[[], None]

    def forward_stats(self, model: torch.nn.Module, pack: Pack, reader: Reader) -> ForwardStats:
        self.before()
        return super().forward_stats(model, pack, reader)


class World:
    def __init__(self, checkpoint: Path, data: ToyData, folder: Path, **training: Any) -> None:
        self.config: Config = small_config(
            checkpoint,
            data,
            folder,
            training=training,
            stage2_ab={"schedule": {"b_ratio": 1.0}},
        )
        self.parts = Parts(self.config)
        self.samples = read_samples(data.train_jsonl, allow_poly=False)
        self.servers = Servers(self.samples, self.parts)
        matching = self.config.rollout_matching.matching
        self.channel_b = Watched(self.parts.encoding, matching, allow_poly=False)
        self.channel_b.before = lambda: None

    def step(self, samples: Sequence[Sample], size: int | None) -> StepReport:
        asking = Asking("Detect.", None, RequestConfig())
        stream = None if size is None else in_chunks(self.servers, size)
        policy = Policy(OpenBackend(self.servers, stream=stream), asking)
        parts = self.parts
        recipe = Recipe(self.config, parts.channel_a, self.channel_b, parts.pipeline)
        runner = StepRunner(self.config, recipe, policy)
        return runner.run(parts.loaded.model, samples, 0, PlainEngine())[1]


@pytest.mark.req("STEP-03")
def test_rollout_and_learner_overlap_within_a_step(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    """While a chunk is learned, two are packed, one is answered, one more is asked for; no more."""
    world = World(toy_checkpoint, toy_data, tmp_path, packing=False)
    asked_at_forwards: list[int] = []

    def wait_for_the_next_chunks() -> None:
        chunk = len(asked_at_forwards) // CHUNK
        world.servers.wait_for(min(chunk + 5, CHUNKS))
        asked_at_forwards.append(len(world.servers.asked))

    world.channel_b.before = wait_for_the_next_chunks
    report = world.step(world.samples[: CHUNK * CHUNKS], size=CHUNK)
    assert world.servers.asked == [CHUNK] * CHUNKS
    assert asked_at_forwards == [5, 5, 6, 6] + [7] * 10
    assert report.metrics["packing/post_rollout_packs"] == CHUNK * CHUNKS


@pytest.mark.req("STEP-02", "CFG-07")
def test_channel_b_executes_only_on_the_final_micro_step_under_grad_accumulation(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    """Nothing runs before all 8 micro batches of a rank are there: it gets them as one."""
    budget = {
        "effective_batch_size": 16,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "max_steps": 1,
        "save_steps": 1,
    }
    world = World(toy_checkpoint, toy_data, tmp_path, **budget)
    assert world.config.training.resolve_accumulation(world_size=2) == 8
    order = order_of(world.config, len(world.samples), processes=2)
    (share,) = BatchLoader(world.samples, order, rank=1)
    world.step(share, size=None)
    assert world.servers.asked == [8]
