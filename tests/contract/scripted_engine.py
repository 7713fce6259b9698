"""An engine without vLLM: it answers with the prompt.

Only `engine_protocol` and the wire format were used to write it.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

from fastapi import Body, FastAPI, Response
from fastapi.responses import JSONResponse, StreamingResponse
from PIL.Image import Image

from rollout_server.engines.engine_protocol import (
    FIRST_VERSION,
    Aborted,
    Adapter,
    ChatGenerate,
    Completion,
    EngineDead,
    Load,
    Prompt,
    PromptMessage,
)
from rollout_server.runtime.concurrency import cancel_when
from rollout_server.settings.options import ServerSettings
from shared_contracts.infer import RequestConfig
from shared_contracts.weights import DtypeName, InitCommunicator, ParameterMeta


class ScriptedEngine:
    """Records calls of a push and turns of answers; `script` has what happens in one, by its name.

    A test sets `alive`, `hung` (heartbeats do not return) and `failure` (also of `shutdown`).
    given_up, ended: `declare_dead` and `shutdown` were called.
    """

    dtype: DtypeName = "float32"
    max_model_len = 256
    alive = True
    hung = False
    failure: Exception | None = None
    given_up = False
    ended = False
    asleep = False
    guard_active = False
    holds_checkpoint = True

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.load = Load()
        self.weights_version = FIRST_VERSION
        self.calls: list[str] = []
        self.turns: list[int] = []
        self.script: dict[str, Callable[[], Awaitable[None]]] = {}
        self.joined: list[tuple[InitCommunicator, int]] = []
        self.heartbeat_age_s = 0.0
        self.adapter: Adapter | None = None
        self._dead = asyncio.Event()
        self._running, self._fell_asleep = asyncio.Event(), asyncio.Event()
        self._running.set()

    async def heartbeat(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.hung:
            self.heartbeat_age_s = math.inf
            await asyncio.Event().wait()
        self.heartbeat_age_s = 0.0

    async def prepare(self) -> None:
        await self._do("prepare")

    def declare_dead(self) -> None:
        self.alive, self.given_up = False, True
        self._dead.set()

    def shutdown(self) -> None:
        self.ended = True
        if self.failure is not None:
            raise self.failure

    async def render(self, messages: list[PromptMessage], images: list[Image]) -> Prompt:
        await self._do("render")
        text = "".join(part or "<image>" for message in messages for part in message.parts)
        return Prompt(text, list(text.encode()))

    def check_sampling(self, config: RequestConfig) -> None: ...

    async def generate(
        self,
        prompt: Prompt,
        config: RequestConfig,
        seed: int | None,
        max_tokens: int,
        request_id: str,
        turn: int,
    ) -> list[Completion]:
        await self._until_running()
        self.turns.append(turn)
        first = self.weights_version
        await self._do("generate")
        text, versions = prompt.engine_input[:max_tokens], (first, self.weights_version)
        return [
            Completion(i, text, list(text.encode()), "stop", False, versions)
            for i in range(config.n)
        ]

    async def openai_app(self, generate_chat: ChatGenerate) -> FastAPI:
        """An app whose answer, or stream, has the words of the body's `text`."""
        app = FastAPI()

        @app.get("/v1/models")
        async def models() -> int:
            return id(self)

        @app.post("/v1/chat/completions")
        async def chat(body: Annotated[dict[str, str], Body()]) -> Response:
            words = generate_chat(body["text"], None, 1, 1)
            if "stream" in body:
                return StreamingResponse(words)
            return JSONResponse([word async for word in words])

        return app

    async def stream(
        self, prompt: Any, sampling: Any, turn: int, send: Callable[[Any], None]
    ) -> None:
        """Send each word; a prompt with the word `forever` does not end, `dead` raises."""
        await self._until_running()
        for word in prompt.split():
            if word == "dead":
                raise EngineDead("replica 0 is dead")
            send(word)
        if "forever" in prompt:
            await asyncio.Event().wait()

    async def _do(self, name: str) -> None:
        async def happen() -> None:
            if name in self.script:
                await self.script[name]()

        self.calls.append(name)
        await cancel_when(self._dead.wait(), happen(), EngineDead("it was given up"))

    async def _until_running(self) -> None:
        """Wait for the end of a pause, or raise Aborted when the engine falls asleep."""
        if not self._running.is_set():
            aborted = Aborted(f"replica {self.index} ended a sequence: abort")
            await cancel_when(self._fell_asleep.wait(), self._running.wait(), aborted)

    async def pause(self) -> None:
        self._running.clear()
        await self._do("pause")

    async def resume(self) -> None:
        await self._do("resume")
        self.asleep = False
        self._fell_asleep.clear()
        self._running.set()

    async def sleep(self) -> None:
        self.asleep = True
        self._running.clear()
        await self._do("sleep")
        self._fell_asleep.set()

    async def join_group(self, init: InitCommunicator, first_worker: int) -> None:
        self.joined.append((init, first_worker))
        await self._do("join_group")

    async def leave_group(self) -> None:
        await self._do("leave_group")

    async def start_weight_update(self) -> None:
        await self._do("start_weight_update")

    async def update_weights(self, parameters: Sequence[ParameterMeta]) -> None:
        self.holds_checkpoint = False
        await self._do("update_weights")

    async def finish_weight_update(self, version: int) -> None:
        await self._do("finish_weight_update")
        self.weights_version = version

    async def load_adapter(self, adapter: Adapter) -> None:
        await self._do("load_adapter")

    async def use_adapter(self, adapter: Adapter) -> None:
        await self._do("use_adapter")
        self.adapter, self.weights_version = adapter, adapter.version


def build(settings: ServerSettings, index: int) -> ScriptedEngine:
    return ScriptedEngine(index)
