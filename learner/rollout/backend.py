"""The interface between the trainer and what generates answers (ARCH-03), and its journal."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from learner.runs.declared import SYNC_PHASES
from learner.runs.metrics import Payload
from learner.types import RolloutOutput
from shared_contracts.errors import RunError
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from shared_contracts.rollout_config import ServerAddress
from shared_contracts.weights import SyncReport


class PushNeeded(RunError):
    """No backend can answer before weights are pushed again."""


@dataclass
class WeightsVersion:
    """The learner's one record of the version of the weights that answer.

    newest: of any server; pushes count on from it.
    pushed: by this run, and so expected of every answer; None before the first push.
    """

    newest: int = 0
    pushed: int | None = None

    def record(self, version: int) -> None:
        self.newest = self.pushed = version


ANSWERED = "answered"
LEARNER = "the learner"  # in the place of a server's URL, where it generates by itself


@dataclass(frozen=True)
class Call:
    """One attempt of a server call, or a batch of the learner's own (SEED-02).

    server: base URL, or `LEARNER`. first, count: of the requests among those of the rollout.
    seed: of the first request; request `first + i` has `seed + i`.
    attempt: from 1, over all servers. outcome: `answered`, or why not.
    """

    server: str
    first: int
    count: int
    seed: int | None
    attempt: int
    outcome: str


# The mode of the pushes, and why it is no longer the adapter, if it was.
SyncState = Callable[[], tuple[str | None, str | None]]


class Journal:
    """Notes of one backend, from any thread, until a step takes them.

    servers: None where the learner generates by itself: then only calls are logged.
    sync: of the pushes to them. healthy: servers that can be used now.
    """

    def __init__(
        self,
        servers: Sequence[ServerAddress] | None = (),
        sync: SyncState = lambda: (None, None),
    ) -> None:
        self.healthy = len(servers or ())
        self._servers = servers
        self._sync = sync
        self._begin()

    def _begin(self) -> None:
        self._calls: list[Call] = []
        self._pushes: list[tuple[str, bool, SyncReport]] = []
        self._lost: list[tuple[str, str]] = []
        self._splits: list[tuple[str, int, int]] = []
        self._probe_s: float | None = None

    @property
    def answered(self) -> int:
        """Requests that were answered since the last `take`."""
        return sum(call.count for call in self._calls if call.outcome == ANSWERED)

    def call(self, call: Call) -> None:
        self._calls.append(call)

    def push(self, server: str, again: bool, report: SyncReport) -> None:
        """Note a push that a server accepted. again: the server had been lost."""
        self._pushes.append((server, again, report))

    def probe(self, seconds: float) -> None:
        self._probe_s = seconds + (self._probe_s or 0.0)

    def lost(self, server: str, reason: str) -> None:
        self._lost.append((server, reason))

    def split(self, server: str, part: range) -> None:
        """Note requests that a server takes over from another one."""
        self._splits.append((server, part.start, len(part)))

    def take(self) -> tuple[dict[str, Any], Payload]:
        """Return the notes as a line of the log and as metrics, and forget them."""
        mode, fallback = self._sync()
        pushes = [
            {
                "server": server,
                "version": report.status.weights_version,
                "again": again,
                "seconds": report.seconds,
                "bytes": report.bytes,
            }
            for server, again, report in self._pushes
        ]
        record = {
            "servers": [server.model_dump() for server in self._servers or ()],
            "servers_healthy": self.healthy,
            "sync_mode": mode,
            "sync_fallback": fallback,
            "pushes": pushes,
            "lost": self._lost,
            "splits": self._splits,
            "calls": [asdict(call) for call in self._calls],
        }
        payload = Payload() if self._servers is None else self._payload(fallback is not None)
        self._begin()
        return record, payload

    def _payload(self, fell_back: bool) -> Payload:
        """Return counts, and seconds, bytes and GB/s of the slowest push (SYNC-10).

        A phase of another server version is in the log alone.
        """
        payload = Payload()
        payload.add(
            {
                "rollout/retries": sum(call.attempt > 1 for call in self._calls),
                "rollout/splits": len(self._splits),
                "rollout/servers_lost": len(self._lost),
                "sync/pushes": len(self._pushes),
                "sync/repushes": sum(again for _, again, _ in self._pushes),
            }
        )
        payload.note({"rollout/servers_healthy": self.healthy, "sync/fell_back": fell_back})
        if self._probe_s is not None:
            payload.note({"sync/probe_s": self._probe_s})
        if self._pushes:
            slowest = max((each for _, _, each in self._pushes), key=lambda r: r.seconds["total"])
            seconds = slowest.seconds
            payload.note(
                {f"sync/{name}_s": seconds[name] for name in SYNC_PHASES if name in seconds}
            )
            payload.note({"sync/bytes": slowest.bytes})
            payload.rate({"sync/gb_per_s": (slowest.bytes / 1e9, seconds["transfer"])})
        return payload


class RolloutBackend(ABC):
    """Generates rollouts with the newest pushed weights.

    repeat_terminate_active: it ends answers that repeat themselves.
    streams: it generates while the learner trains (STEP-03).
    round_size: requests of one round of asynchronous rollouts; None: it has no such rounds.
    """

    repeat_terminate_active = False
    streams = False

    def __init__(self, journal: Journal | None = None) -> None:
        self.version = WeightsVersion()
        self.journal = journal or Journal()

    @property
    def round_size(self) -> int | None:
        return None

    @abstractmethod
    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        """Return outputs in the order of the requests; request i is sampled with `seed + i`."""

    @abstractmethod
    def push_weights(self, version: int) -> None:
        """Make `version` the weights of every later rollout."""

    @abstractmethod
    def close(self) -> None:
        """Release connections; idempotent."""

    def stream(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> Generator[list[RolloutOutput], None, None]:
        """Yield what `rollout` returns, in consecutive parts: one part unless it `streams`."""
        yield self.rollout(requests, request_config)

    def rollout_asynchronous(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        """Do the same while the training weights change: push nothing. Raises PushNeeded."""
        return self.rollout(requests, request_config)

    def repush_restarted(self) -> None:  # noqa: B027 - only servers can restart
        """Push again to restarted servers, while the training weights are those of the last push.

        Called repeatedly while other processes are waited for.
        """

    def serving(self) -> AbstractContextManager[None]:
        """Return the block in which a backend that shares a GPU with the learner has it."""
        return nullcontext()
