"""A rollout server of a few lines: real HTTP on loopback, answers as the test scripts them."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from pydantic import BaseModel

from shared_contracts.errors import PROBLEM_MEDIA_TYPE, Problem
from shared_contracts.infer import (
    ChatCompletionResponse,
    ChatMessage,
    Choice,
    RolloutEnvelope,
    RolloutStamp,
    Usage,
)
from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.server_info import (
    Health,
    Info,
    Live,
    RepeatTerminateStatus,
    ReplicaStatus,
    WorldSize,
)

# What a route answers: a body alone (200), or a status with a body and perhaps with headers;
# text goes out as it is.
Reply = Any
Route = Callable[[Any], Reply]


@dataclass(frozen=True)
class HangUp:
    """In place of a reply: the connection is closed, or half way through the reply `after`."""

    after: Reply = None


class ScriptedServer:
    """Routes by `METHOD /path/`, each a function of the JSON body; notes every call.

    calls: (route, body) in the order of arrival.
    authorizations: the header of each call, in the same order.
    """

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.routes: dict[str, Route] = {
            "GET /health/": lambda _: health(),
            "GET /live/": lambda _: live(),
            "GET /get_world_size/": lambda _: WorldSize(world_size=1),
            "GET /info/": lambda _: info(),
        }
        self.calls: list[tuple[str, Any]] = []
        self.authorizations: list[str | None] = []

    def bodies(self, route: str) -> list[Any]:
        return [body for called, body in self.calls if called == route]

    def answer(self, route: str, body: Any) -> Reply:
        self.calls.append((route, body))
        if route not in self.routes:
            return 404, Problem.of("not-found", "no such route in this script", route)
        return self.routes[route](body)


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    """Serve on a free loopback port until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else an answer waits 40 ms for its last packet

        def do_GET(self) -> None:
            self._serve()

        def do_POST(self) -> None:
            self._serve()

        def _serve(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.loads(content) if content else None
            server.authorizations.append(self.headers.get("Authorization"))
            reply = server.answer(f"{self.command} {self.path}", body)
            if reply == HangUp():
                self.close_connection = True
            elif isinstance(reply, HangUp):
                self._send(*_whole(reply.after), share=0.5)
                self.close_connection = True
            else:
                self._send(*_whole(reply))

        def _send(
            self, status: int, reply: Reply, headers: dict[str, str], share: float = 1.0
        ) -> None:
            payload = _payload(reply)
            self.send_response(status)
            self.send_header("Content-Type", _content_type(reply))
            self.send_header("Content-Length", str(len(payload)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(payload[: int(share * len(payload))])

        def log_message(self, *_: object) -> None:
            """Keep the output of the tests clean."""

    http = _QuietServer(("127.0.0.1", 0), Handler)
    server = ScriptedServer(f"http://127.0.0.1:{http.server_port}")
    thread = threading.Thread(target=http.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.socket.close()


def response(reply: Reply) -> httpx.Response:
    """The answer of `respx` that equals what a scripted server sends as `reply`."""
    status, body, headers = _whole(reply)
    headers = {"Content-Type": _content_type(body)} | headers
    return httpx.Response(status, headers=headers, content=_payload(body))


def _whole(reply: Reply) -> tuple[int, Any, dict[str, str]]:
    """Status, body and headers."""
    if not isinstance(reply, tuple):
        return 200, reply, {}
    status, body, *headers = reply
    return status, body, headers[0] if headers else {}


def _payload(reply: Any) -> bytes:
    if isinstance(reply, str):
        return reply.encode()
    return json.dumps(_plain(reply)).encode()


def _plain(reply: Any) -> Any:
    if isinstance(reply, Problem):
        return reply.model_dump(exclude_none=True)
    if isinstance(reply, BaseModel):
        return reply.model_dump(mode="json")
    return [_plain(item) for item in reply] if isinstance(reply, list) else reply


def _content_type(reply: Any) -> str:
    if isinstance(reply, Problem):
        return PROBLEM_MEDIA_TYPE
    return "text/html" if isinstance(reply, str) else "application/json"


def problem(kind: str, detail: str, where: str) -> tuple[int, Problem]:
    """An error answer."""
    refused = Problem.of(kind, detail, where)
    return refused.status, refused


def health(version: int = 0) -> Health:
    return Health(
        state="READY",
        weights_version=version,
        server_epoch="epoch-1",
        replicas=[replica(0)],
    )


def live(epoch: str = "epoch-1") -> Live:
    return Live(server_epoch=epoch, heartbeat_age_s=[0.1])


def replica(index: int) -> ReplicaStatus:
    return ReplicaStatus(
        index=index, state="serving", detail="serving", heartbeat_age_s=0.1, restarts=0
    )


def info(
    guard: RepeatTerminateConfig | None = None,
    max_num_seqs: int = 64,
    world_size: int = 1,
    replicas: int = 1,
    active: bool | None = None,
    enable_lora: bool = False,
    max_model_len: int = 1024,
) -> Info:
    """guard: of the server, and active unless `active` says otherwise; None: off."""
    status = RepeatTerminateStatus(
        active=guard is not None if active is None else active,
        config=guard or RepeatTerminateConfig(),
    )
    return Info(
        model="toy",
        world_size=world_size,
        replicas=[replica(index) for index in range(replicas)],
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        enable_lora=enable_lora,
        weights_state="READY",
        weights_version=0,
        weight_transport="gloo",
        server_epoch="epoch-1",
        repeat_terminate=status,
        versions={"rollmatch": "0"},
    )


def envelope(
    token_ids: list[int],
    prompt_ids: list[int],
    seed: int | None = None,
    text: str = "",
    n: int = 1,
) -> RolloutEnvelope:
    """One element of an `/infer/` answer with details, `n` times the same choice."""
    usage = Usage(
        prompt_tokens=len(prompt_ids),
        completion_tokens=n * len(token_ids),
        total_tokens=len(prompt_ids) + n * len(token_ids),
    )
    message = ChatMessage(content=text)
    choices = [
        Choice(index=index, message=message, finish_reason="stop", token_ids=token_ids)
        for index in range(n)
    ]
    return RolloutEnvelope(
        response=ChatCompletionResponse(
            model="toy",
            choices=choices,
            usage=usage,
            id="r",
            created=0,
            prompt_token_ids=prompt_ids,
        ),
        coordexp=RolloutStamp(
            repeat_terminate_triggered=0,
            repeat_terminated_choices=[],
            weights_version=(1, 1),
            server_epoch="epoch-1",
            seed=seed,
            finish="stop",
        ),
    )
