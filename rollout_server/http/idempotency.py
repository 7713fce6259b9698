"""Calls with the same request id share one generation and its answer (DIST-05).

    first call --------> generation --------> cached answer
    same id, running --------^                  |
    same id, later <----------------------------+

If the connection of a call is lost, its generation continues for `grace_s`, so that a repeated call
can join it. A call without an id ends with its connection.

A cached answer keeps its weights version, also after a push. Failures are not cached.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from rollout_server.runtime.refusals import refusal

KEPT_ANSWERS = 256
KEPT_BYTES = 256 * 2**20
GRACE_S = 15.0
LARGE_BODY = 2**20


@dataclass
class _Call:
    """waiting: number of waiting connections. abort: timer that runs while there are none."""

    body_digest: bytes
    answer: asyncio.Task[bytes]
    waiting: int = 0
    abort: asyncio.TimerHandle | None = None


class IdempotentCalls:
    """The running calls with a request id, and a least-recently-used cache of answers.

    kept_answers, kept_bytes: limits of the cache. grace_s: time that a generation continues without
    a connection.
    """

    def __init__(
        self,
        kept_answers: int = KEPT_ANSWERS,
        kept_bytes: int = KEPT_BYTES,
        grace_s: float = GRACE_S,
    ) -> None:
        self._kept_answers = kept_answers
        self._kept_bytes = kept_bytes
        self._grace_s = grace_s
        self._running: dict[str, _Call] = {}
        self._answered: OrderedDict[str, _Call] = OrderedDict()
        self._bytes = 0

    async def answer(
        self,
        request_id: str | None,
        body: bytes,
        generate: Callable[[], Coroutine[Any, Any, bytes]],
    ) -> tuple[bytes, bool]:
        """Return the answer to the call `body`, and whether an earlier call generated it.

        Raises the errors of `generate`, and the `invalid-request` problem if an earlier call with
        this id had another body.
        """
        if request_id is None:
            return await generate(), False
        digest = await _digest(body)
        call = self._running.get(request_id) or self._answered.get(request_id)
        if call is None:
            call = _Call(digest, asyncio.create_task(generate()))
            self._running[request_id] = call
            call.answer.add_done_callback(lambda _: self._finish(request_id, call))
            return await self._wait(request_id, call), False
        if call.body_digest != digest:
            found = "an earlier call with this id had another body; each call needs its own id"
            raise refusal("invalid-request", found, "request_id")
        if request_id in self._answered:
            self._answered.move_to_end(request_id)
        return await self._wait(request_id, call), True

    async def _wait(self, request_id: str, call: _Call) -> bytes:
        call.waiting += 1
        if call.abort is not None:
            call.abort.cancel()
        try:
            return await asyncio.shield(call.answer)
        finally:
            call.waiting -= 1
            if call.waiting == 0 and not call.answer.done():
                loop = asyncio.get_running_loop()
                call.abort = loop.call_later(self._grace_s, self._abort, request_id, call)

    def _abort(self, request_id: str, call: _Call) -> None:
        del self._running[request_id]  # a later call with this id generates again
        call.answer.cancel()

    def _finish(self, request_id: str, call: _Call) -> None:
        if call.abort is not None:
            call.abort.cancel()
        failed = call.answer.cancelled() or call.answer.exception() is not None
        if self._running.get(request_id) is not call:  # aborted
            return
        del self._running[request_id]
        if not failed:
            self._keep(request_id, call)

    def _keep(self, request_id: str, call: _Call) -> None:
        self._answered[request_id] = call
        self._bytes += len(call.answer.result())
        while len(self._answered) > self._kept_answers or self._bytes > self._kept_bytes:
            _, oldest = self._answered.popitem(last=False)
            self._bytes -= len(oldest.answer.result())


async def _digest(body: bytes) -> bytes:
    """Hash a body; a large one in a thread, where hashlib releases the GIL."""
    if len(body) < LARGE_BODY:
        return hashlib.sha256(body).digest()
    return (await asyncio.to_thread(hashlib.sha256, body)).digest()
