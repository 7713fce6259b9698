"""One rollout server over HTTP: typed bodies out and in; foreign errors are translated here.

    ServerUnreachable    no connection, or no whole answer within the deadline
      ConnectionBroken   the connection ended before the whole answer had arrived
    ProblemError         the server refused, or the answer breaks the contract
    ContractError        the token or the host name of `base_url` is refused

Proxies of the environment are ignored. No message shows the token.
"""

import asyncio
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from learner.distributed.waiting import waiting_for
from learner.rollout.answers import parse_rollouts
from shared_contracts.cli import printable
from shared_contracts.errors import ContractError, Problem, ProblemError, RunError
from shared_contracts.infer import InferCall, RolloutEnvelope
from shared_contracts.server_info import (
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    Health,
    Info,
    Live,
    WorldSize,
    given_token,
)
from shared_contracts.weights import (
    CommunicatorReady,
    GroupCall,
    InitCommunicator,
    MoveMemory,
    StartWeightUpdate,
    SyncReport,
    WeightStatus,
)

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)

_PROBE_TIMEOUT_S = 10.0
_FIRST_PAUSE_S = 0.1
# A server is gone if so many checks of `/live/` in a row fail while a call runs.
LIVE_INTERVAL_S = 2.0
_LIVE_TIMEOUT_S = 5.0
_LIVE_FAILURES = 3
# The server has a deadline for each phase of a push. It may answer so much later.
PHASE_MARGIN_S = 30.0
# Size limit of every answer. 1,000 answers of 4,000 tokens with logprobs have 250 MB.
MAX_ANSWER_BYTES = 2**30
# TCP keep-alive notices a dead peer of an idle connection after a minute (CFG-06).
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
_CUT_SHORT = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
_TEMPORARY = (429, 502, 503, 504)
_EXCERPT_CHARACTERS = 200
_FOREIGN = "about:blank"
_ANY_ADDRESS = "0.0.0.0"
_OTHER_LEARNER = (
    ". If the server was not restarted, another learner pushes to it: stop that learner, then "
    "start this run again"
)
_BASE_URL = "rollout_matching.vllm.server.servers[].base_url"


class Clock:
    """`clock()` is the time in seconds, and `clock.sleep` a pause. Tests give another one."""

    def __call__(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def attempts(self, longest_pause_s: float = 2.0) -> Iterator[float]:
        """Yield, again and again, the seconds since the first time; pauses between grow."""
        began, pause_s = self(), _FIRST_PAUSE_S
        while True:
            yield self() - began
            self.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_pause_s)


CLOCK = Clock()


class ServerUnreachable(RunError):
    """A call that did not reach the server, or whose answer did not arrive."""


class ConnectionBroken(ServerUnreachable):
    """A connection that ended before the whole answer had arrived."""


SERVER_ERRORS = (ServerUnreachable, ProblemError)


def may_pass(error: BaseException) -> bool:
    """Return whether the same call can succeed later without any other change."""
    if isinstance(error, ProblemError):
        return error.problem.status in _TEMPORARY and not needs_push(error)
    return isinstance(error, ServerUnreachable)


def needs_push(error: BaseException) -> bool:
    """Return whether the server only needs a full push of weights."""
    return isinstance(error, ProblemError) and error.problem.kind == "push-needed"


def may_be_of_a_proxy(error: BaseException) -> bool:
    """Return whether a proxy that ends long calls can cause this error."""
    if isinstance(error, ProblemError):
        return error.problem.status in (502, 504) and error.problem.type == _FOREIGN
    return isinstance(error, ConnectionBroken)


class RolloutClient:
    """Calls of one server, with a token. One that no header can carry is a ContractError.

    timeout_s: limit for connecting, for `wait_until_pushable`, and for a phase of a push.
    infer_timeout_s: limit for `/infer/`; None or <= 0: none, neither for generating nor for
        reading the answer (RES-26).
    live_interval_s: between two checks of a server that generates.
    token: None: that of ROLLOUT_SERVER_TOKEN, or of the file that ROLLOUT_SERVER_TOKEN_FILE
        names; empty: none.
    """

    def __init__(
        self,
        base_url: str,
        timeout_s: float = 240.0,
        infer_timeout_s: float | None = None,
        live_interval_s: float = LIVE_INTERVAL_S,
        token: str | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        self.base_url = base_url
        self.timeout_s = timeout_s
        self._infer_timeout_s = infer_timeout_s if (infer_timeout_s or 0.0) > 0 else None
        self._live_interval_s = live_interval_s
        token = given_token(os.environ) if token is None else token
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._probe_s, self._phase_s = min(timeout_s, _PROBE_TIMEOUT_S), timeout_s + PHASE_MARGIN_S
        self._clock = clock

    # --- probes

    def wait_until_pushable(self) -> None:
        """Poll until the server is `check_pushable`. Raises ContractError after `timeout_s`."""
        reason = ""
        with waiting_for(f"the rollout server at {self.base_url}", lambda: reason):
            for waited_s in self._clock.attempts():
                try:
                    self.check_pushable()
                    return
                except SERVER_ERRORS as error:
                    reason = str(error)
                    if not may_pass(error) or waited_s >= self.timeout_s:
                        raise self._not_pushable(error, waited_s) from error

    def check_pushable(self) -> ProblemError | None:
        """Return None if `/health/` answers 200, or its refusal if only a push is missing."""
        try:
            self.health()
        except ProblemError as error:
            if not needs_push(error):
                raise
            return error
        return None

    def health(self) -> Health:
        return self._probe("/health/", Health)

    def live(self) -> Live:
        return self._probe("/live/", Live)

    def info(self) -> Info:
        return self._probe("/info/", Info)

    def world_size(self) -> int:
        return self._probe("/get_world_size/", WorldSize).world_size

    # --- rollouts

    def infer(
        self, call: InferCall, given_up: threading.Event | None = None
    ) -> list[RolloutEnvelope]:
        """Generate; return one envelope per request, in order.

        given_up: set when the answer is no longer needed; read at each check of `/live/`.

        Raises:
            ServerUnreachable: `/live/` failed several times in a row, `infer_timeout_s` is over, or
                the call was given up.
            ProblemError: it refused, or its answer breaks the contract.
        """
        body = call.model_dump(mode="json", exclude_none=True)
        parse, limit_s = partial(parse_rollouts, call=call), self._infer_timeout_s

        async def infer() -> list[RolloutEnvelope]:
            async with self._connections() as http:
                exchange = self._exchange(http, "POST", "/infer/", body, limit_s, parse)
                answer = asyncio.ensure_future(exchange)
                watch = asyncio.ensure_future(self._watch(http, given_up))
                try:
                    await asyncio.wait((answer, watch), return_when=asyncio.FIRST_COMPLETED)
                    return answer.result() if answer.done() else watch.result()
                finally:  # a cancelled call closes its connection, and the server aborts it
                    answer.cancel()
                    watch.cancel()
                    await asyncio.gather(answer, watch, return_exceptions=True)

        return asyncio.run(infer())

    async def _watch(self, http: httpx.AsyncClient, given_up: threading.Event | None) -> NoReturn:
        where, failures, parse = f"POST {self.base_url}/infer/", 0, Live.model_validate_json
        while True:
            await asyncio.sleep(self._live_interval_s)
            if given_up is not None and given_up.is_set():
                raise ServerUnreachable(f"{where}: the call was given up")
            try:
                await self._exchange(http, "GET", "/live/", None, _LIVE_TIMEOUT_S, parse)
                failures = 0
            except (ContractError, *SERVER_ERRORS) as error:
                failures += 1
                if failures == _LIVE_FAILURES:
                    found = f"the server is gone: /live/ failed {failures} times in a row"
                    raise ServerUnreachable(f"{where}: {found} ({error})") from error

    # --- weights

    def init_communicator(self, body: InitCommunicator) -> CommunicatorReady:
        return self._phase("/init_communicator/", body, CommunicatorReady)

    def start_weight_update(self, body: StartWeightUpdate) -> WeightStatus:
        return self._phase("/start_weight_update/", body, WeightStatus)

    def update_weights(self, body: GroupCall) -> WeightStatus:
        return self._phase("/update_weights/", body, WeightStatus)

    def finish_weight_update(self, body: GroupCall) -> SyncReport:
        return self._phase("/finish_weight_update/", body, SyncReport)

    def load_adapter(self, version: int, attempt: str, content: bytes) -> SyncReport:
        path = f"/load_adapter/?version={version}&attempt={attempt}"
        return self._call("POST", path, content, SyncReport, self._phase_s)

    def close_communicator(self, body: GroupCall) -> WeightStatus:
        """Tell the server that the learner leaves; a quick call."""
        sent = body.model_dump(mode="json")
        return self._call("POST", "/close_communicator/", sent, WeightStatus, self._probe_s)

    def sleep(self) -> WeightStatus:
        """Free the memory of the server's GPUs until `wake_up` or a push."""
        return self._phase("/sleep/", MoveMemory(), WeightStatus)

    def wake_up(self) -> WeightStatus:
        return self._phase("/wake_up/", MoveMemory(), WeightStatus)

    # --- one call

    def _probe(self, path: str, kind: type[Body]) -> Body:
        return self._call("GET", path, None, kind, self._probe_s)

    def _phase(self, path: str, body: BaseModel, kind: type[Body]) -> Body:
        return self._call("POST", path, body.model_dump(mode="json"), kind, self._phase_s)

    def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | bytes | None,
        kind: type[Body],
        limit_s: float,
    ) -> Body:
        async def call() -> Body:
            async with self._connections() as http:
                parse = kind.model_validate_json
                return await self._exchange(http, method, path, body, limit_s, parse)

        return asyncio.run(call())

    def _connections(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(verify=_tls(), socket_options=_KEEP_ALIVE),
            headers={"Accept-Encoding": "identity", **self._headers},
            timeout=httpx.Timeout(None, connect=self.timeout_s),
            trust_env=False,
        )

    async def _exchange(
        self,
        http: httpx.AsyncClient,
        method: str,
        path: str,
        body: dict[str, Any] | bytes | None,
        limit_s: float | None,
        parse: Callable[[bytes], T],
    ) -> T:
        """Send bytes as they are, or anything else but None as JSON; return the parsed answer.

        limit_s: for all of it. parse: raises ValueError for a body that breaks the contract.
        """
        where, content = f"{method} {self.base_url}{path.partition('?')[0]}", bytearray()
        sent: dict[str, Any] = {"json": body}
        if isinstance(body, bytes):
            sent = {"content": body, "headers": {"Content-Type": "application/octet-stream"}}
        try:
            async with (
                asyncio.timeout(limit_s),
                http.stream(method, f"{self.base_url}{path}", **sent) as response,
            ):
                async for piece in response.aiter_bytes():
                    content += piece
                    if len(content) > MAX_ANSWER_BYTES:
                        found = f"its body is longer than {MAX_ANSWER_BYTES} bytes"
                        raise ProblemError(_foreign(response, where, found))
        except (TimeoutError, httpx.TimeoutException) as error:
            raise ServerUnreachable(f"{where}: timed out") from error
        except (httpx.RequestError, httpx.InvalidURL) as error:
            kind = ConnectionBroken if isinstance(error, _CUT_SHORT) else ServerUnreachable
            raise kind(f"{where}: {_reason(error)}") from error
        if not response.is_success:
            raise self._refusal(response, bytes(content), where)
        try:
            return parse(bytes(content))
        except ValueError as error:
            found = _fault(error) or _excerpt(bytes(content))
            raise ProblemError(_foreign(response, where, found)) from None

    # --- refusals

    def _refusal(self, response: httpx.Response, content: bytes, where: str) -> Exception:
        if response.status_code == httpx.codes.UNAUTHORIZED:
            return self._token_refused(where)
        try:
            problem = Problem.model_validate_json(content)
            problem = problem.model_copy(update={"where": f"{where} {problem.where}"})
        except ValidationError:  # of a proxy
            problem = _foreign(response, where, _excerpt(content))
        if response.status_code == httpx.codes.MISDIRECTED_REQUEST:
            return ContractError(where, problem.detail, self._address_advice())
        if problem.kind == "other-weights":
            problem.detail += _OTHER_LEARNER
        return ProblemError(problem)

    def _token_refused(self, where: str) -> ContractError:
        source = TOKEN_FILE_VARIABLE if os.environ.get(TOKEN_FILE_VARIABLE) else TOKEN_VARIABLE
        found = f"the server refuses the token of {source}"
        return ContractError(
            where,
            found if self._headers else "the server needs a token, and the learner has none",
            f"Set {TOKEN_VARIABLE} to the token the server was started with, or name its file in "
            f"{TOKEN_FILE_VARIABLE}",
        )

    def _address_advice(self) -> str:
        """Return which side to change if the server does not serve the host of `base_url`."""
        host = urlsplit(self.base_url).hostname
        if host == _ANY_ADDRESS:
            return (
                f"Change the learner's {_BASE_URL}: {host} is an address to listen on; write the "
                "address of the server's machine, or 127.0.0.1 on the same machine"
            )
        return (
            f"Change the server: start it with `--allowed-host {host}`; or change the learner's "
            f"{_BASE_URL}: write the address on which the server listens (its `--host`)"
        )

    def _not_pushable(self, error: RunError, waited_s: float) -> ContractError:
        where = f"GET {self.base_url}/health/"
        if isinstance(error, ProblemError) and error.problem.kind == "not-ready":
            return ContractError(
                where,
                f"the server is up, and not ready after {waited_s:.0f} s: {error.problem.detail}",
                "Wait until it is ready (`/health/` answers 200), then start again; or raise "
                "rollout_matching.vllm.server.timeout_s",
            )
        do = f"Start the server with `rollout-server serve`, or correct {_BASE_URL}"
        if urlsplit(self.base_url).hostname == _ANY_ADDRESS:
            do = self._address_advice()
        return ContractError(where, f"no healthy answer in {waited_s:.0f} s ({error})", do)


@cache
def _tls() -> ssl.SSLContext:
    """Return the TLS context, made once: reading the certificates takes longer than a call."""
    return httpx.create_ssl_context()


def _reason(error: BaseException) -> str:
    """Describe why there is no answer: the system's error where one is the first cause."""
    root: BaseException | None = error
    while root is not None:
        if isinstance(root, ConnectionError) and root.errno is not None:
            return f"[Errno {root.errno}] {os.strerror(root.errno)}"
        if isinstance(root, BaseExceptionGroup):
            root = root.exceptions[0]
        else:
            root = root.__cause__ or root.__context__
    return str(error) or type(error).__name__


def _fault(error: ValueError) -> str:
    """Name the first wrong field and its fault; empty for a body that is not JSON."""
    if not isinstance(error, ValidationError):
        return str(error)
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if fault["type"] == "json_invalid":
        return ""
    names = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in fault["loc"]]
    return f"{''.join(names).removeprefix('.')}: {fault['msg']}"


def _excerpt(content: bytes) -> str:
    text = content[:4096].decode(errors="replace")
    return printable(" ".join(text.split()), most=_EXCERPT_CHARACTERS)


def _foreign(response: httpx.Response, where: str, detail: str) -> Problem:
    title = "Not an answer of a rollout server" if response.is_success else response.reason_phrase
    return Problem(
        type=_FOREIGN,
        title=printable(title, most=_EXCERPT_CHARACTERS),
        status=response.status_code,
        detail=detail,
        where=where,
    )
