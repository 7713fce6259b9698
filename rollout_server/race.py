"""Work that ends early when something else happens first."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def unless(
    end: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T], error: Exception
) -> T:
    """The result of `work`; when `end` is over first, cancel `work` and raise `error`."""
    task = asyncio.ensure_future(work)
    ending = asyncio.ensure_future(end)
    try:
        await asyncio.wait((task, ending), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise error
    finally:
        ending.cancel()
        task.cancel()
