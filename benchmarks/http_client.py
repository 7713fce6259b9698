"""One HTTP client for every side: bodies posted at once, answers read as JSON."""

import asyncio
import json
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp


class HttpClient:
    """Connections stay open between calls, as many as bodies are posted at once."""

    def __init__(self) -> None:
        self._loop = asyncio.Runner()
        self._session = self._loop.run(_session())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.run(self._session.close())
        self._loop.close()

    def post(self, url: str, bodies: Sequence[Any]) -> list[Any]:
        """The answers, in order; of a stream its last event. Raises for any that is not 200."""
        return self._loop.run(self._post_all(url, bodies))

    async def _post_all(self, url: str, bodies: Sequence[Any]) -> list[Any]:
        return await asyncio.gather(*(self._post(url, body) for body in bodies))

    async def _post(self, url: str, body: Any) -> Any:
        async with self._session.post(url, json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{url} answered {answer.status}: {await answer.text()}")
            if answer.content_type == "text/event-stream":
                *_, last, _ = (await answer.text()).split("data: ")  # behind it: [DONE]
                return json.loads(last)
            return await answer.json()


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=600),
        trust_env=False,
    )
