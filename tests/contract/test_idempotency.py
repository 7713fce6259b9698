"""Calls with a request id: generated once, answered as often as asked."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollout_server.http.idempotency import IdempotentCalls
from shared_contracts.errors import ProblemError


class Generator:
    """Answers with the number of the generation, once it is `free` to."""

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
        async with asyncio.timeout(10):
            await test(Generator())

    asyncio.run(bounded())


@pytest.mark.req("DIST-05")
def test_a_retry_gets_the_answer_of_the_first_call() -> None:
    async def test(generate: Generator) -> None:
        generate.free.set()
        calls = IdempotentCalls()
        assert await calls.give(*call("a"), generate) == (b"1", False)
        assert await calls.give(*call("a"), generate) == (b"1", True)
        assert await calls.give(*call("b"), generate) == (b"2", False)

    run(test)


def test_calls_without_an_id_are_generated_each() -> None:
    async def test(generate: Generator) -> None:
        generate.free.set()
        calls = IdempotentCalls()
        assert await calls.give(*call(None), generate) == (b"1", False)
        assert await calls.give(*call(None), generate) == (b"2", False)

    run(test)


@pytest.mark.req("DIST-05")
def test_a_retry_while_the_first_call_runs_joins_it() -> None:
    async def test(generate: Generator) -> None:
        calls = IdempotentCalls()
        first = asyncio.ensure_future(calls.give(*call("a"), generate))
        retry = asyncio.ensure_future(calls.give(*call("a"), generate))
        await asyncio.sleep(0)
        generate.free.set()
        assert (await first, await retry) == ((b"1", False), (b"1", True))
        assert generate.begun == 1

    run(test)


@pytest.mark.req("DIST-05")
@pytest.mark.parametrize("finished", [True, False])
def test_an_id_belongs_to_one_body(finished: bool) -> None:
    async def test(generate: Generator) -> None:
        calls = IdempotentCalls()
        first = asyncio.ensure_future(calls.give(*call("a"), generate))
        await asyncio.sleep(0)
        if finished:
            generate.free.set()
            await first
        for other in (call("a", "y"), call("a", expected_weights_version=1)):
            with pytest.raises(ProblemError) as error:
                await calls.give(*other, generate)
            problem = error.value.problem
            assert (problem.status, problem.where) == (422, "request_id")
        generate.free.set()
        assert (await first, generate.begun) == ((b"1", False), 1)

    run(test)


@pytest.mark.req("DIST-05")
def test_failures_are_told_to_all_who_wait_and_not_kept() -> None:
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
def test_the_last_client_to_leave_ends_the_generation() -> None:
    async def test(generate: Generator) -> None:
        calls = IdempotentCalls()
        first = asyncio.ensure_future(calls.give(*call("a"), generate))
        retry = asyncio.ensure_future(calls.give(*call("a"), generate))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0.01)
        assert generate.cancelled == 0
        retry.cancel()
        await asyncio.sleep(0.01)
        assert generate.cancelled == 1

    run(test)


@pytest.mark.req("DIST-05")
def test_a_retry_right_after_the_last_client_left_begins_anew() -> None:
    async def test(generate: Generator) -> None:
        calls = IdempotentCalls()
        first = asyncio.ensure_future(calls.give(*call("a"), generate))
        await asyncio.sleep(0)
        first.cancel()
        retry = asyncio.ensure_future(calls.give(*call("a"), generate))
        await asyncio.sleep(0.01)
        generate.free.set()
        assert await retry == (b"2", False)

    run(test)


@pytest.mark.req("DIST-05")
def test_kept_answers_are_bounded_in_number_and_the_least_asked_for_go_first() -> None:
    async def test(generate: Generator) -> None:
        generate.free.set()
        calls = IdempotentCalls(most=2)
        await calls.give(*call("a"), generate)
        await calls.give(*call("b"), generate)
        assert await calls.give(*call("a"), generate) == (b"1", True)
        await calls.give(*call("c"), generate)
        assert await calls.give(*call("a"), generate) == (b"1", True)
        assert await calls.give(*call("b"), generate) == (b"4", False)

    run(test)


@pytest.mark.req("DIST-05")
def test_kept_answers_are_bounded_in_bytes() -> None:
    async def test(generate: Generator) -> None:
        generate.free.set()
        calls = IdempotentCalls(most_bytes=10)
        generate.size = 6
        await calls.give(*call("a"), generate)
        await calls.give(*call("b"), generate)  # 12 bytes
        assert await calls.give(*call("b"), generate) == (b"2" * 6, True)
        assert await calls.give(*call("a"), generate) == (b"3" * 6, False)
        generate.size = 11
        await calls.give(*call("huge"), generate)
        generate.size = 1
        assert await calls.give(*call("huge"), generate) == (b"5", False)

    run(test)


@pytest.mark.req("DIST-05")
def test_kept_answers_grow_old() -> None:
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
