"""Ranks with different packs run the same forwards; threads are the ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.fixed_engines import FixedA
from benchmarks.fixed_engines import samples as fixed_samples
from learner.config import load_config
from learner.config.schema import Config
from learner.distributed.peers import SINGLE_PROCESS, Peers
from learner.models.packs import Pack
from learner.objectives.logit_stats import Supervision
from learner.objectives.pipeline import PackLoss
from learner.rollout.backend import RolloutBackend
from learner.rollout.policy import Policy, RequestSettings
from learner.runs.metrics import Payload, PhaseClock
from learner.stages.packing import Chunk
from learner.training.channels import Recipe
from learner.training.step import StepRunner
from learner.training.synchronous_rollouts import PackFeed, RolloutSource
from learner.types import Channel, RolloutOutput, Sample
from shared_contracts.infer import RequestConfig
from tests.unit.plain_accelerator import PlainAccelerator
from tests.unit.ranks_in_threads import in_ranks

T = TypeVar("T")

CONFIGS = Path(__file__).parents[2] / "configs"
CONFIG = load_config(CONFIGS / "demo" / "two_channel.yaml")

ATOM, TOP5 = "loss/B_coord/bbox_ciou", "coord_diag/B/acc_top5"
CLIPPED = "policy_gradient/clip_fraction"

# Per rank, per chunk: the samples of each of its packs.
Chunks = list[list[int]]
# Every example has threads that talk to each other.
FEWER = settings(max_examples=settings().max_examples // 5)


def pack(samples: int, name: str = "own") -> Pack:
    none = torch.zeros(0)
    nothing = Supervision(none, none, none, none, none, none)
    return Pack([name] * samples, none, none, none, None, None, nothing, none, ())


@dataclass
class Ran:
    """Record of one rank. forwards: (name, samples) each; fractions, synced: of backwards."""

    forwards: list[tuple[str, int]] = field(default_factory=list)
    fractions: list[float] = field(default_factory=list)
    synced: list[bool] = field(default_factory=list)
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    gradient: float | None = None


class Recording(PlainAccelerator):
    def __init__(self, ran: Ran) -> None:
        self._ran = ran
        self._syncs = True

    def backward(self, loss: Tensor) -> None:
        self._ran.synced.append(self._syncs)
        self._ran.fractions.append(loss.item())  # of a weight of 1
        loss.backward()

    @contextmanager
    def _unsynced(self) -> Iterator[None]:
        self._syncs = False
        yield
        self._syncs = True

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._unsynced()


class Given(Recipe):
    """Packs as they are given; a pack's loss is the model's weight, which is 1 at the start."""

    def __init__(self, config: Config, ran: Ran) -> None:
        self.config = config
        self.channel_a = FixedA(0.0)
        self._ran = ran

    def channel(self, step: int) -> Channel:
        return "B"

    def loss(
        self, model: nn.Module, pack: Pack, channel: Channel, answer_tokens: float | None = None
    ) -> PackLoss:
        self._ran.forwards.append((pack.sample_ids[0], count := len(pack.sample_ids)))
        (weight,) = model.parameters()
        tokens = {CLIPPED: (1.0, float(count))}
        return PackLoss(weight.sum(), {ATOM: 2.0}, {TOP5: 1.0}, count, tokens=tokens)


class GivenPacks(PackFeed):
    def __init__(self, chunks: Iterator[Chunk[Pack]]) -> None:
        self.seed_base, self.chunks = 0, chunks

    def payload(self) -> Payload:
        return Payload()


class Script(RolloutSource):
    def __init__(self, chunks: Iterator[Chunk[Pack]]) -> None:
        self._given = chunks

    @contextmanager
    def feed(self, step: int, own: Sequence[Sample], clock: PhaseClock) -> Iterator[PackFeed]:
        yield GivenPacks(self._given)


class Nobody(RolloutBackend):
    def rollout(self, requests: Any, request_config: Any) -> list[RolloutOutput]:
        raise AssertionError("packs are given")

    def push_weights(self, version: int) -> None:
        raise AssertionError("packs are given")

    def close(self) -> None: ...


def step(
    peers: Peers, packs: Iterator[Chunk[Pack]], samples: int, ran: Ran, config: Config = CONFIG
) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    policy = Policy(Nobody(), RequestSettings("", None, RequestConfig()))
    runner = StepRunner(config, Given(config, ran), policy, peers=peers, source=Script(packs))
    loss, report = runner.run(model, fixed_samples(samples), 0, Recording(ran))
    ran.loss = loss.item()
    ran.metrics = report.metrics
    ran.gradient = None if model.weight.grad is None else model.weight.grad.item()


def run(peers: Peers, chunks: Chunks) -> Ran:
    ran = Ran()
    packs = (
        Chunk([pack(count) for count in chunk], number == len(chunks))
        for number, chunk in enumerate(chunks, 1)
    )
    step(peers, packs, max(sum(map(sum, chunks)), 1), ran)
    return ran


def runs(ranks: Sequence[Chunks]) -> list[Ran]:
    found = in_ranks(len(ranks), lambda peers: run(peers, ranks[peers.rank]))
    return [ran.result() for ran in found]


def before_the_last_chunk(ranks: Sequence[Chunks]) -> int:
    """Packs that every rank has before the last chunk of the rank with the most chunks."""
    last = max(map(len, ranks)) - 1
    return min(sum(map(len, chunks[: max(last, 0)])) for chunks in ranks)


@pytest.mark.req("DDP-02", "STEP-02")
@FEWER
@given(
    st.lists(st.lists(st.lists(st.integers(1, 3), max_size=3), max_size=4), min_size=1, max_size=3)
)
def test_every_rank_runs_as_many_forwards_and_synchronizes_once_in_the_last(
    ranks: list[Chunks],
) -> None:
    packs = [[count for chunk in chunks for count in chunk] for chunks in ranks]
    most = max(map(len, packs))
    # Where the last chunks are empty, all there is was run before: one more synchronizes.
    most += 0 < most == before_the_last_chunk(ranks)
    for own, ran in zip(packs, runs(ranks), strict=True):
        assert ran.synced == [False] * (most - 1) + [True] * (most > 0)
        assert ran.forwards[: len(own)] == [("own", count) for count in own]
        replayed = ("own", own[-1]) if own else ("fixed:0", 1)
        assert ran.forwards[len(own) :] == [replayed] * (most - len(own))
        fractions = [count / sum(own) for count in own] + [0.0] * (most - len(own))
        assert ran.fractions == pytest.approx(fractions)
        assert ran.metrics["step/replays"] == most - len(own)
        if own:  # of each pack once, and of no replay
            logged = [ran.metrics[key] for key in (ATOM, TOP5, CLIPPED)]
            assert logged == pytest.approx([2.0 / len(ranks), *[len(own) / sum(own)] * 2])
        assert ran.loss == pytest.approx(1.0 if own else 0.0)
        assert ran.gradient == (pytest.approx(ran.loss) if most else None)


@pytest.mark.req("RES-18", "FULL-03")
def test_fsdp2_sums_the_gradients_of_every_backward() -> None:
    training = CONFIG.training.model_copy(update={"data_parallel": "fsdp2"})
    ran = Ran()
    packs = iter([Chunk([pack(1), pack(1), pack(1)], True)])
    step(SINGLE_PROCESS, packs, 3, ran, CONFIG.model_copy(update={"training": training}))
    assert ran.synced == [True] * 3


@pytest.mark.req("DDP-01", "DDP-02")
def test_packs_that_fail_to_come_on_one_rank_end_the_step_on_all() -> None:
    def broken(peers: Peers) -> Ran:
        def packs() -> Iterator[Chunk[Pack]]:
            yield Chunk([pack(1)], last=False)
            if peers.rank == 1:
                raise ValueError("a corrupt image")
            yield Chunk([pack(1)], last=True)

        step(peers, packs(), 2, Ran())
        return Ran()

    zero, one = in_ranks(2, broken)
    assert isinstance(one.exception(), ValueError)
    assert str(zero.exception()) == "learner process 1 failed: ValueError: a corrupt image"


class Waiting(Peers):
    """repushes: calls in which a waiting process pushes again to servers that restarted."""

    repushes = 0

    def all_gather(
        self, work: Callable[[], T], meanwhile: Callable[[], object] | None = None
    ) -> list[T]:
        self.repushes += getattr(meanwhile, "__func__", None) is Policy.repush_restarted
        return super().all_gather(work, meanwhile)


@pytest.mark.req("SYNC-07", "GROUP-03")
@pytest.mark.parametrize("name", ["stage2_two_channel", "stage2_group_relative"])
def test_restarted_servers_are_pushed_to_again_while_packs_are_waited_for(name: str) -> None:
    config, peers = load_config(CONFIGS / name / "base.yaml"), Waiting()
    step(peers, iter([Chunk([pack(1)], False), Chunk([pack(1)], True)]), 1, Ran(), config)
    assert peers.repushes == 2, "for each chunk; for the counts of groups, and their only chunk"
