"""One call to each engine, all at once, within a deadline."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from rollout_server.problems import refusal

T = TypeVar("T")


async def all_of(
    calls: Sequence[Awaitable[T]], where: str, deadline_s: float, margin_s: float
) -> list[T]:
    """The results of `calls`, in order; there may be none.

    Raises the failure of the first that fails; the others then have `margin_s` left. Raises
    the `weight-transfer-timeout` problem at `where` when some are not done in time.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    if not tasks:
        return []
    try:
        done, pending = await asyncio.wait(
            tasks, timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION
        )
        failures = [failure for task in done if (failure := task.exception()) is not None]
        if failures and pending:
            await asyncio.wait(pending, timeout=margin_s)
    finally:
        for task in tasks:
            task.cancel()
    if failures:
        raise failures[0]
    if pending:
        detail = f"server: the engines were not done within {deadline_s:g} s"
        raise refusal("weight-transfer-timeout", detail, where)
    return [task.result() for task in tasks]
