"""One rollout server over HTTP: typed bodies out and in, foreign errors translated here.

    probes, phases of a push   one blocking call each, within a limit
    infer                      as long as it takes, while `/live/` says that the server is there

Environment proxies are ignored: servers are addressed directly, often on loopback. The
token of configured servers comes from the environment alone; none is ever shown.
"""

import asyncio
import os
import socket
import ssl
import threading
import time
from functools import cache
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from shared_contracts.errors import ContractError, Problem, ProblemError, RunError
from shared_contracts.infer import InferCall, RolloutEnvelope
from shared_contracts.server_info import (
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    Health,
    Info,
    Live,
    WorldSize,
    process_of,
)
from shared_contracts.token_file import given_token
from shared_contracts.weights import (
    KEEP_EVERY_S,
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

_CONNECT_TIMEOUT_S = 10.0
_PROBE_TIMEOUT_S = 10.0
# While a call runs, a server that is silent for so many looks in a row is gone.
LIVE_INTERVAL_S = 2.0
_LIVE_TIMEOUT_S = 5.0
_LIVE_FAILURES = 3
# The server bounds the phases of a weight update itself; so much longer it may say so.
_PHASE_MARGIN_S = 30.0
# What a busy server, a gateway or a server that is starting says; nothing else passes.
_TOO_MANY = 429
_PASSING = (_TOO_MANY, 502, 503, 504)
# What only a full push can change.
_NEEDS_PUSH = {Problem.of(kind, "", "").type for kind in ("weights-poisoned", "push-needed")}
_OTHER_WEIGHTS = Problem.of("other-weights", "", "").type
_UNAUTHORIZED = 401
_ENVELOPES = TypeAdapter(list[RolloutEnvelope])

# A dead peer is noticed on an idle connection after about a minute (CFG-06).
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]

Answer = TypeVar("Answer")


class ServerUnreachable(RunError):
    """A call did not reach the server, or its answer did not come back."""


class OtherWeights(ProblemError):
    """A server would have answered with other weights than it was asked for (WIRE-03)."""

    def __str__(self) -> str:
        return (
            f"{super().__str__()}. Unless the server was started anew, another learner pushes "
            "to it: end that one, then start this run again"
        )


class TooManyCalls(ProblemError):
    """The server is busy. `retry_after_s`: the pause it asks for, if it says so in seconds."""

    def __init__(self, problem: Problem, retry_after_s: float | None) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s


SERVER_ERRORS = (ServerUnreachable, ProblemError)


def may_pass(error: BaseException) -> bool:
    """Whether the same call may succeed later, without anything being done about it."""
    if isinstance(error, ProblemError):
        return error.problem.status in _PASSING and not needs_push(error)
    return isinstance(error, ServerUnreachable)


def needs_push(error: BaseException) -> bool:
    """Whether the server is well but for its weights, which only a full push can change."""
    return isinstance(error, ProblemError) and error.problem.type in _NEEDS_PUSH


class RolloutClient:
    """Calls of one server. `infer_timeout_s` None or <= 0 sets no limit on `/infer/`.

    Every call carries the token of ROLLOUT_SERVER_TOKEN, or of the file that
    ROLLOUT_SERVER_TOKEN_FILE names, where one is set; a token that no header can carry, and
    one that the server refuses, is a ContractError.

    live_interval_s: between two looks at a server that generates.
    token: of a server of the learner's own, in place of the environment's.
    """

    def __init__(
        self,
        base_url: str,
        timeout_s: float = 240.0,
        infer_timeout_s: float | None = None,
        live_interval_s: float = LIVE_INTERVAL_S,
        token: str | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self._infer_timeout = infer_timeout_s if infer_timeout_s and infer_timeout_s > 0 else None
        self._live_interval_s = live_interval_s
        self._headers = _authorization() if token is None else _bearer(token)
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(verify=_tls(), socket_options=_KEEP_ALIVE),
            headers=self._headers,
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def wait_until_pushable(self) -> None:
        """Poll until the server is `check_pushable`.

        Raises:
            ContractError: the server was not there or not ready within `timeout_s`, or
                what answers is no rollout server.
        """
        retry = Retrying(
            retry=retry_if_exception(may_pass),
            stop=stop_after_delay(self.timeout_s),
            wait=wait_exponential(multiplier=0.1, max=2.0),
            reraise=True,
        )
        started = time.monotonic()
        try:
            retry(self.check_pushable)
        except SERVER_ERRORS as error:
            waited = time.monotonic() - started
            raise ContractError(
                f"GET {self.base_url}/health/",
                f"no healthy answer in {waited:.0f} s ({error})",
                "Start the server with `rollout-server serve`, or correct "
                "rollout_matching.vllm.server.servers[].base_url",
            ) from error

    def check_pushable(self) -> None:
        """Returns when `/health/` says 200, or that only a full push is missing; else raises."""
        try:
            self.health()
        except ProblemError as error:
            if not needs_push(error):
                raise

    def health(self) -> Health:
        return self._get("/health/", Health)

    def live(self) -> Live:
        return self._get("/live/", Live)

    def info(self) -> Info:
        return self._get("/info/", Info)

    def world_size(self) -> int:
        return self._get("/get_world_size/", WorldSize).world_size

    def infer(
        self,
        call: InferCall,
        server_epoch: str | None = None,
        given_up: threading.Event | None = None,
    ) -> list[RolloutEnvelope]:
        """Generate; one envelope per request, in order.

        The server may be slow, but not gone: it is when `/live/` fails several times in a
        row, or another process than that of `server_epoch` (else of the first look) answers.

        given_up: set when nobody wants the answer any more; seen at the next look.

        Raises:
            ServerUnreachable: the server is gone, or not done within `infer_timeout_s`, or
                the call was given up.
            ProblemError: it refused, or its answer breaks the contract.
        """
        where = self._where("POST", "/infer/")
        response = asyncio.run(self._infer_while_live(where, call, server_epoch, given_up))
        envelopes = _read(response, where, _ENVELOPES)
        if len(envelopes) != len(call.infer_requests):
            found = f"{len(envelopes)} envelopes for {len(call.infer_requests)} requests"
            raise ProblemError(_foreign(response, where, found))
        return envelopes

    def init_communicator(self, body: InitCommunicator) -> CommunicatorReady:
        return self._phase("/init_communicator/", body, CommunicatorReady)

    def start_weight_update(self, body: StartWeightUpdate) -> WeightStatus:
        return self._phase("/start_weight_update/", body, WeightStatus)

    def update_weights(self, body: UpdateWeights) -> WeightStatus:
        return self._phase("/update_weights/", body, WeightStatus)

    def finish_weight_update(self, body: FinishWeightUpdate) -> SyncReport:
        return self._phase("/finish_weight_update/", body, SyncReport)

    def keep_communicator(self, attempt: str) -> WeightStatus:
        """Tell the server that the learner of this attempt's group lives.

        One that takes long is given up, as it is time for the next.
        """
        body = KeepCommunicator(attempt=attempt).model_dump(mode="json")
        answer = TypeAdapter(WeightStatus)
        limit_s = min(self.timeout_s, KEEP_EVERY_S)
        return self._send("POST", "/keep_communicator/", body, limit_s, answer)

    def close_communicator(self, attempt: str) -> WeightStatus:
        """Have the server leave the group of this attempt; another's stays."""
        body = CloseCommunicator(attempt=attempt)
        return self._phase("/close_communicator/", body, WeightStatus)

    async def _infer_while_live(
        self,
        where: str,
        call: InferCall,
        server_epoch: str | None,
        given_up: threading.Event | None,
    ) -> httpx.Response:
        body = call.model_dump(mode="json", exclude_none=True)
        transport = httpx.AsyncHTTPTransport(verify=_tls(), socket_options=_KEEP_ALIVE)
        async with httpx.AsyncClient(
            transport=transport, headers=self._headers, trust_env=False
        ) as http:
            answer = asyncio.ensure_future(
                http.post(
                    f"{self.base_url}/infer/", json=body, timeout=self._limits(self._infer_timeout)
                )
            )
            gone = asyncio.ensure_future(self._until_gone(http, server_epoch, given_up))
            try:
                await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    raise ServerUnreachable(f"{where}: {gone.result()}")
                return answer.result()
            except httpx.RequestError as error:
                raise _unreachable(where, error) from error
            finally:  # cancelled, a call closes its connection, and the server ends it too
                await _cancel(answer, gone)

    async def _until_gone(
        self, http: httpx.AsyncClient, server_epoch: str | None, given_up: threading.Event | None
    ) -> str:
        """Look at the server again and again; returns why it will not answer any more."""
        process = None if server_epoch is None else process_of(server_epoch)
        failures = 0
        while failures < _LIVE_FAILURES:
            await asyncio.sleep(self._live_interval_s)
            if given_up is not None and given_up.is_set():
                return "the call was given up"
            try:
                response = await http.get(f"{self.base_url}/live/", timeout=_LIVE_TIMEOUT_S)
                live = Live.model_validate_json(response.content)
            except (httpx.RequestError, ValidationError) as error:
                failures, reason = failures + 1, _reason(error)
                continue
            failures, process = 0, process or process_of(live.server_epoch)
            if process_of(live.server_epoch) != process:
                return "the server was started anew meanwhile"
        return f"the server is gone: GET /live/ failed {failures} times in a row ({reason})"

    def _get(self, path: str, answer: type[Answer]) -> Answer:
        return self._send("GET", path, None, self._probe_s, TypeAdapter(answer))

    @property
    def _probe_s(self) -> float:
        return min(self.timeout_s, _PROBE_TIMEOUT_S)

    def _phase(self, path: str, body: BaseModel, answer: type[Answer]) -> Answer:
        sent = body.model_dump(mode="json")
        timeout_s = self.timeout_s + _PHASE_MARGIN_S
        return self._send("POST", path, sent, timeout_s, TypeAdapter(answer))

    def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        timeout_s: float,
        answer: TypeAdapter[Answer],
    ) -> Answer:
        where = self._where(method, path)
        try:
            response = self._http.request(
                method, f"{self.base_url}{path}", json=body, timeout=self._limits(timeout_s)
            )
        except httpx.RequestError as error:
            raise _unreachable(where, error) from error
        return _read(response, where, answer)

    def _where(self, method: str, path: str) -> str:
        return f"{method} {self.base_url}{path}"

    def _limits(self, answer_s: float | None) -> httpx.Timeout:
        """Until the connection stands, and then for the answer; None: no limit."""
        connect_s = min(self.timeout_s, _CONNECT_TIMEOUT_S, answer_s or _CONNECT_TIMEOUT_S)
        return httpx.Timeout(answer_s, connect=connect_s)


@cache
def _tls() -> ssl.SSLContext:
    """Made once: reading the certificates takes longer than a call."""
    return httpx.create_ssl_context()


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _unreachable(where: str, error: httpx.RequestError) -> ServerUnreachable:
    return ServerUnreachable(f"{where}: {_reason(error)}")


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "not an answer of a rollout server"
    if isinstance(error, httpx.TimeoutException):
        return "timed out"
    return str(error) or type(error).__name__


def _read(response: httpx.Response, where: str, answer: TypeAdapter[Answer]) -> Answer:
    if response.status_code == _UNAUTHORIZED:
        raise _unauthorized(where)
    if not response.is_success:
        raise _refusal(_problem_of(response, where), response)
    try:
        return answer.validate_json(response.content)
    except ValidationError:
        raise ProblemError(_foreign(response, where, response.text[:200])) from None


def _authorization() -> dict[str, str]:
    """The header of the token in the environment; empty without one.

    Raises ContractError for a token that no header can carry, and for two that differ.
    """
    token = given_token(os.environ)
    return {} if token is None else _bearer(token)


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def _unauthorized(where: str) -> ContractError:
    if _authorization():
        source = TOKEN_FILE_VARIABLE if os.environ.get(TOKEN_FILE_VARIABLE) else TOKEN_VARIABLE
        found, do = f"the server refuses the token of {source}", "Set it to"
    else:
        found, do = "the server wants a token, and there is none", f"Set {TOKEN_VARIABLE} to"
    return ContractError(where, found, f"{do} the token the server was started with")


def _refusal(problem: Problem, response: httpx.Response) -> ProblemError:
    if problem.type == _OTHER_WEIGHTS:
        return OtherWeights(problem)
    if problem.status == _TOO_MANY:
        pause = response.headers.get("Retry-After", "")
        return TooManyCalls(problem, float(pause) if pause.isdecimal() else None)
    return ProblemError(problem)


def _problem_of(response: httpx.Response, where: str) -> Problem:
    """The problem document of an error answer, also when a proxy wrote another body."""
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        return _foreign(response, where, response.text[:200])
    return problem.model_copy(update={"where": f"{where} {problem.where}"})


def _foreign(response: httpx.Response, where: str, detail: str) -> Problem:
    """An answer that the contract does not know, as a problem."""
    title = response.reason_phrase or "Error"
    return Problem(
        type="about:blank",
        title="Not an answer of a rollout server" if response.is_success else title,
        status=response.status_code,
        detail=detail,
        where=where,
    )
