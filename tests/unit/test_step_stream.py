"""Samples of a step are requested as soon as a server has room, over HTTP (FULL-06, STEP-03)."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext

import pytest

from learner.config import parse_config
from learner.models.packs import Segment
from learner.rollout.distribution import (
    CHUNKS_AHEAD,
    rank_seed_base,
    request_seed,
    rollout_seed_base,
)
from learner.rollout.policy import Policy, RequestSettings
from learner.runs.metrics import PhaseClock
from learner.training.channels import ChannelB
from learner.training.synchronous_rollouts import RolloutSource
from learner.types import AssessedRollout, RolloutOutput, Sample
from shared_contracts.infer import InferCall, RequestConfig
from tests.unit.config_faults import changed
from tests.unit.fleets import SEED, Fleet, S, fleet, requests, wait_until
from tests.unit.scripted_server import Reply, bodies

pytestmark = pytest.mark.req("FULL-06", "STEP-03")

# Only a test that fails waits so long.
WAIT_S = 60.0
CONFIG = RequestConfig(seed=SEED, max_tokens=4)


def numbers(call: InferCall) -> list[int]:
    return [int(str(request.uuid)) for request in call.infer_requests]


def requested(run: Fleet) -> set[int]:
    return {n for one in run.rollouts for call in bodies(one.server) for n in numbers(call)}


def answered(run: Fleet) -> set[int]:
    return {n for one in run.rollouts for call in one.answered for n in call}


def every_call(run: Fleet, fault: Callable[[S, InferCall], Reply]) -> None:
    for one in run.rollouts:
        one.faults.extend([fault] * 1000)


class Slow:
    """Answers at once, except requests in `held`: those once `free` is set.

    early: requests that came before `free` was set.
    """

    def __init__(self, *held: int) -> None:
        self.held = set(held)
        self.free = threading.Event()
        self.early: set[int] = set()

    def __call__(self, one: S, call: InferCall) -> Reply:
        if not self.free.is_set():
            self.early |= set(numbers(call))
        if self.held & set(numbers(call)):
            assert self.free.wait(WAIT_S)
        return one.ok(call)


def ids(outputs: Sequence[RolloutOutput]) -> list[int]:
    return [output.response_token_ids[0] for output in outputs]


class NoTraining(ChannelB):
    """Makes no segments. taken: numbers of each chunk, in order. seeds: of the answers."""

    def __init__(self) -> None:
        self.answers_per_sample = 1
        self.taken: list[list[int]] = []
        self.seeds: list[int | None] = []

    def ahead(self, samples: Sequence[Sample]) -> AbstractContextManager[None]:
        return nullcontext()

    def segments(
        self, samples: Sequence[Sample], rollouts: Sequence[RolloutOutput]
    ) -> tuple[list[Segment], list[AssessedRollout]]:
        assert [int(sample.sample_id) for sample in samples] == ids(rollouts)
        self.taken.append(ids(rollouts))
        self.seeds += [rollout.seed for rollout in rollouts]
        return [], []


@contextmanager
def step_of(run: Fleet, count: int, rank: int = 0) -> Iterator[tuple[NoTraining, Iterator[object]]]:
    """Channel B of step 3 with `count` samples, and its chunks of packs."""
    asking = RequestSettings("Detect.", None, RequestConfig(max_tokens=4))
    policy = Policy(run.backend, asking)
    channel, config = NoTraining(), parse_config(changed("training.seed", 5))
    source = RolloutSource(config, policy, channel, rank)
    samples = [Sample(str(number), (), 64, 64, ()) for number in range(count)]
    with source.feed(3, samples, PhaseClock()) as feed:
        yield channel, feed.chunks


def test_one_slow_answer_keeps_only_its_own_place() -> None:
    """Free places are filled with requests of the next chunk, in order, but of no later one."""
    with fleet(1, decode_batch_size=2) as run:
        slow = Slow(0)
        every_call(run, slow)
        with step_of(run, 20) as (channel, chunks):
            window = set(range(2 * (1 + CHUNKS_AHEAD)))
            wait_until(lambda: answered(run) >= window - {0} and slow.early >= window)
            assert channel.taken == []
            slow.free.set()
            list(chunks)
        assert slow.early == window
        assert run.rollouts[0].peak == 2
    assert channel.taken == [[n, n + 1] for n in range(0, 20, 2)]


def test_a_step_that_fits_the_servers_at_once_is_learned_in_four_parts() -> None:
    """All requests are sent at once. The first three parts are learned before the last ends."""
    with fleet(1, decode_batch_size=64) as run:
        slow = Slow(31)
        every_call(run, slow)
        with step_of(run, 32) as (channel, chunks):
            for _ in range(3):
                next(chunks)
            wait_until(lambda: slow.early == set(range(32)))
            slow.free.set()
            list(chunks)
    assert channel.taken == [[*range(k, k + 8)] for k in range(0, 32, 8)]


@pytest.mark.req("SEED-01", "DIST-01", "RES-27")
@pytest.mark.parametrize("rank", [0, 1])
def test_seeds_and_order_are_those_of_the_step_whatever_ends_first(rank: int) -> None:
    base = rank_seed_base(rollout_seed_base(5, 3), rank)
    with fleet(2, decode_batch_size=2) as run:
        every_call(run, at_random(random.Random(7)))
        with step_of(run, 21, rank) as (channel, chunks):
            assert len(list(chunks)) == 6
        for one in run.rollouts:
            for call in bodies(one.server):
                assert call.request_config is not None
                assert call.request_config.seed == request_seed(base, 0, numbers(call)[0])
    assert channel.taken == [[*range(k, min(k + 4, 21))] for k in range(0, 21, 4)]
    assert channel.seeds == [request_seed(base, 0, i) for i in range(21)]


def at_random(rng: random.Random) -> Callable[[S, InferCall], Reply]:
    def answer(one: S, call: InferCall) -> Reply:
        threading.Event().wait(rng.uniform(0, 0.02))
        return one.ok(call)

    return answer


def test_answers_do_not_pile_up_before_a_slow_learner() -> None:
    """Until a chunk is taken: two are packed, two more answered, and the next ones requested."""
    with fleet(1, decode_batch_size=2) as run, step_of(run, 40) as (_, chunks):
        most = 2 * (4 + CHUNKS_AHEAD)
        wait_until(lambda: requested(run) >= set(range(most - 2 * CHUNKS_AHEAD)))
        assert requested(run) <= set(range(most))
        next(chunks)
        wait_until(lambda: requested(run) >= set(range(most - 2 * CHUNKS_AHEAD + 2)))
        assert requested(run) <= set(range(most + 2))


@pytest.mark.req("SYNC-07", "DIST-05")
def test_a_server_that_restarts_within_a_step_has_its_weights_again_before_the_end() -> None:
    with fleet(2, decode_batch_size=2) as run:
        run.rollouts[0].faults.append(S.restart)
        outputs = [o for chunk in run.backend.stream(requests(range(40)), CONFIG) for o in chunk]
        assert run.rollouts[0].answered, "it was taken back"
    assert ids(outputs) == list(range(40))
    assert {output.weights_version for output in outputs} == {(1, 1)}
    assert run.pushed() == [[1, 1], [1]]
    lost, metrics = run.notes()
    assert [url for url, _ in lost] == [run.rollouts[0].server.base_url]
    assert metrics["sync/repushes"] == 1


def test_a_closed_stream_requests_nothing_more() -> None:
    with fleet(1, decode_batch_size=2) as run:
        with closing(run.backend.stream(requests(range(40)), CONFIG)) as chunks:
            assert ids(next(chunks)) == [0, 1]
        run.backend.rollout(requests(range(1)), CONFIG)  # a later call: the stream's are over
        assert requested(run) <= set(range(2 * (1 + CHUNKS_AHEAD)))
