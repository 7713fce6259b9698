"""Run folders with logged steps of channel B, made by what makes them in training, in seconds.

Answers are scripted, and nothing is forwarded: packs, log and counts are those of the run.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from transformers import TrainerControl, TrainerState

from learner.config.schema import Config
from learner.distributed.peers import Peers
from learner.models.load import LoadedModel
from learner.models.prompts import PromptEncoder
from learner.rollout.backend import RolloutBackend
from learner.rollout.policy import Policy, request_settings
from learner.runs.metrics import Payload, PhaseClock
from learner.runs.rollout_log import RolloutLog
from learner.training.asynchronous_rollouts import AsyncSource
from learner.training.channels import ChannelB, Encoding
from learner.training.run_log import CallLog, JsonlLog, open_run_folder
from learner.training.synchronous_rollouts import SynchronousRollouts
from learner.types import GroundTruthObject, RolloutOutput, Sample, Shape
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from tests.unit.answers import encode
from tests.unit.small_run import rollout, written
from tests.unit.streams import InChunks

SHARE = 7


class Answers(RolloutBackend):
    """Answers in turn: right, half, next to it, garbage, cut off, with a part that is dropped."""

    def __init__(self, samples: Sequence[Sample], loaded: LoadedModel, prompt: PromptEncoder):
        super().__init__()
        self._samples = {sample.sample_id: sample for sample in samples}
        self._tokenizer = loaded.tokenizer
        self._prompt = prompt
        self._turn = count()
        self._pushed = 1

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        return [self._answer(self._samples[str(request.uuid)]) for request in requests]

    def push_weights(self, version: int) -> None:
        self._pushed = version

    def close(self) -> None:
        return

    def _answer(self, sample: Sample) -> RolloutOutput:
        objects = sample.objects
        right = encode(self._tokenizer, written(*objects))
        answers = [
            right,
            encode(self._tokenizer, written(*objects[:1])),
            encode(self._tokenizer, written(*map(moved, objects))),
            encode(self._tokenizer, "garbage"),
            right[: 2 * len(right) // 3],
            encode(self._tokenizer, re.sub(r'"desc": "[^"]*", ', "", written(*objects), count=1)),
            encode(self._tokenizer, written(*objects, *objects)),
        ]
        ids = answers[next(self._turn) % len(answers)]
        output = rollout(self._prompt(sample).ids.tolist(), ids)
        return replace(output, weights_version=(self._pushed, self._pushed), seed=5)


def moved(item: GroundTruthObject) -> GroundTruthObject:
    """A little to the right and down."""
    coords = tuple(min(999, value + 17) for value in item.shape.coords)
    return GroundTruthObject(item.desc, Shape(item.shape.kind, coords))


class Pushing(Policy):
    """New weights are pushed after every second round."""

    def __init__(self, policy: Policy) -> None:
        self.__dict__.update(policy.__dict__)
        self._rounds = count(1)

    def answer_by_pushed(self, samples: Sequence[Sample], seed: int) -> list[RolloutOutput]:
        answered = super().answer_by_pushed(samples, seed)
        if next(self._rounds) % 2 == 0:
            self.push()
        return answered


@dataclass
class RunMaker:
    """Makes run folders with one loaded model. samples: of all steps, which take turns."""

    loaded: LoadedModel
    samples: Sequence[Sample]

    def make(self, config: Config, *, chunk: int | None, ranks: int, steps: Sequence[int]) -> Path:
        """A folder as a run of `config` leaves it, whose other steps were of channel A.

        chunk: requests of one call; None for all of a step.
        """
        with open_run_folder(config, None) as folder:
            loaded = self.loaded
        prompt = PromptEncoder(loaded.processor, config.template.prompt, None)
        order = config.custom.object_field_order
        channel = ChannelB(Encoding(loaded.inner, prompt, loaded.tokenizer, order), config)
        backends = [Answers(self.samples, loaded, prompt) for _ in range(ranks)]
        policies = [
            Policy(each if chunk is None else InChunks(each, chunk), request_settings(config))
            for each in backends
        ]
        for step in range(1, max(steps) + 1):
            metrics = {"step/channel_b": 0.0}
            if step in steps:
                payload = Payload()
                for rank, policy in enumerate(policies):
                    first = step + rank * SHARE
                    own = [self.samples[(first + i) % len(self.samples)] for i in range(SHARE)]
                    payload.merge(_run_step(folder, config, policy, channel, step, rank, own))
                metrics = {"step/channel_b": 1.0, **payload.metrics()}
            state, control = TrainerState(global_step=step), TrainerControl()
            JsonlLog(folder).on_log(None, state, control, logs=metrics)
        return folder


def _run_step(
    folder: Path,
    config: Config,
    policy: Policy,
    channel: ChannelB,
    step: int,
    rank: int,
    own: list[Sample],
) -> Payload:
    log = RolloutLog(folder, rank)
    CallLog(folder, rank).write({"step": step})
    if not config.rollout_matching.async_rollout.enabled:
        source = SynchronousRollouts(config, policy, channel, rank, log.write)
        with source.feed(step - 1, own, PhaseClock()) as feed:
            assert list(feed.chunks)[-1].last
        policy.mark_updated()
        return feed.payload()
    process = Peers()
    process.rank = rank
    prefetching = AsyncSource(
        config, Pushing(policy), channel, lambda _: own, step, process, log.write
    )
    with prefetching.exclusive_access():
        policy.push()
    feed = prefetching.make(step - 1).feed
    log.write(step, feed.assessed, feed.places)
    return feed.payload()
