"""Repeated calls share one generation and its answer (DIST-05).

    first call ----> generation --------> kept answer
    repeated call, running --^              |
    repeated call, later <------------------+

If the connection of a call is lost, its generation continues for `grace_s`, so that a repeated call
can join it. A call without a key ends with its connection.

A kept answer has its weights version, also after a push. Failures are not kept.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass
class _Call:
    """waiting: number of waiting connections. abort: timer that runs while there are none."""

    answer: asyncio.Task[bytes]
    waiting: int = 0
    abort: asyncio.TimerHandle | None = None


@dataclass
class IdempotentCalls:
    """The running calls with a key, and the last answers.

    kept_answers, kept_bytes: limits of the answers. grace_s: time that a generation continues
    without a connection.
    """

    kept_answers: int = 256
    kept_bytes: int = 256 * 2**20
    grace_s: float = 15.0

    def __post_init__(self) -> None:
        self._running: dict[Hashable, _Call] = {}
        self._answers: dict[Hashable, bytes] = {}  # the oldest first

    async def answer(
        self, key: Hashable | None, generate: Callable[[], Coroutine[Any, Any, bytes]]
    ) -> tuple[bytes, bool]:
        """Return the answer, and whether an earlier call with this key generated it.

        Raises the errors of `generate`.
        """
        if key is None:
            return await generate(), False
        if (kept := self._answers.get(key)) is not None:
            return kept, True
        call = self._running.get(key)
        repeats = call is not None
        if call is None:
            call = self._running[key] = _Call(asyncio.create_task(generate()))
            call.answer.add_done_callback(partial(self._keep_answer, key, call))
        call.waiting += 1
        if call.abort is not None:
            call.abort.cancel()
        try:
            return await asyncio.shield(call.answer), repeats
        finally:
            call.waiting -= 1
            if call.waiting == 0 and not call.answer.done():
                loop = asyncio.get_running_loop()
                call.abort = loop.call_later(self.grace_s, self._abort, key, call)

    def _abort(self, key: Hashable, call: _Call) -> None:
        del self._running[key]  # a later call with this key generates again
        call.answer.cancel()

    def _keep_answer(self, key: Hashable, call: _Call, answer: asyncio.Task[bytes]) -> None:
        if call.abort is not None:
            call.abort.cancel()
        if self._running.get(key) is not call:  # aborted
            return
        del self._running[key]
        if answer.cancelled() or answer.exception() is not None:
            return
        self._answers[key] = answer.result()
        while (
            len(self._answers) > self.kept_answers
            or sum(map(len, self._answers.values())) > self.kept_bytes
        ):
            del self._answers[next(iter(self._answers))]
