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
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollout_server.runtime.refusals import refusal

KEPT_ANSWERS = 256
KEPT_BYTES = 256 * 2**20
GRACE_S = 15.0


@dataclass
class _Call:
    """waiting: number of waiting connections. abort: timer that runs while there are none.

    size: of a complete answer, in bytes; None while it runs.
    """

    body_digest: bytes
    answer: asyncio.Task[bytes]
    waiting: int = 0
    abort: asyncio.TimerHandle | None = None
    size: int | None = None


class IdempotentCalls:
    """The calls with a request id: those that run, and a least-recently-used cache of answers.

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
        self._calls: dict[str, _Call] = {}  # the least recently used first

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
        # hashlib releases the GIL.
        digest = (await asyncio.to_thread(hashlib.sha256, body)).digest()
        call = self._calls.pop(request_id, None)
        repeats = call is not None
        if call is None:
            call = _Call(digest, asyncio.create_task(generate()))
            call.answer.add_done_callback(partial(self._keep_answer, request_id, call))
        self._calls[request_id] = call
        if call.body_digest != digest:
            found = "an earlier call with this id had another body; each call needs its own id"
            raise refusal("invalid-request", found, "request_id")
        return await self._wait(request_id, call), repeats

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
        del self._calls[request_id]  # a later call with this id generates again
        call.answer.cancel()

    def _keep_answer(self, request_id: str, call: _Call, _: asyncio.Task[bytes]) -> None:
        if call.abort is not None:
            call.abort.cancel()
        if self._calls.get(request_id) is not call:  # aborted
            return
        if call.answer.cancelled() or call.answer.exception() is not None:
            del self._calls[request_id]
            return
        call.size = len(call.answer.result())
        sizes = {key: each.size for key, each in self._calls.items() if each.size is not None}
        for oldest in list(sizes):
            if len(sizes) <= self._kept_answers and sum(sizes.values()) <= self._kept_bytes:
                return
            del self._calls[oldest], sizes[oldest]
