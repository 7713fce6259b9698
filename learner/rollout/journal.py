"""What happened between the learner and its servers, for the log and the metrics.

backend  -> call(), push(), lost(), split()     while it happens, from any thread
step     -> take()                              after the rollouts; the next page is empty
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from learner.metrics import Payload
from learner.metrics.declared import SYNC_PHASES
from shared_contracts.rollout_config import ServerAddress
from shared_contracts.weights import SyncReport

LEARNER = "the learner"  # in the place of a server's URL, where it generates by itself


class SyncState(Protocol):
    """mode: what is pushed now. fallback: why that is no longer the adapter, if it was."""

    @property
    def mode(self) -> str: ...
    @property
    def fallback(self) -> str | None: ...


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


@dataclass(frozen=True)
class Push:
    """A push that a server has taken; `again`: to take it back after it was lost."""

    server: str
    again: bool
    report: SyncReport

    @property
    def seconds(self) -> float:
        return self.report.seconds["total"]

    def record(self) -> dict[str, Any]:
        return {
            "server": self.server,
            "version": self.report.status.weights_version,
            "again": self.again,
            "seconds": self.report.seconds,
            "bytes": self.report.bytes,
            "verified": self.report.verified,
        }


@dataclass
class Page:
    """What was noted since the last page.

    lost: (server, reason) each time one could not be asked any more.
    splits: (server, first request, count) of what it took over from another one.
    """

    calls: list[Call] = field(default_factory=list)
    pushes: list[Push] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)
    splits: list[tuple[str, int, int]] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """As a line of the log."""
        return {
            "pushes": [push.record() for push in self.pushes],
            "lost": self.lost,
            "splits": self.splits,
            "calls": [asdict(call) for call in self.calls],
        }

    def payload(self) -> Payload:
        """Counts of the page; seconds, bytes and GB/s of its slowest push, if there was one."""
        payload = Payload()
        payload.add(
            {
                "rollout/retries": sum(call.attempt > 1 for call in self.calls),
                "rollout/splits": len(self.splits),
                "rollout/servers_lost": len(self.lost),
                "sync/pushes": len(self.pushes),
                "sync/repushes": sum(push.again for push in self.pushes),
            }
        )
        if self.pushes:
            slowest = max(self.pushes, key=lambda push: push.seconds)
            payload.merge(_push_payload(slowest.report))
        return payload


def _push_payload(report: SyncReport) -> Payload:
    """SYNC-10. A phase that only a server of another version knows is in the log alone."""
    seconds = report.seconds
    payload = Payload()
    payload.note({f"sync/{phase}_s": seconds[phase] for phase in SYNC_PHASES if phase in seconds})
    payload.note({"sync/bytes": report.bytes})
    payload.rate({"sync/gb_per_s": (report.bytes / 1e9, seconds["send"])})
    return payload


class Journal:
    """Notes of one backend, page by page; calls of several threads may come at once.

    servers: with their group ports; None where the learner generates by itself: then there
        are calls to log, and nothing of servers to count.
    sync: how weights are pushed to them.
    healthy: servers that may be asked now.
    """

    def __init__(
        self, servers: Sequence[ServerAddress] | None = (), sync: SyncState | None = None
    ) -> None:
        self.healthy = len(servers or ())
        self._servers = servers
        self._sync = sync
        self._page = Page()

    def call(self, call: Call) -> None:
        self._page.calls.append(call)

    def push(self, server: str, again: bool, report: SyncReport) -> None:
        self._page.pushes.append(Push(server, again, report))

    def lost(self, server: str, reason: str) -> None:
        self._page.lost.append((server, reason))

    def split(self, server: str, part: range) -> None:
        self._page.splits.append((server, part.start, len(part)))

    def take(self) -> tuple[dict[str, Any], Payload]:
        """The page as a line of the log and as metrics; the next one is empty."""
        page, self._page = self._page, Page()
        fallback = None if self._sync is None else self._sync.fallback
        state = {
            "servers": [server.model_dump() for server in self._servers or ()],
            "servers_healthy": self.healthy,
            "sync_mode": None if self._sync is None else self._sync.mode,
            "sync_fallback": fallback,
        }
        if self._servers is None:
            return state | page.record(), Payload()
        payload = page.payload()
        payload.note(
            {"rollout/servers_healthy": self.healthy, "sync/fell_back": fallback is not None}
        )
        return state | page.record(), payload
