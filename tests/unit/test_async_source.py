"""Asynchronous rollouts: what each step trains on, whatever the prefetcher does when."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest
from torch.distributed import HashStore

from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.distributed.peers import StorePeers
from learner.rollout.backend import PushNeeded
from learner.rollout.seeds import rank_seed_base, request_seed, rollout_seed_base
from learner.runs.metrics import StepReport
from learner.stages.schedule import channel_for_step
from learner.training.step import PlainEngine
from learner.types import Sample
from shared_contracts.errors import RunError
from tests.unit.async_parts import BATCH, PATIENCE_S, Actor, ActorOf
from tests.unit.small_run import small_config
from tests.unit.test_step import Parts

pytestmark = pytest.mark.usefixtures("one_thread")

T = TypeVar("T")
N_SAMPLES = 12


@pytest.fixture(scope="module")
def config(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path_factory: pytest.TempPathFactory
) -> Config:
    """Every step wants channel B."""
    ratio = {"schedule": {"b_ratio": 1.0}}
    return small_config(toy_checkpoint, toy_data, tmp_path_factory.mktemp("async"), stage2_ab=ratio)


@pytest.fixture(scope="module")
def parts(config: Config) -> Parts:
    return Parts(config)


@pytest.fixture(scope="module")
def samples(toy_data: ToyData) -> list[Sample]:
    return read_samples(toy_data.train_jsonl, allow_poly=False)[:N_SAMPLES]


@pytest.fixture
def actor_of(parts: Parts, config: Config, samples: list[Sample]) -> Iterator[ActorOf]:
    actors: list[Actor] = []

    def make(**settings: object) -> Actor:
        actors.append(Actor(parts, config, samples, **settings))  # type: ignore[arg-type]
        return actors[-1]

    yield make
    for actor in actors:
        actor.source.close()
    assert "prefetcher" not in {thread.name for thread in threading.enumerate()}


def step_of(actor: Actor, step: int) -> tuple[str, list[str]]:
    """Run the bookkeeping of a step without its forwards: its channel, and its samples."""
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


@pytest.mark.req("STEP-02", "ASYNC-01")
@pytest.mark.parametrize("free", [True, False])
def test_every_sample_is_trained_on_once_with_answers_at_once_or_too_late(
    actor_of: ActorOf, samples: list[Sample], *, free: bool
) -> None:
    actor = actor_of(free=free)
    steps = [step_of(actor, step) for step in range(N_SAMPLES // BATCH)]
    trained = [sample_id for _, ids in steps for sample_id in ids]
    assert sorted(trained) == sorted(sample.sample_id for sample in samples)
    if not free:
        assert {channel for channel, _ in steps} == {"A"}


@pytest.mark.req("ASYNC-01")
def test_channel_a_leaves_to_channel_b_what_is_being_answered(actor_of: ActorOf) -> None:
    actor = actor_of()
    actor.begin(0)
    assert actor.servers.next_asked() == actor.ids(0)
    assert list(actor.source.samples(0, [])) == list(actor.batch(1))
    assert actor.make_ready() == 0
    assert actor.source.ready(1)
    feed = actor.feed(1)
    assert [list(pack.sample_ids) for chunk in feed.chunks for pack in chunk.packs] == [
        actor.ids(0)
    ]
    assert actor.servers.next_asked() == actor.ids(2)


@pytest.mark.req("STEP-02", "ASYNC-01")
def test_at_the_end_channel_a_takes_back_what_is_not_answered_in_time(actor_of: ActorOf) -> None:
    actor = actor_of(total=3, prefetch_target_packs=2)
    actor.begin(0)
    assert actor.make_ready() == 0
    actor.servers.next_asked()
    assert actor.servers.next_asked() == actor.ids(1)
    taken = [list(actor.source.samples(step, [])) for step in range(3)]
    assert taken == [list(actor.batch(batch)) for batch in (2, 0, 1)]
    with pytest.raises(RunError, match="no batch is left for step 4"):
        actor.source.samples(3, [])


@pytest.mark.req("ASYNC-01")
def test_no_more_is_asked_for_than_is_wanted_ready(actor_of: ActorOf) -> None:
    actor = actor_of(prefetch_target_packs=2, queue_limit=2)
    actor.begin(0)
    assert [actor.make_ready(), actor.make_ready()] == [0, 1]
    actor.begin(1)
    assert actor.counted()["ready_packs"] == 2
    assert actor.servers.asked.qsize() == 2, "two batches of a pack each"
    actor.feed(1)
    assert actor.make_ready() == 2


@pytest.mark.req("SEED-01", "ASYNC-01")
def test_a_batches_rollouts_have_the_seeds_of_the_step_of_its_number(
    actor_of: ActorOf, config: Config
) -> None:
    actor = actor_of(round_size=1)
    actor.begin(0)
    actor.servers.allow(2)
    actor.buffer.made.get(timeout=PATIENCE_S)
    base = rank_seed_base(rollout_seed_base(config.training.seed, 0), 0)
    assert actor.servers.seeds == [request_seed(base, 0, i) for i in range(BATCH)]


@pytest.mark.req("RES-23", "SEED-02", "ASYNC-01")
def test_the_seed_base_of_a_batch_is_logged_by_the_step_that_trains_on_it(
    actor_of: ActorOf, config: Config, samples: list[Sample]
) -> None:
    actor = actor_of()
    logged: list[dict[str, Any]] = []
    runner, model = actor.runner(logged.append), actor.parts.loaded.model
    actor.begin(0)
    reports = [runner.run(model, samples[:2], 0, PlainEngine())[1]]
    assert actor.make_ready() == 0
    reports.append(runner.run(model, samples[:2], 1, PlainEngine())[1])
    assert [report.channel for report in reports] == ["A", "B"], "batch 1, then batch 0"
    base = rollout_seed_base(config.training.seed, 0)
    assert [record.get("rollout_seed_base") for record in logged] == [None, base]
    assert [report.metrics.get("rollout/seed_base") for report in reports] == [None, base]
    assert actor.servers.seeds[0] == request_seed(rank_seed_base(base, 0), 0, 0)


# --- Versions ---------------------------------------------------------------------------


@pytest.mark.req("ASYNC-01", "SYNC-09")
def test_weights_are_pushed_every_so_many_steps_and_before_the_first(actor_of: ActorOf) -> None:
    actor = actor_of(free=True, sync_every_steps=3)
    for step in range(6):
        step_of(actor, step)
        assert actor.policy.version == 1 + step // 3
    assert actor.servers.pushed == [1, 2]


@pytest.mark.req("SYNC-09", "ASYNC-01")
def test_a_push_waits_for_answers_and_nobody_asks_before_it_is_over(actor_of: ActorOf) -> None:
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
    """Another thread is at, or in, the exclusive access of an actor; the event says which."""
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


@pytest.mark.req("ASYNC-01", "SYNC-09")
def test_an_evaluation_that_pushes_makes_the_next_push_due_later(actor_of: ActorOf) -> None:
    actor = actor_of(free=True, sync_every_steps=2)
    step_of(actor, 0)
    with actor.source.exclusive_access():
        actor.policy.push_if_stale()
    step_of(actor, 1)
    assert actor.policy.version == 2
    step_of(actor, 2)
    assert actor.policy.version == 2, "one update since the evaluation"
    step_of(actor, 3)
    assert actor.policy.version == 3


@pytest.mark.req("ASYNC-01", "SYNC-07")
def test_servers_that_lost_the_weights_get_them_at_the_next_step(actor_of: ActorOf) -> None:
    actor = actor_of(sync_every_steps=100)
    actor.servers.fails.append(PushNeeded("no server has the weights"))
    actor.begin(0)
    assert actor.servers.next_asked() == actor.ids(0)
    actor.servers.allow()
    while actor.servers.asked.empty():
        actor.begin(1)
    assert actor.servers.pushed == [1, 2]
    assert actor.servers.next_asked() == actor.ids(0), "asked again, of the new weights"
    assert actor.make_ready() == 0
    assert actor.feed(1).payload().metrics()["sync/weights_version"] == 2


@pytest.mark.req("ASYNC-01")
def test_a_part_of_a_batch_is_by_one_version(actor_of: ActorOf) -> None:
    """Weights are pushed between the two rounds of a batch."""
    actor = actor_of(round_size=1, sync_every_steps=100)
    actor.push_after_a_round()
    assert actor.buffer.made.get(timeout=PATIENCE_S) == 0
    made = actor.buffer.take(1)
    packs = [(part.version, [list(p.sample_ids) for p in part.packs]) for part in made.parts]
    first, second = actor.ids(0)
    assert packs == [(1, [[first]]), (2, [[second]])]
    assert made.version == 1


@pytest.mark.req("ASYNC-01", "STEP-02")
def test_a_stale_batch_is_asked_for_again(actor_of: ActorOf) -> None:
    actor = actor_of(version_window=1)
    actor.begin(0)
    assert actor.make_ready() == 0
    for step in (1, 2):
        actor.policy.mark_updated()
        actor.begin(step)
    assert actor.counted()["dropped_stale"] == 1
    assert not actor.source.ready(2)
    asked = [actor.servers.next_asked() for _ in range(2)]
    assert asked == [actor.ids(0), actor.ids(0)]


# --- Several processes ------------------------------------------------------------------


def as_ranks(work: Callable[[StorePeers], T]) -> list[T]:
    """What `work` returns as each of two processes."""
    store = HashStore()
    ranks = [StorePeers(rank, 2, lambda: store, end=lambda _: None) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, ranks))


@pytest.mark.req("ASYNC-01", "DDP-01", "STEP-02")
def test_channel_b_runs_only_where_every_process_has_a_batch(
    config: Config, samples: list[Sample]
) -> None:
    asked = threading.Barrier(2)
    of_ranks = [Parts(config), Parts(config)]

    def steps(peers: StorePeers) -> list[StepReport]:
        parts = of_ranks[peers.rank]
        actor = Actor(parts, config, samples, total=3, peers=peers)
        runner, model = actor.runner(), parts.loaded.model
        actor.begin(0)
        reports: list[StepReport] = []
        for ready_before in ([0], [1]):
            if peers.rank in ready_before:
                actor.make_ready()
            asked.wait(PATIENCE_S)
            step = len(reports)
            reports.append(runner.run(model, actor.batch(step), step, PlainEngine())[1])
        actor.source.close()
        return reports

    skipped = "stage2_ab/async/b_step_skipped_due_to_queue"
    for reports in as_ranks(steps):
        assert [report.channel for report in reports] == ["A", "B"]
        assert [report.metrics.get(skipped) for report in reports] == [1, None]


def begin_for_ever(actor: Actor) -> None:
    for step in count():
        actor.begin(step)


@pytest.mark.req("ASYNC-01", "DDP-01")
def test_what_a_prefetcher_raises_ends_the_run_in_every_process(
    parts: Parts, config: Config, samples: list[Sample]
) -> None:
    def failing(peers: StorePeers) -> str:
        actor = Actor(parts, config, samples, total=3, peers=peers)
        if peers.rank == 1:
            actor.servers.fails.append(RunError("the server refuses"))
        actor.servers.allow()
        with pytest.raises(RunError) as caught:
            begin_for_ever(actor)
        actor.source.close()
        return str(caught.value)

    told = as_ranks(failing)
    assert told == ["learner process 1 failed: the server refuses", "the server refuses"]


@pytest.mark.req("ASYNC-01", "SYNC-08")
def test_processes_at_different_versions_end_the_run(
    parts: Parts, config: Config, samples: list[Sample]
) -> None:
    def differing(peers: StorePeers) -> str:
        actor = Actor(parts, config, samples, total=3, peers=peers, free=True)
        actor.opened.version.newest = peers.rank
        with pytest.raises(RunError) as caught:
            actor.begin(4)
        actor.source.close()
        return str(caught.value)

    found = "before step 5 the processes are at the versions [0, 1]"
    assert as_ranks(differing) == [found, found]


# --- Beginning and end ------------------------------------------------------------------


@pytest.mark.req("STEP-02", "RUN-01")
def test_a_run_that_goes_on_trains_on_the_rest(actor_of: ActorOf, samples: list[Sample]) -> None:
    first, again = actor_of(free=True), actor_of(free=True)
    steps = [step_of(first, step) for step in range(3)]
    again.source.restore(first.source.state())
    steps += [step_of(again, step) for step in range(3, 6)]
    trained = [sample_id for _, ids in steps for sample_id in ids]
    assert sorted(trained) == sorted(sample.sample_id for sample in samples)


@pytest.mark.req("ASYNC-01")
@pytest.mark.parametrize("at", ["nothing", "gate", "room", "answer"])
def test_the_prefetcher_ends_with_the_run_wherever_it_waits(actor_of: ActorOf, at: str) -> None:
    """The fixture looks for it afterwards."""
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
    actor.source.close()
    assert actor.servers.closed
