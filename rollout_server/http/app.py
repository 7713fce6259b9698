"""The FastAPI app of a pool: routes, bodies and answers (WIRE-06).

CanonicalPaths -> AccessLog -> HostCheck -> BodyLimit -> route
                                                           |
                                  TokenCheck -> JsonBody -> handler -> answer
"""

import asyncio
import hashlib
import os
from collections.abc import Coroutine, Iterable
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Lifespan

from rollout_server.http.access_log import AccessLog
from rollout_server.http.guards import (
    BODY_S,
    BodyLimit,
    CanonicalPaths,
    ConcurrencyLimit,
    HostCheck,
    JsonBody,
    TokenCheck,
    check_sequences,
    declare_bodies,
)
from rollout_server.http.idempotency import IdempotentCalls
from rollout_server.http.openai_mount import add_openai
from rollout_server.http.problems import install_problem_handlers, problem_responses
from rollout_server.runtime.concurrency import cancel_when
from rollout_server.serving.pool import Pool
from rollout_server.serving.telemetry import GENERATING, CallRecord
from rollout_server.settings.preflight import is_loopback, read_token
from shared_contracts.cli import DISTRIBUTION
from shared_contracts.errors import refusal
from shared_contracts.infer import ChatCompletionResponse, InferCall, RequestConfig, RolloutEnvelope
from shared_contracts.server_info import Health, Info, Live, WorldSize
from shared_contracts.weights import (
    CommunicatorReady,
    Count,
    GroupCall,
    InitCommunicator,
    MoveMemory,
    StartWeightUpdate,
    SyncReport,
    WeightStatus,
)

CONNECTION_PROBLEMS = ("internal", "too-slow", "misdirected", "header-too-large")
PROBE_PROBLEMS = ("not-ready", "push-needed")
BODY_PROBLEMS = ("bad-request", "body-too-large", "invalid-request", *PROBE_PROBLEMS)
INFER_PROBLEMS = (*BODY_PROBLEMS, "overloaded", "other-weights", "too-many-calls")
SLEEP_PROBLEMS = (*BODY_PROBLEMS, "weight-update-order", "weight-transfer-timeout")
WEIGHT_PROBLEMS = (
    *SLEEP_PROBLEMS,
    "taken-over",
    "group-port-taken",
    "manifest-mismatch",
    "adapter-refused",
    "weight-transfer-failed",
)

BYTES = "application/octet-stream"
ADAPTER_BODY = {
    "required": True,
    "content": {BYTES: {"schema": {"type": "string", "format": "binary"}}},
}
T = TypeVar("T")
# Bodies of the routes.
Infer = Annotated[InferCall, Depends(JsonBody(InferCall))]
Init = Annotated[InitCommunicator, Depends(JsonBody(InitCommunicator))]
Start = Annotated[StartWeightUpdate, Depends(JsonBody(StartWeightUpdate))]
Phase = Annotated[GroupCall, Depends(JsonBody(GroupCall))]
Memory = Annotated[MoveMemory, Depends(JsonBody(MoveMemory))]


def create_app(
    pool: Pool, lifespan: Lifespan[FastAPI] | None = None, body_s: float = BODY_S
) -> FastAPI:
    """Return the app of `pool`, with routes and guards.

    body_s: deadline of a body.
    """
    app = FastAPI(
        title="Rollmatch rollout server",
        version=version(DISTRIBUTION),
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        responses=problem_responses(*CONNECTION_PROBLEMS),
    )
    install_problem_handlers(app)
    limit = ConcurrencyLimit(pool.settings.max_concurrent_calls)
    calls = APIRouter()
    _add_reads(calls, pool)
    _add_infer(calls, pool, limit)
    if pool.settings.openai:
        add_openai(calls, pool, limit)
    _add_pushes(calls, pool)
    _add_pages(calls, app)
    _add_probes(app, pool)
    token = read_token(pool.settings, os.environ)
    if token is None:
        app.include_router(calls)
    else:
        refused = problem_responses("unauthorized")
        app.include_router(calls, dependencies=[Depends(TokenCheck(token))], responses=refused)
    declare_bodies(app)
    _add_guards(app, pool, body_s)
    return app


def _add_guards(app: FastAPI, pool: Pool, body_s: float) -> None:
    """Add the middlewares; the last one runs first."""
    settings = pool.settings
    max_bytes = int(settings.max_body_mib * 2**20)
    app.add_middleware(BodyLimit, max_bytes=max_bytes, body_s=body_s)
    if settings.allowed_hosts or is_loopback(settings.host):  # other hosts require a token
        names = {settings.host, "localhost", "127.0.0.1", "[::1]", *settings.allowed_hosts}
        app.add_middleware(HostCheck, hosts=sorted(names))
    routes = [route for route in app.routes if isinstance(route, Route)]
    posts = {route.path for route in routes if "POST" in (route.methods or ())}
    app.add_middleware(AccessLog, telemetry=pool.telemetry, routes=posts | {*GENERATING})
    app.add_middleware(CanonicalPaths, paths={route.path for route in routes})


def _add_probes(app: FastAPI, pool: Pool) -> None:
    """Add the routes that need no token."""

    @app.get("/health/", responses=problem_responses(*PROBE_PROBLEMS))
    async def health() -> Health:
        """Answer 200 if every replica can answer, also during a push, when `/infer/` waits."""
        return pool.health()

    @app.get("/live/")
    async def live() -> Live:
        """Answer 200 while the event loop runs, with the age of each engine's heartbeat."""
        return pool.live()


def _add_reads(calls: APIRouter, pool: Pool) -> None:
    @calls.get("/get_world_size/")
    async def get_world_size() -> WorldSize:
        """Return the number of engine workers of all replicas."""
        return pool.world_size()

    @calls.get("/info/")
    async def info() -> Info:
        """Return model, weights, replicas and versions, also while engines start."""
        return pool.info()

    @calls.get("/metrics/", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Return counters, seconds and gauges in Prometheus' text format."""
        return PlainTextResponse(pool.metrics(), media_type=CONTENT_TYPE_LATEST)


def _add_infer(calls: APIRouter, pool: Pool, limit: ConcurrencyLimit) -> None:
    """Add `/infer/`. A generation can outlive its connection, and be joined by others."""
    idempotent = IdempotentCalls()

    @calls.post(
        "/infer/",
        response_model=list[RolloutEnvelope] | list[ChatCompletionResponse],
        responses=problem_responses(*INFER_PROBLEMS),
    )
    async def infer(
        request: Request, call: Infer, envelope: Annotated[bool, Query()] = True
    ) -> Response:
        """Return one rollout per request, in order.

        `?envelope=0` gives the responses without `coordexp`.
        """
        record: CallRecord = request.state.call_record
        record.request_id, record.requests = call.request_id, len(call.infer_requests)
        n = (call.request_config or RequestConfig()).n
        check_sequences(record.requests, n, pool.settings.max_requests_per_call)

        async def generate() -> bytes:
            async with limit:
                envelopes = await pool.infer(call, record)
            pool.telemetry.count_answers(record)
            answers = envelopes if envelope else [each.response for each in envelopes]
            return await asyncio.to_thread(_json_list, answers)

        key = None
        if call.request_id is not None:  # hashlib releases the GIL
            digest = (await asyncio.to_thread(hashlib.sha256, await request.body())).digest()
            key = call.request_id, digest, envelope
        answer = idempotent.answer(key, generate)
        body, record.repeated = await _attended(request, answer)
        return Response(body, media_type="application/json")


async def _attended(request: Request, answer: Coroutine[Any, Any, T]) -> T:
    """Await `answer` until the end of the connection; the body of the call has been read."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    return await cancel_when(disconnect(), answer, ClientDisconnect())


def _json_list(answers: Iterable[BaseModel]) -> bytes:
    """Return a JSON list. In a thread, other tasks run between two answers."""
    return b"[" + b",\n".join(answer.model_dump_json().encode() for answer in answers) + b"]"


def _add_pushes(calls: APIRouter, pool: Pool) -> None:
    """Add the phases of a push, and sleep; each call ends with its connection."""
    problems = problem_responses(*WEIGHT_PROBLEMS)
    sleep_problems = problem_responses(*SLEEP_PROBLEMS)

    @calls.post("/init_communicator/", responses=problems)
    async def init_communicator(request: Request, body: Init) -> CommunicatorReady:
        """Take the server over, and form the weight group of the learner and all workers."""
        return await _attended(request, pool.weights.init_communicator(body))

    @calls.post("/start_weight_update/", responses=problems)
    async def start_weight_update(request: Request, body: Start) -> WeightStatus:
        """Compare the manifest with the model, let running calls end, and pause."""
        return await _attended(request, pool.weights.start_weight_update(body))

    @calls.post("/update_weights/", responses=problems)
    async def update_weights(request: Request, body: Phase) -> WeightStatus:
        """Receive the parameters of the manifest over the weight group, and load them."""
        return await _attended(request, pool.weights.update_weights(body))

    @calls.post("/finish_weight_update/", responses=problems)
    async def finish_weight_update(request: Request, body: Phase) -> SyncReport:
        """Reset the caches, set the new version, and resume generation."""
        report = await _attended(request, pool.weights.finish_weight_update(body))
        pool.telemetry.count_push(report)
        return report

    @calls.post("/load_adapter/", responses=problems, openapi_extra={"requestBody": ADAPTER_BODY})
    async def load_adapter(
        request: Request, version: Annotated[Count, Query()], attempt: Annotated[str, Query()]
    ) -> SyncReport:
        """Answer later calls with a LoRA adapter over the checkpoint's weights.

        The body is peft's safetensors file; its metadata has peft's settings as JSON
        (`AdapterMeta`) under the key `adapter`.
        """
        if request.headers.get("content-type") != BYTES:  # web pages cannot send it cross-site
            raise refusal("bad-request", f"give the header `content-type: {BYTES}`", "body")
        content = await request.body()
        report = await _attended(request, pool.weights.load_adapter(version, attempt, content))
        pool.telemetry.count_push(report)
        return report

    @calls.post("/close_communicator/", responses=problems)
    async def close_communicator(request: Request, body: Phase) -> WeightStatus:
        """Leave the weight group, end a running push, and clear the owner of the server."""
        return await _attended(request, pool.weights.close_communicator(body))

    @calls.post("/sleep/", responses=sleep_problems)
    async def sleep(request: Request, body: Memory) -> WeightStatus:
        """Let running sequences end, and release the GPUs' memory until a push or `/wake_up/`.

        Calls with waiting sequences, and new calls, are refused with `push-needed`. The weights are
        kept in host memory. Without `--share-gpus`, and on the CPU, no memory is
        released.
        """
        return await _attended(request, pool.weights.sleep())

    @calls.post("/wake_up/", responses=sleep_problems)
    async def wake_up(request: Request, body: Memory) -> WeightStatus:
        """Restore the memory, and answer calls again with the same weights."""
        return await _attended(request, pool.weights.wake_up())


def _add_pages(calls: APIRouter, app: FastAPI) -> None:
    """Add the OpenAPI document, and an interactive page that needs no other host."""
    assets = Path(str(resources.files("fastapi_offline"))) / "static"

    @calls.get("/openapi.json/", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(app.openapi())

    @calls.get("/docs/", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(
            title=app.title,
            openapi_url="/openapi.json",
            swagger_js_url="/docs/swagger-ui-bundle.js",
            swagger_css_url="/docs/swagger-ui.css",
            swagger_favicon_url="/docs/favicon.png",
        )

    for name in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png"):
        _add_file(calls, f"/docs/{name}/", assets / name)


def _add_file(calls: APIRouter, path: str, file: Path) -> None:
    @calls.get(path, include_in_schema=False)
    async def asset() -> FileResponse:
        return FileResponse(file)
