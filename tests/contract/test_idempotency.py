"""Calls with a request id: one generation, any number of answers."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollout_server.http.idempotency import IdempotentCalls
from shared_contracts.errors import ProblemError


class Generator:
    """Answers with the number of the generation, once `free` is set."""

    def __init__(self) -> None:
        self.begun = 0
        self.cancelled = 0
        self.error: Exception | None = None
        self.free = asyncio.Event()
        self.size = 1

    async def __call__(self) -> bytes:
        self.begun += 1
        number = self.begun
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return b"%d" % number * self.size


def call(request_id: str | None, text: str = "x", **fields: Any) -> tuple[str | None, bytes]:
    """A call's id and its body."""
    requests = [{"messages": [{"role": "user", "content": text}]}]
    body = {"infer_requests": requests, "request_id": request_id, **fields}
    return request_id, json.dumps(body).encode()


def run(test: Callable[[Generator], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test(Generator())

    asyncio.run(bounded())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)


@pytest.mark.req("DIST-05")
def test_retry_gets_the_answer_of_the_first_call() -> None:
    async def test(generate: Generator) -> None:
        generate.free.set()
        calls = IdempotentCalls()
        assert await calls.give(*call("a"), generate) == (b"1", False)
        assert await calls.give(*call("a"), generate) == (b"1", True)
        assert await calls.give(*call("b"), generate) == (b"2", False)
        assert await calls.give(*call(None), generate) == (b"3", False)
        assert await calls.give(*call(None), generate) == (b"4", False)

    run(test)


@pytest.mark.req("DIST-05")
def test_retry_joins_the_running_first_call() -> None:
    async def test(generate: Generator) -> None:
        calls = IdempotentCalls()
        first = asyncio.ensure_future(calls.give(*call("a"), generate))
        retry = asyncio.ensure_future(calls.give(*call("a"), generate))
        await asyncio.sleep(0)
        with pytest.raises(ProblemError) as error:
            await calls.give(*call("a", "y"), generate)
        assert (error.value.problem.status, error.value.problem.where) == (422, "request_id")
        generate.free.set()
        assert (await first, await retry) == ((b"1", False), (b"1", True))
        assert generate.begun == 1

    run(test)


@pytest.mark.req("DIST-05")
def test_failure_reaches_every_waiting_call_and_is_not_kept() -> None:
    async def test(generate: Generator) -> None:
        calls = IdempotentCalls()
        generate.error = ValueError("broken")
        waiting = [asyncio.ensure_future(calls.give(*call("a"), generate)) for _ in range(2)]
        await asyncio.sleep(0)
        generate.free.set()
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, ValueError)
        generate.error = None
        assert await calls.give(*call("a"), generate) == (b"2", False)

    run(test)


@pytest.mark.req("DIST-05", "SRV-07")
def test_generation_ends_when_its_last_client_leaves() -> None:
    async def test(generate: Generator) -> None:
        calls = IdempotentCalls()
        first = asyncio.ensure_future(calls.give(*call("a"), generate))
        retry = asyncio.ensure_future(calls.give(*call("a"), generate))
        await until(lambda: generate.begun == 1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert generate.cancelled == 0
        retry.cancel()
        again = asyncio.ensure_future(calls.give(*call("a"), generate))
        await until(lambda: (generate.cancelled, generate.begun) == (1, 2))
        generate.free.set()
        assert await again == (b"2", False)

    run(test)


@pytest.mark.req("DIST-05")
def test_kept_answers_are_bounded_and_the_least_used_goes_first() -> None:
    async def test(generate: Generator) -> None:
        generate.free.set()
        calls = IdempotentCalls(most=2, most_bytes=10)
        await calls.give(*call("a"), generate)
        await calls.give(*call("b"), generate)
        assert await calls.give(*call("a"), generate) == (b"1", True)
        await calls.give(*call("c"), generate)
        assert await calls.give(*call("a"), generate) == (b"1", True)
        assert await calls.give(*call("b"), generate) == (b"4", False)
        generate.size = 10
        await calls.give(*call("large"), generate)
        assert await calls.give(*call("large"), generate) == (b"5" * 10, True)
        assert await calls.give(*call("b"), generate) == (b"6" * 10, False)
        generate.size = 11
        await calls.give(*call("huge"), generate)
        assert (await calls.give(*call("huge"), generate))[1] is False

    run(test)


@pytest.mark.req("DIST-05")
def test_kept_answers_expire() -> None:
    async def test(generate: Generator) -> None:
        generate.free.set()
        now = 0.0
        calls = IdempotentCalls(longest_s=10.0, clock=lambda: now)
        await calls.give(*call("a"), generate)
        now = 9.0
        assert await calls.give(*call("a"), generate) == (b"1", True)
        now = 10.0
        assert await calls.give(*call("a"), generate) == (b"2", False)

    run(test)
