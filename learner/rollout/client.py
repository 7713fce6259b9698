"""One rollout server over HTTP: typed bodies out and in, foreign errors translated here.

Environment proxies are ignored: servers are addressed directly, often on loopback. The
token of the servers comes from the environment alone, and is never shown.
"""

import os
import socket
import time
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from shared_contracts.errors import ContractError, Problem, ProblemError, RunError
from shared_contracts.infer import InferCall, RolloutEnvelope
from shared_contracts.server_info import TOKEN_VARIABLE, Health, Info, WorldSize
from shared_contracts.weights import (
    CommunicatorReady,
    FinishWeightUpdate,
    InitCommunicator,
    StartWeightUpdate,
    SyncReport,
    UpdateWeights,
    WeightStatus,
)

_PROBE_TIMEOUT_S = 10.0
# The server bounds the phases of a weight update itself; so much longer it may say so.
_PHASE_MARGIN_S = 30.0
# What a gateway or a server that is starting says; anything else will not change by waiting.
_NOT_READY = (502, 503, 504)
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
            f"{super().__str__()}. The server was started anew, or another learner pushes to it: "
            "end that one, then start this run again"
        )


SERVER_ERRORS = (ServerUnreachable, ProblemError)


class RolloutClient:
    """Calls of one server. `infer_timeout_s` None or <= 0 sets no limit on `/infer/`.

    Every call carries the token of ROLLOUT_SERVER_TOKEN, where that is set; a token that no
    header can carry, and one that the server refuses, is a ContractError.
    """

    def __init__(
        self, base_url: str, timeout_s: float = 240.0, infer_timeout_s: float | None = None
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self._infer_timeout = infer_timeout_s if infer_timeout_s and infer_timeout_s > 0 else None
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(socket_options=_KEEP_ALIVE),
            headers=_authorization(),
            trust_env=False,
            timeout=timeout_s,
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
        """Poll `/health/` until it says 200, or that only a full push is missing.

        Raises:
            ContractError: the server was not there or not ready within `timeout_s`, or
                what answers is no rollout server.
        """
        retry = Retrying(
            retry=retry_if_exception(_may_pass),
            stop=stop_after_delay(self.timeout_s),
            wait=wait_exponential(multiplier=0.1, max=2.0),
            reraise=True,
        )
        started = time.monotonic()
        try:
            retry(self.health)
        except SERVER_ERRORS as error:
            if _needs_push(error):
                return
            waited = time.monotonic() - started
            raise ContractError(
                f"GET {self.base_url}/health/",
                f"no healthy answer in {waited:.0f} s ({error})",
                "Start the server with `rollout-server serve`, or correct "
                "rollout_matching.vllm.server.servers[].base_url",
            ) from error

    def health(self) -> Health:
        return self._get("/health/", Health)

    def info(self) -> Info:
        return self._get("/info/", Info)

    def world_size(self) -> int:
        return self._get("/get_world_size/", WorldSize).world_size

    def infer(self, call: InferCall) -> list[RolloutEnvelope]:
        """Generate; one envelope per request, in order."""
        body = call.model_dump(mode="json", exclude_none=True)
        return self._send("POST", "/infer/", body, self._infer_timeout, _ENVELOPES)

    def init_communicator(self, body: InitCommunicator) -> CommunicatorReady:
        return self._phase("/init_communicator/", body, CommunicatorReady)

    def start_weight_update(self, body: StartWeightUpdate) -> WeightStatus:
        return self._phase("/start_weight_update/", body, WeightStatus)

    def update_weights(self, body: UpdateWeights) -> WeightStatus:
        return self._phase("/update_weights/", body, WeightStatus)

    def finish_weight_update(self, body: FinishWeightUpdate) -> SyncReport:
        return self._phase("/finish_weight_update/", body, SyncReport)

    def close_communicator(self) -> WeightStatus:
        return self._phase("/close_communicator/", None, WeightStatus)

    def _get(self, path: str, answer: type[Answer]) -> Answer:
        timeout_s = min(self.timeout_s, _PROBE_TIMEOUT_S)
        return self._send("GET", path, None, timeout_s, TypeAdapter(answer))

    def _phase(self, path: str, body: BaseModel | None, answer: type[Answer]) -> Answer:
        sent = None if body is None else body.model_dump(mode="json")
        timeout_s = self.timeout_s + _PHASE_MARGIN_S
        return self._send("POST", path, sent, timeout_s, TypeAdapter(answer))

    def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        timeout_s: float | None,
        answer: TypeAdapter[Answer],
    ) -> Answer:
        where = f"{method} {self.base_url}{path}"
        try:
            response = self._http.request(
                method, f"{self.base_url}{path}", json=body, timeout=timeout_s
            )
        except httpx.RequestError as error:
            reason = str(error) or type(error).__name__
            raise ServerUnreachable(f"{where}: {reason}") from error
        if response.status_code == _UNAUTHORIZED:
            raise _unauthorized(where)
        if not response.is_success:
            raise _refusal(_problem_of(response, where))
        try:
            return answer.validate_json(response.content)
        except ValidationError:
            raise ProblemError(_foreign(response, where)) from None


def _authorization() -> dict[str, str]:
    """The header of the token in the environment; empty without one."""
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token:
        return {}
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ContractError(
            TOKEN_VARIABLE,
            "holds a blank or a character that no HTTP header can carry",
            "Use a token of plain letters and digits, here and at the server",
        )
    return {"Authorization": f"Bearer {token}"}


def _unauthorized(where: str) -> ContractError:
    if _authorization():
        found, do = f"the server refuses the token of {TOKEN_VARIABLE}", "Set it to"
    else:
        found, do = "the server wants a token, and there is none", f"Set {TOKEN_VARIABLE} to"
    return ContractError(where, found, f"{do} the token the server was started with")


def _refusal(problem: Problem) -> ProblemError:
    return OtherWeights(problem) if problem.type == _OTHER_WEIGHTS else ProblemError(problem)


def _problem_of(response: httpx.Response, where: str) -> Problem:
    """The problem document of an error answer, also when a proxy wrote another body."""
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        return _foreign(response, where)
    return problem.model_copy(update={"where": f"{where} {problem.where}"})


def _foreign(response: httpx.Response, where: str) -> Problem:
    """An answer that the contract does not know, as a problem that shows its first words."""
    title = response.reason_phrase or "Error"
    return Problem(
        type="about:blank",
        title="Not an answer of a rollout server" if response.is_success else title,
        status=response.status_code,
        detail=response.text[:200],
        where=where,
    )


def _may_pass(error: BaseException) -> bool:
    """True for what ends when a server has started."""
    if isinstance(error, ProblemError):
        return error.problem.status in _NOT_READY and not _needs_push(error)
    return isinstance(error, ServerUnreachable)


def _needs_push(error: BaseException) -> bool:
    return isinstance(error, ProblemError) and error.problem.type in _NEEDS_PUSH
