"""Helpers for coroutines: cancelled together, bounded in bytes and seconds, measured."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

# Calls begun before other tasks run; beginning one takes up to a millisecond.
BEGUN_TOGETHER = 8


async def cancel_when(
    end: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T], error: Exception
) -> T:
    """Return the result of `work`; if `end` finishes first, cancel `work` and raise `error`."""
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


async def handed_over(
    work: Callable[[Callable[[T], None]], Coroutine[Any, Any, None]],
) -> AsyncGenerator[T, None]:
    """Yield the items that `work` passes to its argument; raise the error of `work`.

    Closing the generator cancels `work`.
    """
    items: asyncio.Queue[tuple[T] | None] = asyncio.Queue()
    task = asyncio.ensure_future(work(lambda item: items.put_nowait((item,))))
    task.add_done_callback(lambda _: items.put_nowait(None))
    try:
        while (item := await items.get()) is not None:
            yield item[0]
        task.result()
    finally:
        task.cancel()


async def all_or_cancel(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all calls; on a failure or cancellation, cancel the others and wait.

    Other tasks run after every BEGUN_TOGETHER calls that begin.
    """
    tasks: list[asyncio.Task[T]] = []
    try:
        for call in calls:
            tasks.append(asyncio.create_task(call))
            if len(tasks) % BEGUN_TOGETHER == 0:
                await asyncio.sleep(0)
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class Budget:
    """A FIFO semaphore of `total` bytes."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._left = total
        self._first = asyncio.Lock()  # FIFO
        self._returned = asyncio.Event()

    @asynccontextmanager
    async def take(self, size: int) -> AsyncIterator[None]:
        """Hold `size` bytes, at most `total`."""
        assert size <= self.total
        async with self._first:
            while self._left < size:
                self._returned.clear()
                await self._returned.wait()
            self._left -= size
        try:
            yield
        finally:
            self._left += size
            self._returned.set()


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the seconds of a `with` block, also of one that fails, to `seconds[phase]`."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[phase] = seconds.get(phase, 0.0) + time.monotonic() - began
