"""What a test of asynchronous rollouts needs to decide the order of events itself."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Queue
from typing import Any

from learner.config.rollout_matching import AsyncRolloutConfig
from learner.config.schema import Config
from learner.distributed.peers import SINGLE_PROCESS, Peers
from learner.rollout.backend import PushNeeded
from learner.rollout.policy import OpenBackend, Policy, asking_of
from learner.runs.metrics import PhaseClock
from learner.training.asynchronous_rollouts import AsyncSource, MadeBatch
from learner.training.rollout_buffer import RolloutBuffer
from learner.training.step import StepRunner
from learner.training.synchronous_rollouts import Packer, PackFeed
from learner.types import RolloutOutput, Sample
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from tests.unit.answers import encode
from tests.unit.small_run import rollout, written
from tests.unit.test_step import Parts

PATIENCE_S = 60.0
BATCH = 2


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


class WatchedBuffer(RolloutBuffer[MadeBatch]):
    """made: the number of each batch that is put, once it is."""

    def __init__(self, keys: AsyncRolloutConfig, total: int) -> None:
        super().__init__(keys.queue_limit, keys.version_window, keys.prefetch_target_packs, total)
        self.made: Queue[int] = Queue()

    def put(self, ready: MadeBatch) -> None:
        super().put(ready)
        self.made.put(ready.batch)


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
        peers: Peers = SINGLE_PROCESS,
        round_size: int | None = None,
        free: bool = False,
        **settings: Any,
    ) -> None:
        self.parts, self.config, self.peers = parts, config, peers
        self.samples = samples
        self.servers = Servers(samples, parts, free=free)
        self.opened = OpenBackend(self.servers, round_size=round_size)
        self.policy = Policy(self.opened, asking_of(config))
        keys = AsyncRolloutConfig(enabled=True, **{"prefetch_target_packs": 1, **settings})
        self.buffer = WatchedBuffer(keys, total)
        self.source = AsyncSource(
            keys,
            self.policy,
            parts.channel_b,
            Packer(config.training, config.global_max_length),
            self.batch,
            total,
            config.training.seed,
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
        """Let the batch that is being asked for become ready; returns its number."""
        self.servers.allow()
        return self.buffer.made.get(timeout=PATIENCE_S)

    def push_after_a_round(self) -> None:
        """Begin: the first round of a batch is answered, the second one only after a push."""
        self.begin(0)
        self.servers.next_asked()
        self.servers.allow()
        self.servers.next_asked()
        self.servers.fails.append(PushNeeded("no server has the weights"))
        self.servers.allow()
        while self.servers.asked.empty():
            self.begin(1)
        self.servers.allow()

    def counted(self) -> dict[str, float]:
        """What was counted since the last time, without the prefix of its keys."""
        metrics = self.source.payload().metrics()
        return {key.rpartition("/")[2]: value for key, value in metrics.items()}


ActorOf = Callable[..., Actor]
