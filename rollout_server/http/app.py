"""The HTTP face of a pool: routes in, typed bodies out (WIRE-06); no vLLM here."""

import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Header, Query, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect
from starlette.types import Lifespan

from rollout_server.http.bodies import (
    PIECE_REQUESTS,
    StrictRoute,
    declare_body,
    disconnected,
    read_infer_call,
)
from rollout_server.http.chat_completions import OpenAIErrors, add_chat_completions
from rollout_server.http.idempotency import IdempotentCalls
from rollout_server.http.middleware import (
    AccessLog,
    BearerToken,
    BodyLimit,
    OwnSite,
    Places,
    PlainPaths,
    check_size,
    declare_token,
)
from rollout_server.http.problems import install_problem_handlers
from rollout_server.runtime.concurrency import cancel_when, in_pieces
from rollout_server.serving.pool import Pool
from rollout_server.serving.telemetry import CallRecord
from rollout_server.settings.options import ServerSettings
from rollout_server.settings.preflight import is_loopback, read_token
from shared_contracts.cli import DISTRIBUTION
from shared_contracts.errors import PROBLEM_MEDIA_TYPE, PROBLEM_TITLES, Problem
from shared_contracts.infer import (
    ChatCompletionResponse,
    InferCall,
    RequestConfig,
    RolloutEnvelope,
)
from shared_contracts.server_info import Health, Info, Live, WorldSize
from shared_contracts.weights import (
    CloseCommunicator,
    CommunicatorReady,
    FinishWeightUpdate,
    InitCommunicator,
    KeepCommunicator,
    MoveMemory,
    StartWeightUpdate,
    SyncReport,
    UpdateWeights,
    WeightStatus,
)

CONNECTION_PROBLEMS = (
    "internal",
    "foreign-origin",
    "too-slow",
    "misdirected",
    "header-too-large",
    "too-many-connections",
)
PROBE_PROBLEMS = ("not-ready", "push-needed", "weights-poisoned")
BODY_PROBLEMS = (
    "bad-request",
    "body-too-large",
    "invalid-request",
    "overloaded",
    "not-ready",
    "push-needed",
    "weights-poisoned",
)
INFER_PROBLEMS = (*BODY_PROBLEMS, "other-weights", "too-many-calls")
WEIGHT_PROBLEMS = (
    *BODY_PROBLEMS,
    "weight-update-order",
    "group-port-taken",
    "manifest-mismatch",
    "adapter-refused",
    "weight-transfer-failed",
    "weights-differ",
    "weight-transfer-timeout",
)

SLEEP_PROBLEMS = (*BODY_PROBLEMS, "weight-update-order", "weight-transfer-timeout")

Envelopes = list[RolloutEnvelope]
Bare = list[ChatCompletionResponse]
# Between two answers; no JSON has a line break in a string.
SEPARATOR = b",\n"


def create_app(pool: Pool, lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    """The routes over `pool`, with the bounds, the token and the access log around them."""
    app = FastAPI(
        title="Rollmatch rollout server",
        version=version(DISTRIBUTION),
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        responses=_problem_responses(CONNECTION_PROBLEMS),
    )
    app.router.route_class = StrictRoute
    install_problem_handlers(app)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    _add_probes(app, pool)
    places = Places(pool.settings.max_concurrent_calls)
    _add_infer(app, pool, IdempotentCalls(), places)
    if pool.settings.openai:
        add_chat_completions(app, pool, places)
    _add_weight_updates(app, pool)
    _add_docs(app)
    declare_body(app.openapi(), "/infer/", InferCall)
    _guard(app, pool.settings)
    app.add_middleware(AccessLog, telemetry=pool.telemetry)
    if pool.settings.openai:
        app.add_middleware(OpenAIErrors)
    app.add_middleware(PlainPaths)
    return app


def _guard(app: FastAPI, settings: ServerSettings) -> None:
    """Put the bounds and the token around all routes; what is added last looks first."""
    app.add_middleware(
        BodyLimit,
        max_bytes=int(settings.max_body_mib * 2**20),
        max_held=int(settings.max_bodies_mib * 2**20),
    )
    token = read_token(settings, os.environ)
    if token is not None:
        app.add_middleware(BearerToken, token=token)
        declare_token(app.openapi(), _problem_responses(("unauthorized",))[401])
    # Off loopback a token is needed, which no page of another site has.
    hosts = settings.allowed_hosts if is_loopback(settings.host) else None
    app.add_middleware(OwnSite, hosts=hosts)


def _add_probes(app: FastAPI, pool: Pool) -> None:
    @_route(app, "GET", "/health/", PROBE_PROBLEMS)
    async def health() -> Health:
        """200 while every replica can answer; a call during a weight update waits."""
        return pool.health()

    @_route(app, "GET", "/live/")
    async def live() -> Live:
        """That the process turns, and when each engine last answered; needs no engine."""
        return pool.live()

    @_route(app, "GET", "/get_world_size/")
    async def get_world_size() -> WorldSize:
        """Devices of all replicas: how many sequences the learner keeps in flight follows."""
        return pool.world_size()

    @_route(app, "GET", "/info/")
    async def info() -> Info:
        """What this server is; while its engines start, too."""
        return pool.info()

    @_route(app, "GET", "/metrics/", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Counters, seconds and gauges in Prometheus' text format."""
        return PlainTextResponse(pool.telemetry.exposition(), media_type=CONTENT_TYPE_LATEST)


def _add_infer(app: FastAPI, pool: Pool, calls: IdempotentCalls, places: Places) -> None:
    @_route(app, "POST", "/infer/", INFER_PROBLEMS, response_model=Envelopes | Bare)
    async def infer(
        request: Request,
        envelope: Annotated[bool, Query()] = True,
        rollout_envelope: Annotated[bool, Header()] = True,
    ) -> Response:
        """One rollout per request, in order.

        `?envelope=0`, or the header `Rollout-Envelope: 0`, leaves ours off.
        """
        places.require_one()
        sent = await request.body()
        with places.take():
            call = await read_infer_call(sent, pool.settings.max_requests_per_call)
            record: CallRecord = request.state.call_record
            record.request_id, record.requests = call.request_id, len(call.infer_requests)
            n = (call.request_config or RequestConfig()).n
            check_size(record.requests, n, pool.settings, "request_config.n")

            async def generate() -> bytes:
                envelopes = await pool.infer(call, record)
                pool.telemetry.count_answers(record)
                return await _in_lines(map(RolloutEnvelope.model_dump_json, envelopes))

            body, record.repeated = await cancel_when(
                disconnected(request),
                calls.give(call.request_id, sent, generate),
                ClientDisconnect(),
            )
        if not (envelope and rollout_envelope):
            lines = body[1:-1].split(SEPARATOR) if len(body) > len(b"[]") else []
            body = await _in_lines(map(_without_envelope, lines))
        # Serialized above, and validated when it was built: FastAPI need not do so again.
        return Response(body, media_type="application/json")


def _add_weight_updates(app: FastAPI, pool: Pool) -> None:
    @_route(app, "POST", "/init_communicator/", WEIGHT_PROBLEMS)
    async def init_communicator(body: InitCommunicator) -> CommunicatorReady:
        """Form the weight group of the learner and all workers; the one before it is left."""
        return await pool.weights.init_communicator(body)

    @_route(app, "POST", "/start_weight_update/", WEIGHT_PROBLEMS)
    async def start_weight_update(body: StartWeightUpdate) -> WeightStatus:
        """Let running calls end, pause, and hold the manifest against what the model expects."""
        return await pool.weights.start(body)

    @_route(app, "POST", "/update_weights/", WEIGHT_PROBLEMS)
    async def update_weights(body: UpdateWeights) -> WeightStatus:
        """Receive and load the parameters of the manifest, which travel over the weight group."""
        return await pool.weights.receive(body)

    @_route(app, "POST", "/finish_weight_update/", WEIGHT_PROBLEMS)
    async def finish_weight_update(body: FinishWeightUpdate) -> SyncReport:
        """Verify, reset the caches, take the new version, and answer calls again."""
        report = await pool.weights.finish(body)
        if not report.trial:
            pool.telemetry.count_push(report)
        return report

    @_route(app, "POST", "/sleep/", SLEEP_PROBLEMS)
    async def sleep(body: MoveMemory) -> WeightStatus:
        """Let running calls end and give the memory of the GPUs up, until a push or `/wake_up/`.

        The weights are kept in host memory. On GPUs this needs `--share-gpus`; without it, and on
        the CPU, the memory is kept.
        """
        return await pool.weights.sleep()

    @_route(app, "POST", "/wake_up/", SLEEP_PROBLEMS)
    async def wake_up(body: MoveMemory) -> WeightStatus:
        """Take the memory back and answer calls again, with the same weights."""
        return await pool.weights.wake_up()

    @_route(app, "POST", "/keep_communicator/", WEIGHT_PROBLEMS)
    async def keep_communicator(body: KeepCommunicator) -> WeightStatus:
        """Note that the learner of the weight group lives; one that is silent is given up."""
        return pool.weights.heartbeat(body.attempt)

    @_route(app, "POST", "/close_communicator/", WEIGHT_PROBLEMS)
    async def close_communicator(body: CloseCommunicator) -> WeightStatus:
        """Leave the weight group; an update that ran over it is given up."""
        return await pool.weights.close_communicator(body.attempt)


def _add_docs(app: FastAPI) -> None:
    """Serve the OpenAPI document, and a page to read and try it with no file from elsewhere."""
    assets = Path(str(resources.files("fastapi_offline"))) / "static"
    page = get_swagger_ui_html(
        title=app.title,
        openapi_url="/openapi.json",
        swagger_js_url="/docs/swagger-ui-bundle.js",
        swagger_css_url="/docs/swagger-ui.css",
        swagger_favicon_url="/docs/favicon.png",
    )

    @_route(app, "GET", "/openapi.json/", in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(app.openapi())

    @_route(app, "GET", "/docs/", in_schema=False)
    async def docs() -> HTMLResponse:
        return page

    for name in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png"):
        _add_file(app, f"/docs/{name}/", assets / name)


def _add_file(app: FastAPI, path: str, file: Path) -> None:
    @_route(app, "GET", path, in_schema=False)
    async def asset() -> FileResponse:
        return FileResponse(file)


Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


def _route(
    app: FastAPI,
    method: str,
    path: str,
    problems: tuple[str, ...] = (),
    *,
    in_schema: bool = True,
    **options: Any,
) -> Callable[[Handler], Handler]:
    """Serve `path` with and without its trailing slash; the schema shows it once, or never.

    options: of FastAPI's route, beside the answers that are problems.
    """
    responses = _problem_responses(problems)

    def add(handler: Handler) -> Handler:
        for variant in (path, path.rstrip("/")):
            app.add_api_route(
                variant,
                handler,
                methods=[method],
                responses=responses,
                include_in_schema=in_schema and variant == path,
                **options,
            )
        return handler

    return add


def _problem_responses(problems: tuple[str, ...]) -> dict[int | str, dict[str, Any]]:
    schema = {PROBLEM_MEDIA_TYPE: {"schema": Problem.model_json_schema()}}
    titles: dict[int, list[str]] = defaultdict(list)
    for kind in problems:
        status, title = PROBLEM_TITLES[kind]
        titles[status].append(title)
    return {
        status: {"description": "; or: ".join(of_status), "content": schema}
        for status, of_status in titles.items()
    }


async def _in_lines(answers: Iterable[str]) -> bytes:
    """A JSON list of one line each, made a piece at a time."""
    lines = [answer.encode() async for answer in in_pieces(answers, PIECE_REQUESTS)]
    return b"[" + SEPARATOR.join(lines) + b"]"


def _without_envelope(line: bytes) -> str:
    return RolloutEnvelope.model_validate_json(line).response.model_dump_json()


async def _answer_nobody(_: Request, error: Exception) -> Response:
    assert isinstance(error, ClientDisconnect)
    return Response(status_code=499)
