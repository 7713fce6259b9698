"""What a step does ahead: prompts are encoded, and the next chunk is asked for.

With the scenarios of what happens within one optimizer step (seed 001).
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch.nn import Module

from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.models.packs import Pack, Segment
from learner.models.prompts import PromptEncoder
from learner.objectives.logit_stats import ForwardStats, Reader
from learner.rollout.distribution import request_seed, rollout_seed_base
from learner.rollout.policy import Policy, request_settings
from learner.runs.metrics import PhaseClock, StepReport
from learner.training.channels import ChannelB, Encoding, Recipe
from learner.training.step import StepRunner
from learner.training.synchronous_rollouts import RolloutSource
from learner.training.train import order_of
from learner.training.trainer import BatchLoader
from learner.types import AssessedRollout, Place, Sample
from shared_contracts.errors import RunError
from tests.unit.fleets import wait_until
from tests.unit.plain_accelerator import PlainAccelerator
from tests.unit.small_run import ConfigOf, small_config
from tests.unit.streams import InChunks
from tests.unit.test_step import Parts, Scripted
from tests.unit.watched_processor import WatchedProcessor

pytestmark = pytest.mark.req("STEP-03", "FULL-08")

B_ALONE = {"schedule": {"b_ratio": 1.0}}
CHUNK, CHUNKS = 2, 4
WAIT_S = 60.0


@pytest.fixture(scope="module")
def config(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path_factory: pytest.TempPathFactory
) -> Config:
    out, training = tmp_path_factory.mktemp("feeding"), {"packing": False}
    return small_config(toy_checkpoint, toy_data, out, training=training, stage2_ab=B_ALONE)


@pytest.fixture(scope="module")
def parts(config: Config) -> Parts:
    return Parts(config)


@pytest.fixture(scope="module")
def samples(scenes: list[Sample]) -> list[Sample]:
    return scenes[: CHUNK * CHUNKS]


def encoding(parts: Parts, config: Config, watched: WatchedProcessor) -> Encoding:
    prompt = PromptEncoder(watched, config.template.prompt, None)
    return Encoding(parts.loaded.inner, prompt, parts.loaded.tokenizer, "desc_first")


class Assessing(ChannelB):
    """Calls `before` with the number of the chunk to assess, and `at_forward` before a forward."""

    def __init__(self, encoding: Encoding, config: Config) -> None:
        super().__init__(encoding, config)
        self.before: Callable[[int], object] = lambda chunk: None
        self.at_forward: Callable[[], object] = lambda: None
        self.chunks = 0

    def segments(self, *given: Any, **named: Any) -> tuple[list[Segment], list[AssessedRollout]]:
        self.chunks += 1
        self.before(self.chunks - 1)
        return super().segments(*given, **named)

    def forward_stats(self, model: Module, pack: Pack, reader: Reader) -> ForwardStats:
        self.at_forward()
        return super().forward_stats(model, pack, reader)


class Feeding:
    """Channel B's packs of one step, chunk by chunk. assessed: its answers, as logged.

    round_size: of asynchronous rollouts, and as many as a chunk; None without overlap.
    """

    def __init__(
        self,
        parts: Parts,
        config: Config,
        samples: Sequence[Sample],
        round_size: int | None = CHUNK,
    ) -> None:
        self.samples = samples
        self.watched = WatchedProcessor(parts.loaded.processor)
        self.servers = Scripted(samples, parts)
        self.channel_b = Assessing(encoding(parts, config, self.watched), config)
        backend = self.servers if round_size is None else InChunks(self.servers, round_size)
        self.policy = Policy(backend, request_settings(config))
        self.config = config
        self.assessed: Sequence[AssessedRollout] = ()

    def chunks(self, step: int = 0) -> Iterator[list[str]]:
        source = RolloutSource(self.config, self.policy, self.channel_b, 0, self.log)
        with source.feed(step, self.samples, PhaseClock()) as feed:
            for packs, _ in feed.chunks:
                yield [pack.sample_ids[0] for pack in packs]

    def step(self, parts: Parts, config: Config) -> StepReport:
        recipe = Recipe(config, parts.channel_a, self.channel_b, parts.pipeline)
        runner = StepRunner(config, recipe, self.policy)
        return runner.run(parts.loaded.model, self.samples, 0, PlainAccelerator())[1]

    def log(self, _: int, assessed: Sequence[AssessedRollout], __: Sequence[Place]) -> None:
        self.assessed = assessed

    def ids(self, chunk: int) -> list[str]:
        part = self.samples[chunk * CHUNK : (chunk + 1) * CHUNK]
        return [sample.sample_id for sample in part]


FeedingOf = Callable[..., Feeding]


@pytest.fixture
def feeding_of(parts: Parts, config: Config, samples: list[Sample]) -> Iterator[FeedingOf]:
    """Fails where a thread is left, other than those of a prompt encoder."""
    before = set(threading.enumerate())
    yield lambda **settings: Feeding(parts, config, samples, **settings)
    wait_until(
        lambda: all(each.name.startswith("encoder") for each in {*threading.enumerate()} - before)
    )


@pytest.mark.parametrize("round_size", [None, CHUNK])
def test_the_prompts_of_a_step_are_encoded_while_its_first_answers_are_made(
    feeding_of: FeedingOf, round_size: int | None
) -> None:
    feeding = feeding_of(round_size=round_size)
    feeding.servers.meanwhile = lambda _: feeding.watched.wait_for(CHUNK * CHUNKS)
    assert sum(map(len, feeding.chunks())) == CHUNK * CHUNKS
    assert feeding.watched.begun == CHUNK * CHUNKS


@pytest.mark.req("PACK-05", "MET-03")
def test_a_pack_holds_answers_of_several_chunks_and_the_log_has_the_chunk_of_each(
    parts: Parts, samples: list[Sample], config_of: ConfigOf
) -> None:
    feeding = Feeding(parts, config_of(stage2_ab=B_ALONE, global_max_length=12000), samples)
    assert [len(packs) for packs in feeding.chunks()] == [0] * (CHUNKS - 1) + [1]
    assert [each.chunk for each in feeding.assessed] == [i // CHUNK for i in range(len(samples))]


@pytest.mark.req("DDP-01")
@pytest.mark.parametrize("stage", ["answers", "assessment"])
def test_an_error_is_raised_after_the_chunks_before_it(feeding_of: FeedingOf, stage: str) -> None:
    feeding = feeding_of()

    def fail(chunk: int) -> None:
        if chunk == 2:
            raise RunError("the third chunk fails")

    if stage == "answers":
        feeding.servers.meanwhile = lambda calls: fail(calls - 1)
    else:
        feeding.channel_b.before = fail
    chunks = feeding.chunks()
    assert [next(chunks), next(chunks)] == [feeding.ids(0), feeding.ids(1)]
    with pytest.raises(RunError, match="the third chunk fails"):
        next(chunks)


@pytest.mark.parametrize("held", ["answers", "assessment", "nothing"])
def test_a_step_that_fails_leaves_no_thread_behind(feeding_of: FeedingOf, held: str) -> None:
    feeding, over = feeding_of(), threading.Event()
    if held == "answers":
        feeding.servers.meanwhile = lambda calls: calls < 2 or over.wait(WAIT_S)
    elif held == "assessment":
        feeding.channel_b.before = lambda chunk: chunk < 1 or over.wait(WAIT_S)
    with pytest.raises(ZeroDivisionError) if held != "nothing" else nullcontext():
        for _ in feeding.chunks():
            if held != "nothing":
                raise ZeroDivisionError
    over.set()
    wait_until(lambda: all(each.name != "rollouts ahead" for each in threading.enumerate()))
    assert held != "answers" or len(feeding.servers.seeds) == 2, "nothing more is requested"


def test_rollout_and_learner_overlap_within_a_step(
    parts: Parts, config: Config, scenes: list[Sample]
) -> None:
    """While a chunk is learned, two are packed, one is answered, one more is asked for; no more."""
    chunks = 7
    feeding = Feeding(parts, config, scenes[: CHUNK * chunks])
    asked_at_forwards: list[int] = []

    def wait_for_the_next_chunks() -> None:
        chunk = len(asked_at_forwards) // CHUNK
        wait_until(lambda: len(feeding.servers.seeds) >= min(chunk + 5, chunks))
        asked_at_forwards.append(len(feeding.servers.seeds))

    feeding.channel_b.at_forward = wait_for_the_next_chunks
    report = feeding.step(parts, config)
    base = rollout_seed_base(config.training.seed, 0)
    assert feeding.servers.seeds == [request_seed(base, 0, i * CHUNK) for i in range(chunks)]
    assert asked_at_forwards == [5, 5, 6, 6] + [7] * 10
    assert report.metrics["packing/post_rollout_packs"] == CHUNK * chunks


@pytest.mark.req("STEP-02", "CFG-07")
def test_channel_b_executes_only_on_the_final_micro_step_under_grad_accumulation(
    parts: Parts, scenes: list[Sample], config_of: ConfigOf
) -> None:
    """Nothing runs before all 8 micro batches of a rank are there: it gets them as one."""
    budget = {
        "effective_batch_size": 16,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "max_steps": 1,
        "save_steps": 1,
    }
    config = config_of(training=budget, stage2_ab=B_ALONE)
    assert config.training.resolve_accumulation(world_size=2) == 8
    (share,) = BatchLoader(scenes, order_of(config, len(scenes), processes=2), rank=1)
    feeding = Feeding(parts, config, share, round_size=None)
    feeding.step(parts, config)
    assert (len(feeding.servers.seeds), len(feeding.servers.requests)) == (1, 8)
