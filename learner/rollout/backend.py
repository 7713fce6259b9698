"""The interface between the trainer and what generates answers (ARCH-03), and its journal.

backend  -> call(), push(), lost(), split()     while it happens, from any thread
step     -> take()                              after the rollouts; the next page is empty
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from learner.runs.declared import SYNC_PHASES
from learner.runs.metrics import Payload
from learner.types import RolloutOutput
from shared_contracts.errors import RunError
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from shared_contracts.rollout_config import ServerAddress
from shared_contracts.weights import CommunicatorReady, SyncReport


class PushNeeded(RunError):
    """No backend can answer before weights are pushed again."""


@dataclass
class WeightsVersion:
    """The version of the weights that answer: the learner's one record of it.

    newest: of any server; pushes count on from it.
    pushed: by this run, and so expected of every answer; None before the first push.
    """

    newest: int = 0
    pushed: int | None = None

    def record(self, version: int) -> None:
        """Note that a push of `version` has succeeded."""
        self.newest = self.pushed = version


class WeightChannel(Protocol):
    """Puts the training weights into one server, as `WeightPusher` does."""

    def connect(self) -> CommunicatorReady: ...
    def push(self, version: int) -> SyncReport: ...
    def abandon(self) -> None: ...
    def close(self) -> None: ...


class SyncState(Protocol):
    """mode: what is pushed now. fallback: why that is no longer the adapter, if it was."""

    @property
    def mode(self) -> str: ...
    @property
    def fallback(self) -> str | None: ...


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


@dataclass
class _Page:
    """The notes since the last page.

    pushes: (server, whether it had been lost, report), each push that a server accepted.
    lost: (server, reason), each time a server was lost.
    splits: (server, first request, count) of requests taken over from another server.
    probe_s: seconds of a proof of effect, if there was one.
    """

    calls: list[Call] = field(default_factory=list)
    pushes: list[tuple[str, bool, SyncReport]] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)
    splits: list[tuple[str, int, int]] = field(default_factory=list)
    probe_s: float | None = None

    def record(self) -> dict[str, Any]:
        """Return it as a line of the log."""
        pushes = [
            {
                "server": server,
                "version": report.status.weights_version,
                "again": again,
                "seconds": report.seconds,
                "bytes": report.bytes,
            }
            for server, again, report in self.pushes
        ]
        calls = [asdict(call) for call in self.calls]
        return {"pushes": pushes, "lost": self.lost, "splits": self.splits, "calls": calls}

    def payload(self) -> Payload:
        """Return counts, and seconds, bytes and GB/s of the slowest push (SYNC-10).

        A phase of another server version is in the log alone.
        """
        payload = Payload()
        payload.add(
            {
                "rollout/retries": sum(call.attempt > 1 for call in self.calls),
                "rollout/splits": len(self.splits),
                "rollout/servers_lost": len(self.lost),
                "sync/pushes": len(self.pushes),
                "sync/repushes": sum(again for _, again, _ in self.pushes),
            }
        )
        if self.probe_s is not None:
            payload.note({"sync/probe_s": self.probe_s})
        if self.pushes:
            slowest = max(
                (r for _, _, r in self.pushes), key=lambda report: report.seconds["total"]
            )
            seconds = slowest.seconds
            payload.note(
                {f"sync/{name}_s": seconds[name] for name in SYNC_PHASES if name in seconds}
            )
            payload.note({"sync/bytes": slowest.bytes})
            payload.rate({"sync/gb_per_s": (slowest.bytes / 1e9, seconds["transfer"])})
        return payload


class Journal:
    """Notes of one backend, page by page; calls of several threads may come at once.

    servers: with their group ports; None where the learner generates by itself: then there
        are calls to log, and nothing of servers to count.
    sync: how weights are pushed to them.
    healthy: servers that can be used now.
    """

    def __init__(
        self, servers: Sequence[ServerAddress] | None = (), sync: SyncState | None = None
    ) -> None:
        self.healthy = len(servers or ())
        self._servers = servers
        self._sync = sync
        self._page = _Page()

    @property
    def answered(self) -> int:
        """Requests that were answered since the last page."""
        return sum(call.count for call in self._page.calls if call.outcome == ANSWERED)

    def call(self, call: Call) -> None:
        self._page.calls.append(call)

    def push(self, server: str, again: bool, report: SyncReport) -> None:
        """Note a push that a server accepted. again: the server had been lost."""
        self._page.pushes.append((server, again, report))

    def probe(self, seconds: float) -> None:
        self._page.probe_s = seconds + (self._page.probe_s or 0.0)

    def lost(self, server: str, reason: str) -> None:
        self._page.lost.append((server, reason))

    def split(self, server: str, part: range) -> None:
        self._page.splits.append((server, part.start, len(part)))

    def take(self) -> tuple[dict[str, Any], Payload]:
        """Return the page as a line of the log and as metrics, and begin an empty one."""
        page, self._page = self._page, _Page()
        fallback = None if self._sync is None else self._sync.fallback
        record = {
            "servers": [server.model_dump() for server in self._servers or ()],
            "servers_healthy": self.healthy,
            "sync_mode": None if self._sync is None else self._sync.mode,
            "sync_fallback": fallback,
            **page.record(),
        }
        if self._servers is None:
            return record, Payload()
        payload = page.payload()
        payload.note(
            {"rollout/servers_healthy": self.healthy, "sync/fell_back": fallback is not None}
        )
        return record, payload


class RolloutBackend(ABC):
    """Generates rollouts with the newest pushed weights.

    version: of the weights that answer. journal: notes of its calls and pushes.
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
        """Do the same as `rollout` while the training weights change: push nothing.

        Raises PushNeeded.
        """
        return self.rollout(requests, request_config)

    def repush_restarted(self) -> None:  # noqa: B027 - only servers can restart
        """Push again to restarted servers, while the training weights are those of the last push.

        Called repeatedly while other processes are waited for.
        """

    def serving(self) -> AbstractContextManager[None]:
        """Return the block in which a backend that shares a GPU with the learner has it."""
        return nullcontext()
