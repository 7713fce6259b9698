"""Asynchronous rollouts: the batches of every step, for every order of events (seed 001)."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from learner.config.rollout_matching import AsyncRolloutConfig
from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.distributed.peers import SINGLE_PROCESS, Peers
from learner.rollout.backend import PushNeeded
from learner.rollout.distribution import rank_seed_base, request_seed, rollout_seed_base
from learner.rollout.parallel_calls import in_thread
from learner.rollout.policy import Policy, request_settings
from learner.runs.metrics import PhaseClock
from learner.stages.schedule import channel_for_step
from learner.training.asynchronous_rollouts import (
    AsyncSource,
    BufferClosed,
    ReadyBatch,
    RolloutBuffer,
)
from learner.training.step import StepRunner
from learner.training.synchronous_rollouts import PackFeed
from learner.types import RolloutOutput, Sample
from shared_contracts.errors import RunError
from shared_contracts.infer import RequestConfig
from tests.unit.fleets import wait_until
from tests.unit.plain_accelerator import PlainAccelerator
from tests.unit.ranks_in_threads import in_ranks
from tests.unit.refusals import refused
from tests.unit.small_run import small_config
from tests.unit.test_step import Parts, Scripted

pytestmark = pytest.mark.req("ASYNC-01")

PATIENCE_S = 60.0
BATCH = 2


class Servers(Scripted):
    """A backend that gives an answer when the test allows it.

    asked: sample ids of each call, when it begins. fails: raised in place of the next answers.
    """

    round_size: int | None = None

    def __init__(self, samples: Sequence[Sample], parts: Parts, *, free: bool = False) -> None:
        super().__init__(samples, parts)
        self.asked: Queue[list[str]] = Queue()
        self.pushed: list[int] = []
        self.fails: list[Exception] = []
        self.closed = False
        self._allowed = threading.Semaphore(10**6 if free else 0)
        self._busy = threading.Lock()

    def rollout(self, requests: Any, request_config: RequestConfig) -> list[RolloutOutput]:
        with self._busy:
            self.asked.put([str(request.uuid) for request in requests])
            assert self._allowed.acquire(timeout=PATIENCE_S)
            if self.fails:
                raise self.fails.pop(0)
            answers = super().rollout(requests, request_config)
            version = (self.pushed[-1], self.pushed[-1])
            return [replace(answer, weights_version=version) for answer in answers]

    def push_weights(self, version: int) -> None:
        assert self._busy.acquire(blocking=False), "no call runs while weights are pushed"
        self.pushed.append(version)
        self._busy.release()

    def close(self) -> None:
        self.closed = True
        self.allow(100)

    def allow(self, calls: int = 1) -> None:
        self._allowed.release(calls)

    def next_asked(self) -> list[str]:
        return self.asked.get(timeout=PATIENCE_S)


class WatchedBuffer(RolloutBuffer):
    def __init__(self, keys: AsyncRolloutConfig, total: int) -> None:
        super().__init__(keys, total)
        self.made: Queue[int] = Queue()

    def put(self, ready: ReadyBatch) -> None:
        super().put(ready)
        self.made.put(ready.batch)


class Actor:
    """The asynchronous source of one process.

    settings: of `async_rollout`. free: the servers answer at once.
    """

    def __init__(
        self,
        parts: Parts,
        config: Config,
        samples: Sequence[Sample],
        *,
        total: int = 6,
        peers: Peers = SINGLE_PROCESS,
        round_size: int | None = None,
        free: bool = False,
        **settings: Any,
    ) -> None:
        self.parts, self.config, self.peers = parts, config, peers
        self.samples = samples
        self.servers = Servers(samples, parts, free=free)
        self.servers.round_size = round_size
        self.policy = Policy(self.servers, request_settings(config))
        keys = AsyncRolloutConfig(enabled=True, **{"prefetch_target_packs": 1, **settings})
        self.buffer = WatchedBuffer(keys, total)
        rollout = config.rollout_matching.model_copy(update={"async_rollout": keys})
        self.source = AsyncSource(
            config.model_copy(update={"rollout_matching": rollout}),
            self.policy,
            parts.channel_b,
            self.batch,
            total,
            peers,
            buffer=self.buffer,
        )

    def batch(self, batch: int) -> Sequence[Sample]:
        first = BATCH * (self.peers.count * batch + self.peers.rank)
        return self.samples[first : first + BATCH]

    def ids(self, batch: int) -> list[str]:
        return [sample.sample_id for sample in self.batch(batch)]

    def runner(self, log_calls: Callable[[dict[str, Any]], None] | None = None) -> StepRunner:
        return StepRunner(
            self.config,
            self.parts.recipe(self.config),
            self.policy,
            log_calls,
            peers=self.peers,
            source=self.source,
        )

    def feed(self, step: int) -> PackFeed:
        with self.source.feed(step, self.batch(0), PhaseClock()) as feed:
            return feed

    def begin(self, step: int) -> None:
        self.source.begin(step, PhaseClock())

    def make_ready(self) -> int:
        self.servers.allow()
        return self.buffer.made.get(timeout=PATIENCE_S)

    def begin_until_asked(self, step: int) -> list[str]:
        while True:
            self.begin(step)
            with suppress(Empty):
                return self.servers.asked.get(timeout=0.01)


ActorOf = Callable[..., Actor]

ASYNC = "stage2_ab/async"
N_SAMPLES = 12


@pytest.fixture(scope="module")
def config(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path_factory: pytest.TempPathFactory
) -> Config:
    """Every step wants channel B. A pack of channel B holds all answers of a batch."""
    ratio = {"schedule": {"b_ratio": 1.0}}
    return small_config(toy_checkpoint, toy_data, tmp_path_factory.mktemp("async"), stage2_ab=ratio)


@pytest.fixture(scope="module")
def parts(config: Config) -> Parts:
    return Parts(config)


@pytest.fixture(scope="module")
def samples(scenes: list[Sample]) -> list[Sample]:
    return scenes[:N_SAMPLES]


@pytest.fixture
def actor_of(parts: Parts, config: Config, samples: list[Sample]) -> Iterator[ActorOf]:
    actors: list[Actor] = []

    def make(**settings: object) -> Actor:
        actors.append(Actor(parts, config, samples, **settings))  # type: ignore[arg-type]
        return actors[-1]

    yield make
    for actor in actors:
        actor.source.close()
    wait_until(lambda: "prefetcher" not in {thread.name for thread in threading.enumerate()})


def step_of(actor: Actor, step: int) -> tuple[str, list[str]]:
    actor.begin(step)
    wanted = channel_for_step(step, 0.5)
    if wanted == "B" and actor.source.ready(step):
        feed = actor.feed(step)
        trained = [i for chunk in feed.chunks for pack in chunk.packs for i in pack.sample_ids]
    else:
        wanted = "A"
        trained = [sample.sample_id for sample in actor.source.samples(step, [])]
    actor.policy.mark_updated()
    return wanted, trained


@pytest.mark.req("STEP-02", "RUN-01")
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("free", [True, False], ids=["early", "late"])
def test_every_sample_is_trained_on_once(
    actor_of: ActorOf, samples: list[Sample], *, free: bool, resumed: bool
) -> None:
    actor = actor_of(free=free)
    steps = [step_of(actor, step) for step in range(3)]
    if resumed:
        state, actor = actor.source.state(), actor_of(free=free)
        actor.source.restore(state)
    steps += [step_of(actor, step) for step in range(3, N_SAMPLES // BATCH)]
    trained = [sample_id for _, ids in steps for sample_id in ids]
    assert sorted(trained) == sorted(sample.sample_id for sample in samples)
    if not free:
        assert {channel for channel, _ in steps} == {"A"}


@pytest.mark.req("SYNC-09")
def test_push_waits_for_answers_and_no_request_is_sent_before_it_ends(actor_of: ActorOf) -> None:
    actor = actor_of()
    actor.begin(0)
    actor.servers.next_asked()
    with entering_exclusively(actor) as entered:
        assert not entered.is_set(), "an answer is being made"
        actor.servers.allow()
        assert entered.wait(PATIENCE_S)
        actor.buffer.made.get(timeout=PATIENCE_S)
        actor.feed(0)
        assert actor.servers.asked.empty(), "the next batch is not asked for yet"
    assert actor.servers.next_asked() == actor.ids(1)


@contextmanager
def entering_exclusively(actor: Actor) -> Iterator[threading.Event]:
    entered, leave = threading.Event(), threading.Event()

    def run() -> None:
        with actor.source.exclusive_access():
            entered.set()
            assert leave.wait(PATIENCE_S)

    with ThreadPoolExecutor(1) as pool:
        over = pool.submit(run)
        yield entered
        leave.set()
        over.result()


@pytest.mark.req("STEP-01", "RES-23", "SEED-02")
def test_async_b_step_is_skipped_when_queues_are_empty(actor_of: ActorOf, config: Config) -> None:
    actor = actor_of()
    logged: list[dict[str, Any]] = []
    runner, model = actor.runner(logged.append), actor.parts.loaded.model
    _, skipped = runner.run(model, actor.batch(0), 0, PlainAccelerator())
    assert skipped.channel == "A"
    assert skipped.metrics["step/channel_b"] == 0
    assert skipped.metrics[f"{ASYNC}/b_step_skipped_due_to_queue"] == 1
    assert skipped.metrics[f"{ASYNC}/ready_packs"] == 0
    assert actor.make_ready() == 0
    _, trained = runner.run(model, actor.batch(1), 1, PlainAccelerator())
    assert trained.channel == "B"
    assert f"{ASYNC}/b_step_skipped_due_to_queue" not in trained.metrics
    assert trained.metrics[f"{ASYNC}/ready_packs"] == 1
    assert trained.metrics[f"{ASYNC}/version_lag"] == 1, "pushed before each of the two steps"
    assert trained.metrics["sync/weights_version"] == 1
    base = rollout_seed_base(config.training.seed, 0)
    assert [record.get("rollout_seed_base") for record in logged] == [None, base]
    seeds = [report.metrics.get("rollout/seed_base") for report in (skipped, trained)]
    assert seeds == [None, base]
    assert actor.servers.seeds[0] == request_seed(rank_seed_base(base, 0), 0, 0)


class OfTwo(Peers):
    """Process 0 of two. other: the result of the other one by that of this one. gathered: calls."""

    count = 2

    def __init__(self, other: Callable[[Any], Any]) -> None:
        self._other = other
        self.gathered: list[Callable[[], Any]] = []

    def all_gather(
        self, work: Callable[[], Any], meanwhile: Callable[[], object] | None = None
    ) -> list[Any]:
        self.gathered.append(work)
        return [own := work(), self._other(own)]


@pytest.mark.req("DDP-01")
def test_a_step_is_of_channel_a_if_one_process_has_no_batch(actor_of: ActorOf) -> None:
    actor = actor_of(peers=OfTwo(lambda own: own is not True and own))
    runner, model = actor.runner(), actor.parts.loaded.model
    actor.begin(0)
    assert actor.make_ready() == 0
    assert actor.source.ready(0)
    _, skipped = runner.run(model, [], 0, PlainAccelerator())
    assert skipped.channel == "A"
    assert skipped.metrics["packing/post_rollout_segments"] == BATCH, "of another batch"


@pytest.mark.req("SYNC-09", "DDP-01")
def test_all_processes_push_together_if_one_needs_it_and_none_goes_on_at_another_version(
    actor_of: ActorOf,
) -> None:
    peers = OfTwo(lambda own: own and (own[0], True))
    actor = actor_of(peers=peers, sync_every_steps=100)
    for step in (0, 1):
        actor.begin(step)
    assert actor.policy.version == 2
    assert peers.gathered.count(actor.buffer.pause) == 2, "no process requests during a push"
    actor = actor_of(peers=OfTwo(lambda own: own and (own[0] + 1, False)))
    with pytest.raises(RunError, match=r"before step 1 .* at the versions \[0, 1\]"):
        actor.begin(0)


def test_stale_packs_are_dropped_under_a_tight_version_window(actor_of: ActorOf) -> None:
    actor = actor_of(version_window=1)
    runner, model = actor.runner(), actor.parts.loaded.model
    actor.begin(0)
    assert actor.make_ready() == 0
    for step in (0, 1):
        actor.policy.mark_updated()
        actor.begin(step)
    assert actor.policy.version == 3, "too new for a pack of version 1"
    _, report = runner.run(model, actor.batch(2), 2, PlainAccelerator())
    assert report.metrics[f"{ASYNC}/dropped_stale"] == 1
    assert report.channel == "A", "only the stale pack was there"


def test_ready_packs_are_version_pure(actor_of: ActorOf) -> None:
    """The pack of the first sample is not full when the weights change."""
    actor = actor_of(round_size=1, sync_every_steps=100)
    actor.begin(0)
    actor.servers.next_asked()
    actor.servers.allow()
    actor.servers.next_asked()
    actor.servers.fails.append(PushNeeded("no server has the weights"))
    actor.servers.allow()
    actor.begin_until_asked(1)
    actor.servers.allow()
    assert actor.policy.version == 2
    assert actor.buffer.made.get(timeout=PATIENCE_S) == 0
    feed = actor.feed(1)
    assert actor.source.payload().metrics()[f"{ASYNC}/version_lag"] == 1, "of the first pack"
    packs = [list(pack.sample_ids) for chunk in feed.chunks for pack in chunk.packs]
    first, second = actor.ids(0)
    assert packs == [[first], [second]], "both fit into one pack"
    base = rank_seed_base(rollout_seed_base(actor.config.training.seed, 0), 0)
    assert actor.servers.seeds == [request_seed(base, 0, i) for i in (0, 1)]
    actor.begin(2)
    assert actor.policy.version == 2, "the push that was needed is made"


def test_async_queue_invariant_violation_raises_actionable_error(actor_of: ActorOf) -> None:
    actor = actor_of(version_window=2)
    actor.begin(0)
    first = "channel B was to run step 8, and no batch is ready"
    then = "the queue holds nothing; newest version 1, version_window 2, queue_limit 8"
    with pytest.raises(RunError, match=f"{first}.*{then}"):
        actor.feed(7)


@pytest.mark.req("DDP-01")
def test_error_of_a_prefetcher_ends_the_run_in_every_process(
    parts: Parts, config: Config, samples: list[Sample]
) -> None:
    def failing(peers: Peers) -> str:
        actor = Actor(parts, config, samples, total=3, peers=peers)
        if peers.rank == 1:
            actor.servers.fails.append(RunError("the server refuses"))
        actor.servers.allow()
        with pytest.raises(RunError) as caught:  # noqa: PT012 - one of many steps raises
            while True:
                actor.begin(0)
        actor.buffer.pause()  # for an evaluation: no request runs
        actor.source.close()
        return str(caught.value)

    told = [rank.result() for rank in in_ranks(2, failing)]
    assert told == ["learner process 1 failed: the server refuses", "the server refuses"]


@pytest.mark.parametrize("at", ["nothing", "gate", "room", "answer"])
def test_prefetcher_ends_with_the_run(actor_of: ActorOf, at: str) -> None:
    """at: where it waits. The fixture checks that its thread has ended."""
    actor = actor_of()
    if at != "nothing":
        actor.begin(0)
        assert actor.servers.next_asked() == actor.ids(0)
    if at in ("room", "gate"):
        actor.make_ready()
    if at == "gate":
        with pytest.raises(KeyError), actor.source.exclusive_access():
            raise KeyError
        actor.feed(0)
        wait_until(lambda: actor.buffer.state()["next"] == 2)
    actor.source.close()
    assert actor.servers.closed
    assert actor.servers.asked.empty()


def ready(batch: int, version: int, packs: int = 1) -> ReadyBatch:
    unread: Any = object()
    return ReadyBatch(batch, version, [unread] * packs, unread)


def buffer_at(version: int, limit: int, window: int, target: int, total: int) -> RolloutBuffer:
    keys = AsyncRolloutConfig(
        queue_limit=limit, version_window=window, prefetch_target_packs=target
    )
    buffer = RolloutBuffer(keys, total)
    buffer.start(0)
    buffer.refresh(version)
    return buffer


def make(buffer: RolloutBuffer, version: int, packs: int = 1) -> int:
    batch = buffer.begin()
    buffer.put(ready(batch, version, packs))
    return batch


def test_batch_that_never_fits_is_a_contract_error() -> None:
    buffer = buffer_at(3, limit=4, window=2, target=4, total=100)
    make(buffer, 2)
    found = "do not fit (the queue holds batch 0 of version 2 in 1 packs"
    with refused("rollout_matching.async_rollout.queue_limit", found, "at least 5, "):
        make(buffer, 3, packs=5)


TOTAL, LIMIT, WINDOW, TARGET = 12, 5, 1, 4


@pytest.mark.parametrize(
    "made",
    [[(3, 0)] * 4, [(1, 4), (3, 2)], [(3, 2), (3, 1), (3, LIMIT)]],
    ids=["enough", "no room", "one in the place of two"],
)
def test_no_batch_is_begun_that_is_not_needed_or_would_replace_another(
    made: list[tuple[int, int]],
) -> None:
    """made: version and packs of each batch so far."""
    buffer = buffer_at(3, LIMIT, WINDOW, TARGET, TOTAL)
    for version, packs in made:
        make(buffer, version, packs)
    assert buffer.packs <= LIMIT
    state = buffer.state()
    assert state["left"] == [*range(state["next"])], "a batch that is dropped is given back"
    first, second = (buffer.payload().metrics() for _ in range(2))
    fresh = sum(packs for version, packs in made if version == 3)
    assert first[f"{ASYNC}/dropped_oldest"] == max(0, fresh - LIMIT)
    assert first[f"{ASYNC}/prefetch_idle_s"] > 0, "before each batch was begun"
    assert set(second.values()) == {0}, "a payload has what came since the last one"
    begun = in_thread(buffer.begin, "waiting")
    wait_until(lambda: begun.done() or buffer.payload().metrics()[f"{ASYNC}/prefetch_idle_s"] > 0)
    buffer.close()
    assert isinstance(begun.exception(PATIENCE_S), BufferClosed)


class AnyOrder(RuleBasedStateMachine):
    """The calls of the two threads of a buffer, in any order.

    trained: batches by step. held: (batch, version, packs) in the queue, oldest first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.buffer = buffer_at(1, LIMIT, WINDOW, TARGET, TOTAL)
        self.version = 1
        self.trained: list[int] = []
        self.held: list[tuple[int, int, int]] = []
        self.making: int | None = None
        self.asked_at = 1
        self.largest = 1

    @property
    def packs(self) -> int:
        return sum(packs for _, _, packs in self.held)

    @property
    def unclaimed(self) -> set[int]:
        claimed = {*self.trained, *(batch for batch, _, _ in self.held), self.making}
        return set(range(TOTAL)) - claimed

    @precondition(
        lambda self: (
            self.making is None
            and self.unclaimed
            and self.packs < TARGET
            and self.packs + self.largest <= LIMIT
        )
    )
    @rule()
    def begin(self) -> None:
        expected = min(self.unclaimed)
        self.making = self.buffer.begin()
        self.asked_at = self.version
        assert self.making == expected

    @precondition(lambda self: self.making is not None)
    @rule(packs=st.integers(1, LIMIT))
    def put(self, packs: int) -> None:
        assert self.making is not None
        batch, self.making = self.making, None
        self.buffer.put(ready(batch, self.asked_at, packs))
        if batch in self.trained:
            return
        self.largest = max(self.largest, packs)
        if self.asked_at >= self.version - WINDOW:
            while self.packs + packs > LIMIT:
                self.held.pop(0)
            self.held.append((batch, self.asked_at, packs))

    @rule()
    def push(self) -> None:
        self.version += 1
        self.buffer.refresh(self.version)
        self.held = [entry for entry in self.held if entry[1] >= self.version - WINDOW]

    @precondition(lambda self: self.held)
    @rule()
    def channel_b(self) -> None:
        expected, version, _ = self.held.pop(0)
        taken = self.buffer.take(len(self.trained))
        assert (taken.batch, taken.version) == (expected, version)
        assert version >= self.version - WINDOW
        self.trained.append(taken.batch)

    @precondition(lambda self: len(self.trained) < TOTAL)
    @rule()
    def channel_a(self) -> None:
        if self.unclaimed:
            expected: int | None = min(self.unclaimed)
        elif self.held:
            expected = self.held.pop()[0]
        else:
            expected = self.making
        self.trained.append(self.buffer.take_unanswered(len(self.trained)))
        assert self.trained[-1] == expected

    @invariant()
    def no_batch_is_trained_on_twice(self) -> None:
        assert len(set(self.trained)) == len(self.trained)

    @invariant()
    def the_queue_is_bounded(self) -> None:
        assert self.buffer.packs == self.packs <= LIMIT
        assert (self.buffer.packs > 0) == bool(self.held)

    @invariant()
    def state_has_every_batch_that_is_not_trained_on(self) -> None:
        state = self.buffer.state()
        left = {*state["left"], *range(state["next"], TOTAL)}
        assert left == set(range(TOTAL)) - set(self.trained)

    @precondition(lambda self: len(self.trained) == TOTAL)
    @rule()
    def over(self) -> None:
        with pytest.raises(RunError, match="no batch is left for step 13"):
            self.buffer.take_unanswered(TOTAL)


TestAnyOrder = pytest.mark.req("ASYNC-01", "STEP-02")(AnyOrder.TestCase)
TestAnyOrder.settings = settings(stateful_step_count=60)
