"""The HTTP face of a pool: routes in, typed bodies out (WIRE-06); no vLLM here."""

import os
from collections import defaultdict
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Header, Query, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect
from starlette.types import Lifespan

from rollout_server.access_log import AccessLog
from rollout_server.answers import Answers
from rollout_server.auth import BearerToken, declare_token
from rollout_server.call_record import CallRecord
from rollout_server.limits import BodyLimit, CallLimit, check_size
from rollout_server.paths import PlainPaths
from rollout_server.pool import Pool
from rollout_server.problems import install_problem_handlers
from rollout_server.race import unless
from rollout_server.secret import read_token
from rollout_server.settings import ServerSettings
from shared_contracts.cli import DISTRIBUTION
from shared_contracts.errors import PROBLEM_MEDIA_TYPE, PROBLEM_TITLES, Problem
from shared_contracts.infer import ChatCompletionResponse, InferCall, RolloutEnvelope
from shared_contracts.server_info import Health, Info, Live, WorldSize
from shared_contracts.weights import (
    CloseCommunicator,
    CommunicatorReady,
    FinishWeightUpdate,
    InitCommunicator,
    KeepCommunicator,
    StartWeightUpdate,
    SyncReport,
    UpdateWeights,
    WeightStatus,
)

PROBE_PROBLEMS = ("not-ready", "push-needed", "weights-poisoned")
BODY_PROBLEMS = (
    "bad-request",
    "body-too-large",
    "invalid-request",
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

Envelopes = list[RolloutEnvelope]
Bare = list[ChatCompletionResponse]
ENVELOPES = TypeAdapter(Envelopes)
BARE = TypeAdapter(Bare)


def create_app(pool: Pool, lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    """The routes over `pool`, with the bounds, the token and the access log around them."""
    app = FastAPI(
        title="Rollmatch rollout server",
        version=version(DISTRIBUTION),
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        responses=_problem_responses(("internal",)),
    )
    install_problem_handlers(app)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    _add_probes(app, pool)
    _add_infer(app, pool, Answers())
    _add_weight_updates(app, pool)
    _guard(app, pool.settings)
    app.add_middleware(AccessLog, telemetry=pool.telemetry)
    app.add_middleware(PlainPaths)
    return app


def _guard(app: FastAPI, settings: ServerSettings) -> None:
    """Put the bounds and the token around all routes; what is added last looks first."""
    app.add_middleware(CallLimit, max_calls=settings.max_concurrent_calls)
    app.add_middleware(BodyLimit, max_bytes=int(settings.max_body_mib * 2**20))
    token = read_token(settings, os.environ)
    if token is not None:
        app.add_middleware(BearerToken, token=token)
        declare_token(app.openapi(), _problem_responses(("unauthorized",))[401])


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


def _add_infer(app: FastAPI, pool: Pool, answers: Answers) -> None:
    @_route(app, "POST", "/infer/", INFER_PROBLEMS, response_model=Envelopes | Bare)
    async def infer(
        call: InferCall,
        request: Request,
        envelope: Annotated[bool, Query()] = True,
        rollout_envelope: Annotated[bool, Header()] = True,
    ) -> Response:
        """One rollout per request, in order.

        `?envelope=0`, or the header `Rollout-Envelope: 0`, leaves ours off.
        """
        record: CallRecord = request.state.call_record
        record.request_id, record.requests = call.request_id, len(call.infer_requests)
        check_size(call, pool.settings)

        async def generate() -> bytes:
            envelopes = await pool.infer(call, record)
            pool.telemetry.count_answers(record)
            return ENVELOPES.dump_json(envelopes)

        body, record.repeated = await unless(
            _disconnected(request),
            answers.give(call.request_id, await request.body(), generate),
            ClientDisconnect(),
        )
        if not (envelope and rollout_envelope):
            body = BARE.dump_json([answer.response for answer in ENVELOPES.validate_json(body)])
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

    @_route(app, "POST", "/keep_communicator/", WEIGHT_PROBLEMS)
    async def keep_communicator(body: KeepCommunicator) -> WeightStatus:
        """Note that the learner of the weight group lives; `/info/` tells who would take it."""
        return pool.weights.keep(body.attempt)

    @_route(app, "POST", "/close_communicator/", WEIGHT_PROBLEMS)
    async def close_communicator(body: CloseCommunicator | None = None) -> WeightStatus:
        """Leave the weight group; an update that ran over it is given up."""
        return await pool.weights.close_communicator(None if body is None else body.attempt)


Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


def _route(
    app: FastAPI, method: str, path: str, problems: tuple[str, ...] = (), **options: Any
) -> Callable[[Handler], Handler]:
    """Serve `path` with and without its trailing slash; the schema shows it once.

    options: of FastAPI's route, beside the answers that are problems.
    """
    responses = _problem_responses(problems)

    def add(handler: Handler) -> Handler:
        for variant, in_schema in ((path, True), (path.rstrip("/"), False)):
            app.add_api_route(
                variant,
                handler,
                methods=[method],
                responses=responses,
                include_in_schema=in_schema,
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


async def _disconnected(request: Request) -> None:
    """Wait for the end of the connection (SRV-07): its body has been read already."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _answer_nobody(_: Request, error: Exception) -> Response:
    assert isinstance(error, ClientDisconnect)
    return Response(status_code=499)
