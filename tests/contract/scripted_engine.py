"""An engine without vLLM: it answers with the sum of its weights and the prompt.

Only `engine_protocol` and the wire format were used to write it.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Annotated, Any

import torch
from fastapi import Body, FastAPI, Response
from fastapi.responses import JSONResponse, StreamingResponse
from PIL.Image import Image
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from rollout_server.engines.engine_protocol import (
    FIRST_VERSION,
    ChatGenerate,
    ChatMessage,
    Completion,
    Engine,
    EngineDead,
    Load,
    Prompt,
)
from rollout_server.settings.options import ServerSettings
from shared_contracts.digests import matrix_shape
from shared_contracts.infer import RequestConfig
from shared_contracts.weights import GLOO_STORE_PREFIX, DtypeName, ParameterMeta, plan_buckets
from tests.contract.weight_sender import digest


class ScriptedEngine:
    """weights: of its only worker, by name.

    A test sets `alive`, `hung` (heartbeats do not return) and `failure` (heartbeats raise it).
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

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.load = Load()
        self.weights_version = FIRST_VERSION
        self.weights = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
        self.heartbeat_age_s = 0.0
        self._running = asyncio.Event()
        self._running.set()

    async def heartbeat(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.hung:
            self.heartbeat_age_s = math.inf
            await asyncio.Event().wait()
        self.heartbeat_age_s = 0.0

    async def prepare(self) -> None: ...

    def declare_dead(self) -> None:
        self.given_up = True

    def shutdown(self) -> None:
        self.ended = True

    async def render(self, messages: list[ChatMessage], images: list[Image]) -> Prompt:
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
        await self._running.wait()
        total = sum(float(weight.sum()) for weight in self.weights.values())
        text = f"{total:g} {prompt.engine_input}"[:max_tokens]
        version = self.weights_version
        return [
            Completion(i, text, list(text.encode()), "stop", False, (version, version))
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
        await self._running.wait()
        for word in prompt.split():
            if word == "dead":
                raise EngineDead("replica 0 is dead")
            send(word)
        if "forever" in prompt:
            await asyncio.Event().wait()

    async def pause(self) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self.asleep = False
        self._running.set()

    async def sleep(self) -> None:
        self._running.clear()
        self.asleep = True

    async def wake_weights(self) -> None: ...

    async def abort_all(self) -> None: ...

    async def publish(self, version: int) -> None:
        self.weights_version = version

    async def weight_phase(self, name: str, **arguments: Any) -> list[Any]:
        phases: dict[str, Callable[..., Any]] = {
            "join_group": self._join_group,
            "leave_group": self._leave_group,
            "open_weight_update": self._open_weight_update,
            "receive_weights": self._receive_weights,
            "abandon_weight_update": lambda: None,
            "complete_load": dict,
            "read_back": self._read_back,
        }
        return [await asyncio.to_thread(phases[name], **arguments)]

    def _join_group(self, init: dict[str, Any], transport: str, rank_offset: int) -> None:
        timeout = timedelta(seconds=init["timeout_s"])
        store = TCPStore(init["host"], init["port"], is_master=False, wait_for_workers=False)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        prefixed = PrefixStore(GLOO_STORE_PREFIX, store)
        self._group = ProcessGroupGloo(prefixed, rank_offset, init["world_size"], options)
        self._bucket_bytes = init["bucket_bytes"]
        self._group.barrier().wait()  # type: ignore[attr-defined]

    def _leave_group(self) -> None:
        del self._group

    def _open_weight_update(
        self, parameters: list[dict[str, Any]], dtype: str
    ) -> list[dict[str, str]]:
        held = {name: list(weight.shape) for name, weight in self.weights.items()}
        wrong = [p["name"] for p in parameters if held.get(p["name"]) != p["shape"]]
        return [{"name": name, "kind": "unexpected", "detail": "not here"} for name in wrong]

    def _receive_weights(
        self, transport: str, parameters: list[dict[str, Any]]
    ) -> dict[str, float]:
        manifest = [ParameterMeta.model_validate(parameter) for parameter in parameters]
        for bucket in plan_buckets(manifest, self._bucket_bytes):
            coming = [manifest[i] for i in bucket]
            data = torch.empty(sum(p.wire_bytes for p in coming), dtype=torch.uint8)
            self._group.broadcast(data, 0).wait()  # type: ignore[attr-defined]
            offset = 0
            for p in coming:
                own = data[offset : offset + p.num_bytes]
                self.weights[p.name] = own.view(getattr(torch, p.dtype)).view(p.shape)
                offset += p.wire_bytes
        return {"transfer": 0.0}

    def _read_back(self, asked: Sequence[tuple[str, Sequence[int] | None]]) -> list[Any]:
        return [
            [
                (
                    name,
                    0,
                    0,
                    *matrix_shape(self.weights[name].shape),
                    int(digest(self.weights[name], columns), 16),
                )
            ]
            for name, columns in asked
        ]


def environment(settings: ServerSettings) -> dict[str, str]:
    return {}


def build(settings: ServerSettings, index: int) -> Engine:
    return ScriptedEngine(index)
