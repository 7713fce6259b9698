"""Calls with a request id: one generation for the call and its repetitions."""

import asyncio
from typing import Any

import pytest

from rollout_server.http.idempotency import IdempotentCalls
from tests.contract.update_bench import Clock, asynchronous, reached


class Generator:
    """Answers with the number of the generation, once `free` is set."""

    def __init__(self) -> None:
        self.begun = 0
        self.cancelled = 0
        self.error: Exception | None = None
        self.free, self.ended = asyncio.Event(), asyncio.Event()
        self.size = 1

    async def __call__(self) -> bytes:
        self.begun += 1
        number = self.begun
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            await self.ended.wait()
            raise
        if self.error is not None:
            raise self.error
        return b"%d" % number * self.size


async def end(call: asyncio.Task[Any]) -> None:
    """End a call as the end of its connection does."""
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


@pytest.mark.req("DIST-05")
@asynchronous
async def test_retry_joins_the_running_first_call() -> None:
    generate = Generator()
    calls = IdempotentCalls()
    first = asyncio.create_task(calls.answer("a", generate))
    await reached(lambda: generate.begun == 1)
    retry = asyncio.create_task(calls.answer("a", generate))
    generate.free.set()
    assert (await first, await retry) == ((b"1", False), (b"1", True))


@pytest.mark.req("DIST-05")
@asynchronous
async def test_failure_reaches_every_waiting_call_and_is_not_kept() -> None:
    generate = Generator()
    calls = IdempotentCalls()
    generate.error = ValueError("broken")
    waiting = [asyncio.create_task(calls.answer("a", generate)) for _ in range(2)]
    await reached(lambda: "a" in calls._running and calls._running["a"].waiting == 2)
    generate.free.set()
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, ValueError)
    generate.free.clear()
    alone = asyncio.create_task(calls.answer("a", generate))
    await reached(lambda: generate.begun == 2)
    await end(alone)
    generate.free.set()
    await reached(lambda: not calls._running)
    generate.error = None
    generate.free.clear()
    again = asyncio.create_task(calls.answer("a", generate))
    await reached(lambda: generate.begun == 3)
    Clock.skip()  # beyond the grace of the failed ones
    await asyncio.sleep(1e-6)
    generate.free.set()
    assert await again == (b"3", False)
    assert await calls.answer("a", generate) == (b"3", True)


@pytest.mark.req("DIST-05", "SRV-07")
@asynchronous
async def test_generation_ends_after_the_grace_without_a_connection() -> None:
    """A call that joins within the grace ends it. Its end does not touch a later generation."""
    generate = Generator()
    calls = IdempotentCalls()
    first = asyncio.create_task(calls.answer("a", generate))
    second = asyncio.create_task(calls.answer("a", generate))
    await reached(lambda: "a" in calls._running and calls._running["a"].waiting == 2)
    await end(first)
    Clock.skip()
    await end(second)
    third = asyncio.create_task(calls.answer("a", generate))
    await reached(lambda: calls._running["a"].waiting == 1)
    Clock.skip()
    await asyncio.sleep(1e-6)
    assert (third.done(), generate.cancelled) == (False, 0)
    await end(third)
    Clock.skip()
    await reached(lambda: generate.cancelled == 1)
    later = asyncio.create_task(calls.answer("a", generate))
    await reached(lambda: generate.begun == 2)
    generate.ended.set()
    await asyncio.sleep(1e-6)
    joined = asyncio.create_task(calls.answer("a", generate))
    await asyncio.sleep(1e-6)
    generate.free.set()
    assert [await later, await joined] == [(b"2", False), (b"2", True)]


@pytest.mark.req("DIST-05")
@asynchronous
async def test_kept_answers_are_bounded_and_the_oldest_goes_first() -> None:
    generate = Generator()
    generate.free.set()
    calls = IdempotentCalls(kept_answers=2, kept_bytes=10)
    await calls.answer("a", generate)
    await calls.answer("b", generate)
    assert await calls.answer("a", generate) == (b"1", True)
    await calls.answer("c", generate)
    assert await calls.answer("b", generate) == (b"2", True)
    assert await calls.answer("a", generate) == (b"4", False)
    generate.size = 10
    await calls.answer("large", generate)
    assert await calls.answer("large", generate) == (b"5" * 10, True)
    assert await calls.answer("b", generate) == (b"6" * 10, False)
    for number in (b"7", b"8"):
        assert await calls.answer(None, generate) == (number * 10, False)
    generate.size = 11
    await calls.answer("huge", generate)
    assert (await calls.answer("huge", generate))[1] is False
