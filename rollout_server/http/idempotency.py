"""One call, one generation: calls with the same request id get the same answer (DIST-05).

    first call ----> generates ----> answer, kept for a while
    retry, while it runs -----^              |
    retry, later <---------------------------+

A kept answer is given for as long as the server lives, whatever its engines and weights
are doing: its stamps say what it was generated with. Failures are not kept.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from rollout_server.runtime.refusals import refusal

MOST_ANSWERS = 256
MOST_BYTES = 256 * 2**20
LONGEST_S = 900.0
LARGE_BODY = 2**20


@dataclass
class _Running:
    """A running call. callers: connections that wait; when the last leaves, it is cancelled."""

    fingerprint: bytes
    task: asyncio.Task[bytes]
    callers: int = 0


@dataclass(frozen=True)
class _Kept:
    fingerprint: bytes
    body: bytes
    until: float


class IdempotentCalls:
    """The running calls with a request id, and the answers to the latest ones.

    most, most_bytes: of kept answers; the least recently requested ones are dropped first.
    longest_s: how long one is kept, by `clock`.
    """

    def __init__(
        self,
        most: int = MOST_ANSWERS,
        most_bytes: int = MOST_BYTES,
        longest_s: float = LONGEST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._longest_s = longest_s
        self._clock = clock
        self._running: dict[str, _Running] = {}
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._bytes = 0

    async def give(
        self,
        request_id: str | None,
        body: bytes,
        generate: Callable[[], Coroutine[Any, Any, bytes]],
    ) -> tuple[bytes, bool]:
        """Return the answer to the call `body`, and whether an earlier call generated it.

        Cancelling it cancels the generation, unless another caller waits for the same one.
        Raises what `generate` raises, and the `invalid-request` problem when the id belongs
        to another body.
        """
        if request_id is None:
            return await generate(), False
        fingerprint = await _fingerprint(body)
        if (kept := self._look_up(request_id)) is not None:
            _require_same(fingerprint, kept.fingerprint)
            return kept.body, True
        running = self._running.get(request_id)
        repeated = running is not None
        if running is None:
            running = self._begin(request_id, fingerprint, generate())
        _require_same(fingerprint, running.fingerprint)
        return await self._wait_for(request_id, running), repeated

    def _begin(
        self, request_id: str, fingerprint: bytes, generation: Coroutine[Any, Any, bytes]
    ) -> _Running:
        running = _Running(fingerprint, asyncio.ensure_future(generation))
        self._running[request_id] = running
        running.task.add_done_callback(lambda _: self._end(request_id, running))
        return running

    async def _wait_for(self, request_id: str, running: _Running) -> bytes:
        running.callers += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.callers -= 1
            if running.callers == 0 and not running.task.done():
                running.task.cancel()
                self._forget(request_id, running)  # a retry from now on begins anew

    def _end(self, request_id: str, running: _Running) -> None:
        failed = running.task.cancelled() or running.task.exception() is not None
        if self._forget(request_id, running) and not failed:
            self._keep(request_id, running.fingerprint, running.task.result())

    def _forget(self, request_id: str, running: _Running) -> bool:
        """Forget an id; returns whether it was known."""
        known = self._running.get(request_id) is running
        if known:
            del self._running[request_id]
        return known

    def _look_up(self, request_id: str) -> _Kept | None:
        self._drop_old()
        if request_id in self._kept:
            self._kept.move_to_end(request_id)
        return self._kept.get(request_id)

    def _keep(self, request_id: str, fingerprint: bytes, body: bytes) -> None:
        self._drop_old()
        self._kept[request_id] = _Kept(fingerprint, body, self._clock() + self._longest_s)
        self._bytes += len(body)
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._drop(next(iter(self._kept)))

    def _drop_old(self) -> None:
        now = self._clock()
        for request_id in [name for name, kept in self._kept.items() if kept.until <= now]:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        self._bytes -= len(self._kept.pop(request_id).body)


async def _fingerprint(body: bytes) -> bytes:
    """Hash a body; a large one in a thread."""
    if len(body) < LARGE_BODY:
        return hashlib.sha256(body).digest()
    return (await asyncio.to_thread(hashlib.sha256, body)).digest()


def _require_same(fingerprint: bytes, earlier: bytes) -> None:
    if fingerprint != earlier:
        found = "an earlier call with this id had another body; every call needs an id of its own"
        raise refusal("invalid-request", found, "request_id")
