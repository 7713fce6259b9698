"""What a test of asynchronous rollouts needs to decide the order of events itself."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Queue
from typing import Any

from learner.async_rollout.prefetcher import MadeShare
from learner.async_rollout.queue import ReadyQueue
from learner.async_rollout.source import AsyncSource
from learner.channels.b import ChannelB
from learner.config.rollout_matching import AsyncRolloutConfig
from learner.config.schema import Config
from learner.metrics import PhaseClock
from learner.packer import Packer
from learner.peers import ALONE, Peers
from learner.rollout.policy import OpenBackend, Policy, asking_of
from learner.step import StepRunner
from learner.types import RolloutOutput, Sample
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from tests.unit.answers import encode
from tests.unit.small_run import rollout, written
from tests.unit.test_step import Parts

PATIENCE_S = 10.0
SHARE = 2


class Servers:
    """A backend whose every answer waits until the test allows it.

    asked: sample ids of each call, as it begins. seeds: of the first request of each call.
    fails: raised in place of the next answers, one by one.
    """

    def __init__(self, samples: Sequence[Sample], parts: Parts, *, free: bool = False) -> None:
        self.asked: Queue[list[str]] = Queue()
        self.seeds: list[int | None] = []
        self.pushed: list[int] = []
        self.fails: list[Exception] = []
        self.closed = False
        self._samples = {sample.sample_id: sample for sample in samples}
        self._parts = parts
        self._allowed = threading.Semaphore(10**6 if free else 0)
        self._busy = threading.Lock()

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        with self._busy:
            self.seeds.append(request_config.seed)
            self.asked.put([str(request.uuid) for request in requests])
            assert self._allowed.acquire(timeout=PATIENCE_S)
            if self.fails:
                raise self.fails.pop(0)
            return [self._answer(str(request.uuid)) for request in requests]

    def push_weights(self, version: int) -> None:
        assert self._busy.acquire(blocking=False), "nobody asks while weights are pushed"
        self.pushed.append(version)
        self._busy.release()

    def close(self) -> None:
        self.closed = True
        self.allow(100)

    def allow(self, calls: int = 1) -> None:
        self._allowed.release(calls)

    def next_asked(self) -> list[str]:
        return self.asked.get(timeout=PATIENCE_S)

    def _answer(self, sample_id: str) -> RolloutOutput:
        sample = self._samples[sample_id]
        ids = encode(self._parts.loaded.tokenizer, written(*sample.objects[:1]))
        output = rollout(self._parts.encode(sample).ids.tolist(), ids)
        return replace(output, weights_version=(self.pushed[-1], self.pushed[-1]))


class ToldQueue(ReadyQueue[MadeShare]):
    """made: the number of each share that is ready, once it is."""

    def __init__(self, settings: AsyncRolloutConfig) -> None:
        super().__init__(settings.queue_limit, settings.version_window)
        self.made: Queue[int] = Queue()

    def put(self, ready: MadeShare) -> list[MadeShare]:
        dropped = super().put(ready)
        self.made.put(ready.share)
        return dropped


class Actor:
    """The asynchronous source of one process over scripted servers.

    settings: of `async_rollout`. free: the servers answer at once.
    """

    def __init__(
        self,
        parts: Parts,
        config: Config,
        samples: Sequence[Sample],
        *,
        total: int = 6,
        peers: Peers = ALONE,
        channel_b: ChannelB | None = None,
        round_size: int | None = None,
        free: bool = False,
        **settings: Any,
    ) -> None:
        self.parts, self.config, self.peers = parts, config, peers
        self.samples = samples
        self.servers = Servers(samples, parts, free=free)
        self.policy = Policy(OpenBackend(self.servers, round_size=round_size), asking_of(config))
        keys = AsyncRolloutConfig(enabled=True, **{"prefetch_target_packs": 1, **settings})
        self.queue = ToldQueue(keys)
        self.source = AsyncSource(
            keys,
            self.policy,
            channel_b or parts.channel_b,
            Packer(config.training, config.global_max_length),
            self.share,
            total,
            config.training.seed,
            peers,
            queue=self.queue,
        )

    def share(self, share: int) -> Sequence[Sample]:
        first = SHARE * (self.peers.count * share + self.peers.rank)
        return self.samples[first : first + SHARE]

    def ids(self, share: int) -> list[str]:
        return [sample.sample_id for sample in self.share(share)]

    def runner(self) -> StepRunner:
        return StepRunner(
            self.config,
            self.parts.channel_a,
            self.parts.channel_b,
            self.parts.pipeline,
            self.policy,
            peers=self.peers,
            source=self.source,
        )

    def begin(self, step: int) -> None:
        self.source.begin(step, PhaseClock())

    def make_ready(self) -> int:
        """Let the share that is being asked for become ready; returns its number."""
        self.servers.allow()
        return self.queue.made.get(timeout=PATIENCE_S)

    def counted(self) -> dict[str, float]:
        """What was counted since the last time, without the prefix of its keys."""
        metrics = self.source.payload().metrics()
        return {key.rpartition("/")[2]: value for key, value in metrics.items()}


class Held(ChannelB):
    """Waits, with every answer it gets, until the test lets it go on."""

    def __init__(self, channel: ChannelB) -> None:
        self.__dict__.update(channel.__dict__)
        self.reached: Queue[None] = Queue()
        self.go_on = threading.Semaphore(0)

    def segments(self, *given: Any, **named: Any) -> Any:
        self.reached.put(None)
        assert self.go_on.acquire(timeout=PATIENCE_S)
        return super().segments(*given, **named)


ActorOf = Callable[..., Actor]
