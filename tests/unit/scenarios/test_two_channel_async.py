"""Scenarios of asynchronous rollouts (seed 001)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.training.step import PlainEngine
from shared_contracts.errors import RunError
from tests.unit.async_parts import PATIENCE_S, Actor, ActorOf
from tests.unit.small_run import small_config
from tests.unit.test_step import Parts

pytestmark = pytest.mark.usefixtures("one_thread")

ASYNC = "stage2_ab/async"


@pytest.fixture(scope="module")
def config(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path_factory: pytest.TempPathFactory
) -> Config:
    """Every step wants channel B. A pack of channel B holds all answers of a batch."""
    ratio = {"schedule": {"b_ratio": 1.0}}
    out = tmp_path_factory.mktemp("async")
    return small_config(toy_checkpoint, toy_data, out, stage2_ab=ratio)


@pytest.fixture(scope="module")
def parts(config: Config) -> Parts:
    return Parts(config)


@pytest.fixture
def actor_of(parts: Parts, config: Config, toy_data: ToyData) -> Iterator[ActorOf]:
    samples = read_samples(toy_data.train_jsonl, allow_poly=False)[:12]
    actors: list[Actor] = []

    def make(**settings: object) -> Actor:
        actors.append(Actor(parts, config, samples, **settings))  # type: ignore[arg-type]
        return actors[-1]

    yield make
    for actor in actors:
        actor.source.close()


@pytest.mark.req("ASYNC-01", "STEP-01")
def test_async_b_step_is_skipped_when_queues_are_empty(actor_of: ActorOf) -> None:
    actor = actor_of()
    runner, model = actor.runner(), actor.parts.loaded.model
    _, skipped = runner.run(model, actor.batch(0), 0, PlainEngine())
    assert skipped.channel == "A"
    assert skipped.metrics["step/channel_b"] == 0
    assert skipped.metrics[f"{ASYNC}/b_step_skipped_due_to_queue"] == 1
    assert skipped.metrics[f"{ASYNC}/ready_packs"] == 0
    actor.make_ready()
    _, trained = runner.run(model, actor.batch(1), 1, PlainEngine())
    assert trained.channel == "B"
    assert f"{ASYNC}/b_step_skipped_due_to_queue" not in trained.metrics
    assert trained.metrics[f"{ASYNC}/ready_packs"] == 1
    assert trained.metrics[f"{ASYNC}/version_lag"] == 1, "pushed before each of the two steps"
    assert trained.metrics["sync/weights_version"] == 1


@pytest.mark.req("ASYNC-01")
def test_stale_packs_are_dropped_under_a_tight_version_window(actor_of: ActorOf) -> None:
    actor = actor_of(version_window=1)
    runner, model = actor.runner(), actor.parts.loaded.model
    actor.begin(0)
    assert actor.make_ready() == 0
    for step in (0, 1):
        actor.policy.mark_updated()
        actor.begin(step)
    assert actor.policy.version == 3, "one more than the window lets the pack of version 1 live"
    _, report = runner.run(model, actor.batch(2), 2, PlainEngine())
    assert report.metrics[f"{ASYNC}/dropped_stale"] == 1
    assert report.channel == "A", "the stale pack was all there was"


@pytest.mark.req("ASYNC-01")
def test_ready_packs_are_version_pure(actor_of: ActorOf) -> None:
    """Of the first sample a segment is left over, as its pack is not full, when weights change."""
    actor = actor_of(round_size=1, sync_every_steps=100)
    actor.push_after_a_round()
    assert actor.policy.version == 2
    assert actor.buffer.made.get(timeout=PATIENCE_S) == 0
    feed = actor.feed(1)
    packs = [list(pack.sample_ids) for chunk in feed.chunks for pack in chunk.packs]
    first, second = actor.ids(0)
    assert packs == [[first], [second]], "either would have fitted into the pack of the other"


@pytest.mark.req("ASYNC-01")
def test_async_queue_invariant_violation_raises_actionable_error(actor_of: ActorOf) -> None:
    """A scheduled channel-B step without what every process said it had."""
    actor = actor_of(version_window=2)
    actor.begin(0)
    with pytest.raises(RunError) as caught:
        actor.feed(7)
    told = str(caught.value)
    assert "channel B was to run step 8, and no batch is ready" in told
    assert "the queue holds nothing; newest version 1, version_window 2, queue_limit 8" in told
