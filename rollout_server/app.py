"""The HTTP face of a pool: routes in, typed bodies out (WIRE-06); no vLLM here."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Lifespan

from rollout_server.pool import Pool
from rollout_server.problems import install_problem_handlers
from shared_contracts.errors import PROBLEM_MEDIA_TYPE, PROBLEM_TITLES, Problem
from shared_contracts.infer import ChatCompletionResponse, InferCall, RolloutEnvelope
from shared_contracts.server_info import Health, Live, WorldSize
from shared_contracts.weights import (
    CommunicatorReady,
    FinishWeightUpdate,
    InitCommunicator,
    StartWeightUpdate,
    SyncReport,
    UpdateWeights,
    WeightStatus,
)

T = TypeVar("T")

PROBE_PROBLEMS = ("not-ready", "weights-poisoned")
INFER_PROBLEMS = ("bad-request", "invalid-request", "not-ready", "weights-poisoned")
WEIGHT_PROBLEMS = (
    *INFER_PROBLEMS,
    "weight-update-order",
    "group-port-taken",
    "weight-transfer-failed",
    "weight-transfer-timeout",
)


def create_app(pool: Pool, lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    app = FastAPI(
        title="Rollmatch rollout server",
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        responses=_problem_responses(("internal",)),
    )
    install_problem_handlers(app)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    _add_probes(app, pool)
    _add_infer(app, pool)
    _add_weight_updates(app, pool)
    return app


def _add_probes(app: FastAPI, pool: Pool) -> None:
    @_route(app, "GET", "/health/", PROBE_PROBLEMS)
    async def health() -> Health:
        """200 while the server answers calls; a call during a weight update waits."""
        return pool.health()

    @_route(app, "GET", "/live/")
    async def live() -> Live:
        return pool.live()

    @_route(app, "GET", "/get_world_size/")
    async def get_world_size() -> WorldSize:
        return pool.world_size()


def _add_infer(app: FastAPI, pool: Pool) -> None:
    @_route(app, "POST", "/infer/", INFER_PROBLEMS)
    async def infer(
        call: InferCall, request: Request, envelope: Annotated[bool, Query()] = True
    ) -> list[RolloutEnvelope] | list[ChatCompletionResponse]:
        """One rollout per request, in order; `?envelope=0` leaves ours off."""
        rollouts = await until_disconnect(pool.infer(call), request)
        return rollouts if envelope else [rollout.response for rollout in rollouts]


def _add_weight_updates(app: FastAPI, pool: Pool) -> None:
    @_route(app, "POST", "/init_communicator/", WEIGHT_PROBLEMS)
    async def init_communicator(body: InitCommunicator) -> CommunicatorReady:
        return await pool.weights.init_communicator(body)

    @_route(app, "POST", "/start_weight_update/", WEIGHT_PROBLEMS)
    async def start_weight_update(body: StartWeightUpdate) -> WeightStatus:
        return await pool.weights.start(body)

    @_route(app, "POST", "/update_weights/", WEIGHT_PROBLEMS)
    async def update_weights(body: UpdateWeights) -> WeightStatus:
        return await pool.weights.receive(body)

    @_route(app, "POST", "/finish_weight_update/", WEIGHT_PROBLEMS)
    async def finish_weight_update(body: FinishWeightUpdate) -> SyncReport:
        return await pool.weights.finish(body)

    @_route(app, "POST", "/close_communicator/", WEIGHT_PROBLEMS)
    async def close_communicator() -> WeightStatus:
        return await pool.weights.close_communicator()


Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


def _route(
    app: FastAPI, method: str, path: str, problems: tuple[str, ...] = ()
) -> Callable[[Handler], Handler]:
    """Serve `path` with and without its trailing slash; the schema shows it once."""
    responses = _problem_responses(problems)

    def add(handler: Handler) -> Handler:
        for variant, in_schema in ((path, True), (path.rstrip("/"), False)):
            app.add_api_route(
                variant,
                handler,
                methods=[method],
                responses=responses,
                include_in_schema=in_schema,
            )
        return handler

    return add


def _problem_responses(problems: tuple[str, ...]) -> dict[int | str, dict[str, Any]]:
    schema = {PROBLEM_MEDIA_TYPE: {"schema": Problem.model_json_schema()}}
    responses: dict[int | str, dict[str, Any]] = {}
    for kind in problems:
        status, title = PROBLEM_TITLES[kind]
        responses[status] = {"description": title, "content": schema}
    return responses


async def until_disconnect(work: Coroutine[Any, Any, T], request: Request) -> T:
    """Run `work`; cancel it and raise ClientDisconnect when the client goes (SRV-07)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    """Wait for the end of the connection: its body has been read already."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _answer_nobody(_: Request, error: Exception) -> Response:
    assert isinstance(error, ClientDisconnect)
    return Response(status_code=499)
