"""One rollout server over HTTP: typed bodies out and in, foreign errors translated here.

    probes, phases of a push   one blocking call each, within a limit
    infer                      no limit while `/live/` answers

Environment proxies are ignored: servers are addressed directly, often on loopback. The
token of configured servers comes from the environment alone; none is ever shown.
"""

import asyncio
import html
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel
from tenacity import Retrying, retry_if_exception, wait_exponential

from learner.distributed.waiting import waiting_for
from learner.rollout.answers import (
    MOST_CHARACTERS,
    UNKNOWN,
    Expected,
    NoJson,
    Unfit,
    most_bytes,
    parse_answer,
    parse_rollouts,
)
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
    process_of,
)
from shared_contracts.weights import (
    KEEP_EVERY_S,
    MOST,
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

_CONNECT_TIMEOUT_S = 10.0
_PROBE_TIMEOUT_S = 10.0
# While a call runs, a server that is silent for so many looks in a row is gone.
LIVE_INTERVAL_S = 2.0
_LIVE_TIMEOUT_S = 5.0
_LIVE_FAILURES = 3
# The server bounds the phases of a weight update itself; so much longer it may say so.
PHASE_MARGIN_S = 30.0
# What a busy server, a gateway or a server that is starting says; nothing else passes.
_TOO_MANY = 429
_PASSING = (_TOO_MANY, 502, 503, 504)
# What only a full push can change.
_NEEDS_PUSH = {Problem.of(kind, "", "").type for kind in ("weights-poisoned", "push-needed")}
_OTHER_WEIGHTS = Problem.of("other-weights", "", "").type
_UNAUTHORIZED = 401
# Of a body that is no answer of a rollout server, so many bytes are looked at, and so many
# characters are shown.
_LOOKED_AT, _SAID = 4096, 200
_HTML_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)
_HTML_TAGS = re.compile(r"<(script|style)\b.*?</\1>|<!--.*?-->|<[^>]*>", re.IGNORECASE | re.DOTALL)
# What ends an exchange without a whole answer.
_UNREACHED = (TimeoutError, httpx.RequestError)

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)


# A compressed answer can be a thousand times as long as what was sent: none is asked for.
_IDENTITY = "identity"
# Longest answer to anything but a call for rollouts: `/info/` has some 200 bytes for a replica.
MOST_BYTES = 2**20
# A request is sent, and an answer has come from its head to its last byte, within so long.
TRANSFER_S = 120.0

# A dead peer is noticed on an idle connection after about a minute (CFG-06).
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


@dataclass(frozen=True)
class Answer:
    """The answer of a server. fault: why its body was not read to the end; None: it is complete."""

    status: int
    reason: str
    headers: httpx.Headers
    body: bytes
    fault: str | None

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


@dataclass(frozen=True)
class Budget:
    """The limits of an exchange.

    total_s: from its first byte to its last; None: no limit until the head of the answer is there.
    connect_s: of `total_s`, until the connection stands.
    transfer_s: to send the request, and again from the head of the answer to its last byte.
    most_bytes: of the body of a success; a refusal has at most MOST_BYTES.
    """

    total_s: float | None
    connect_s: float
    transfer_s: float = TRANSFER_S
    most_bytes: int = MOST_BYTES


def connecting(headers: Mapping[str, str]) -> httpx.AsyncClient:
    """Return a client that sends `headers`. Proxies of the environment are ignored."""
    return httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(verify=_tls(), socket_options=_KEEP_ALIVE),
        headers={"Accept-Encoding": _IDENTITY, **headers},
        trust_env=False,
    )


@cache
def _tls() -> ssl.SSLContext:
    """Return the TLS context, made once: reading the certificates takes longer than a call."""
    return httpx.create_ssl_context()


async def exchange(
    http: httpx.AsyncClient, method: str, url: str, body: Any, budget: Budget
) -> Answer:
    """Send `body` as JSON, unless it is None, and read the answer.

    Raises:
        TimeoutError, httpx.RequestError: no answer came, or not all of it.
    """
    limits = httpx.Timeout(None, connect=budget.connect_s, write=budget.transfer_s)
    request = http.build_request(method, url, json=body, timeout=limits)
    try:
        async with asyncio.timeout(budget.total_s) as deadline:
            response = await http.send(request, stream=True)
            try:
                ends = asyncio.get_running_loop().time() + budget.transfer_s
                deadline.reschedule(min(ends, deadline.when() or ends))
                return await _body_of(response, budget.most_bytes)
            finally:
                await response.aclose()
    except httpx.TimeoutException as error:
        raise TimeoutError(str(error)) from error


async def _body_of(response: httpx.Response, most_bytes: int) -> Answer:
    body, fault = bytearray(), _unreadable(response)
    most = most_bytes if response.is_success else MOST_BYTES
    if fault is None:
        async for piece in response.aiter_raw():
            if len(body) + len(piece) > most:
                fault = f"its body is longer than the {most} bytes that the answer can have"
                break
            body += piece
    return Answer(
        response.status_code, response.reason_phrase, response.headers, bytes(body), fault
    )


def _unreadable(response: httpx.Response) -> str | None:
    encoding = response.headers.get("Content-Encoding", _IDENTITY).strip().lower()
    if encoding == _IDENTITY:
        return None
    return f"its body is encoded as {encoding}, and only {_IDENTITY} was asked for"


def look(url: str, limit_s: float) -> Answer:
    """Make one GET without a token, within `limit_s`. Raises what `exchange` does."""

    async def get() -> Answer:
        async with connecting({}) as http:
            return await exchange(http, "GET", url, None, Budget(limit_s, limit_s))

    return asyncio.run(get())


class ServerUnreachable(RunError):
    """A call that did not reach the server, or whose answer did not arrive."""


class OtherWeights(ProblemError):
    """A refusal: the server has other weights than the call expects (WIRE-03)."""

    def __str__(self) -> str:
        return (
            f"{super().__str__()}. If the server was not restarted, another learner pushes "
            "to it: stop that learner, then start this run again"
        )


class TooManyCalls(ProblemError):
    """A refusal: the server is busy. retry_after_s: seconds of its `Retry-After`, if any."""

    def __init__(self, problem: Problem, retry_after_s: float | None) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s


SERVER_ERRORS = (ServerUnreachable, ProblemError)


def may_pass(error: BaseException) -> bool:
    """Return whether the same call can succeed later without any other change."""
    if isinstance(error, ProblemError):
        return error.problem.status in _PASSING and not needs_push(error)
    return isinstance(error, ServerUnreachable)


def needs_push(error: BaseException) -> bool:
    """Return whether the server only needs a full push of weights."""
    return isinstance(error, ProblemError) and error.problem.type in _NEEDS_PUSH


class RolloutClient:
    """Calls of one server. `infer_timeout_s` None or <= 0 sets no limit on `/infer/`.

    Every call carries the token of ROLLOUT_SERVER_TOKEN, or of the file that
    ROLLOUT_SERVER_TOKEN_FILE names. A token that no header can carry, or that the server refuses,
    is a ContractError.

    live_interval_s: between two checks of a server that generates.
    token: of a server of the learner's own, in place of the environment's.
    expected: of the model behind the server, which bounds its answers.
    transfer_s: in which a request is sent, and an answer comes from its head to its last byte.
    phase_margin_s: how much longer than `timeout_s` a phase of a push may take to be answered.
    sleep, clock: of `wait_until_pushable`, in seconds.
    """

    def __init__(
        self,
        base_url: str,
        timeout_s: float = 240.0,
        infer_timeout_s: float | None = None,
        live_interval_s: float = LIVE_INTERVAL_S,
        token: str | None = None,
        expected: Expected = UNKNOWN,
        transfer_s: float = TRANSFER_S,
        phase_margin_s: float = PHASE_MARGIN_S,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self._infer_timeout = infer_timeout_s if infer_timeout_s and infer_timeout_s > 0 else None
        self._live_interval_s = live_interval_s
        self._headers = _authorization(token)
        self._expected = expected
        self._transfer_s = transfer_s
        self._phase_s = timeout_s + phase_margin_s
        self._sleep, self._clock = sleep, clock
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Refuse all later probes and phases of a push."""
        self._closed = True

    def wait_until_pushable(self) -> None:
        """Poll until the server is `check_pushable`.

        Raises:
            ContractError: the server was not there or not ready within `timeout_s`, or
                what answers is no rollout server.
        """
        started, reason = self._clock(), ""
        retry = Retrying(
            retry=retry_if_exception(may_pass),
            stop=lambda _: self._clock() - started >= self.timeout_s,
            wait=wait_exponential(multiplier=0.1, max=2.0),
            sleep=self._sleep,
            reraise=True,
        )

        def check() -> None:
            nonlocal reason
            try:
                self.check_pushable()
            except SERVER_ERRORS as error:
                reason = str(error)
                raise

        try:
            with waiting_for(f"the rollout server at {self.base_url}", lambda: reason):
                retry(check)
        except SERVER_ERRORS as error:
            waited = self._clock() - started
            raise ContractError(
                f"GET {self.base_url}/health/",
                f"no healthy answer in {waited:.0f} s ({error})",
                "Start the server with `rollout-server serve`, or correct "
                "rollout_matching.vllm.server.servers[].base_url",
            ) from error

    def check_pushable(self) -> None:
        """Return if `/health/` answers 200, or that only a full push is missing; else raise."""
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

        The server can be slow. It is gone if `/live/` fails several times in a row, or if another
        process answers than that of `server_epoch` (without it, that of the first check).

        given_up: set when the answer is not needed any more; noticed at the next check.

        Raises:
            ServerUnreachable: the server is gone, or not done within `infer_timeout_s`, or
                the call was given up.
            ProblemError: it refused, or its answer breaks the contract.
        """
        where = f"POST {self.base_url}/infer/"
        answer = asyncio.run(self._infer_while_live(where, call, server_epoch, given_up))
        return _read(answer, where, lambda body: parse_rollouts(body, call, self._expected))

    def init_communicator(self, body: InitCommunicator) -> CommunicatorReady:
        def parse(said: bytes) -> CommunicatorReady:
            ready = parse_answer(said, CommunicatorReady)
            if ready.world_size != body.world_size:
                raise Unfit(f"world_size: {ready.world_size}, not {body.world_size}")
            if ready.transport != body.transport:
                raise Unfit(f"transport: {ready.transport}, not {body.transport}")
            if ready.weights_version > MOST // 2:  # pushes count on from it
                raise Unfit(f"weights_version: {ready.weights_version} leaves no room")
            return ready

        return self._phase("/init_communicator/", body, parse)

    def start_weight_update(self, body: StartWeightUpdate) -> WeightStatus:
        return self._phase("/start_weight_update/", body, partial(parse_answer, kind=WeightStatus))

    def update_weights(self, body: UpdateWeights) -> WeightStatus:
        return self._phase("/update_weights/", body, partial(parse_answer, kind=WeightStatus))

    def finish_weight_update(self, body: FinishWeightUpdate) -> SyncReport:
        def parse(said: bytes) -> SyncReport:
            report = parse_answer(said, SyncReport)
            if (version := report.status.weights_version) != body.version:
                raise Unfit(f"status.weights_version: {version}, and {body.version} was pushed")
            return report

        return self._phase("/finish_weight_update/", body, parse)

    def sleep(self) -> WeightStatus:
        """Have the server give the memory of its GPUs up, until `wake_up` or a push."""
        return self._phase("/sleep/", MoveMemory(), partial(parse_answer, kind=WeightStatus))

    def wake_up(self) -> WeightStatus:
        return self._phase("/wake_up/", MoveMemory(), partial(parse_answer, kind=WeightStatus))

    def keep_communicator(self, attempt: str) -> WeightStatus:
        """Send a heartbeat for the group of this attempt.

        A call that takes too long is given up, because the next one is due.
        """
        body = KeepCommunicator(attempt=attempt)
        limit_s = min(self.timeout_s, KEEP_EVERY_S)
        parse = partial(parse_answer, kind=WeightStatus)
        return self._send("POST", "/keep_communicator/", body, limit_s, parse)

    def close_communicator(self, attempt: str) -> WeightStatus:
        """Close the group of this attempt at the server, and no other group."""
        body = CloseCommunicator(attempt=attempt)
        return self._phase("/close_communicator/", body, partial(parse_answer, kind=WeightStatus))

    async def _infer_while_live(
        self,
        where: str,
        call: InferCall,
        server_epoch: str | None,
        given_up: threading.Event | None,
    ) -> Answer:
        body = call.model_dump(mode="json", exclude_none=True)
        most = max(MOST_BYTES, most_bytes(call, self._expected))
        budget = self._budget(self._infer_timeout, most)
        async with connecting(self._headers) as http:
            answer = asyncio.ensure_future(
                exchange(http, "POST", f"{self.base_url}/infer/", body, budget)
            )
            gone = asyncio.ensure_future(self._until_gone(http, server_epoch, given_up))
            try:
                await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    raise ServerUnreachable(f"{where}: {gone.result()}")
                return answer.result()
            except _UNREACHED as error:
                raise ServerUnreachable(f"{where}: {_reason(error)}") from error
            finally:  # cancelled, a call closes its connection, and the server ends it too
                answer.cancel()
                gone.cancel()
                await asyncio.gather(answer, gone, return_exceptions=True)

    async def _until_gone(
        self, http: httpx.AsyncClient, server_epoch: str | None, given_up: threading.Event | None
    ) -> str:
        """Check the server until it is gone; return the reason."""
        process = None if server_epoch is None else process_of(server_epoch)
        failures = 0
        while failures < _LIVE_FAILURES:
            await asyncio.sleep(self._live_interval_s)
            if given_up is not None and given_up.is_set():
                return "the call was given up"
            try:
                budget = self._budget(_LIVE_TIMEOUT_S)
                answer = await exchange(http, "GET", f"{self.base_url}/live/", None, budget)
                live = parse_answer(answer.body, Live)
            except (NoJson, Unfit, *_UNREACHED) as error:
                failures, reason = failures + 1, _reason(error)
                continue
            failures, process = 0, process or process_of(live.server_epoch)
            if process_of(live.server_epoch) != process:
                return "the server was restarted meanwhile"
        return f"the server is gone: GET /live/ failed {failures} times in a row ({reason})"

    def _get(self, path: str, kind: type[Body]) -> Body:
        limit_s = min(self.timeout_s, _PROBE_TIMEOUT_S)
        return self._send("GET", path, None, limit_s, partial(parse_answer, kind=kind))

    def _phase(self, path: str, body: BaseModel, parse: Callable[[bytes], T]) -> T:
        return self._send("POST", path, body, self._phase_s, parse)

    def _send(
        self,
        method: str,
        path: str,
        body: BaseModel | None,
        limit_s: float,
        parse: Callable[[bytes], T],
    ) -> T:
        where, sent = f"{method} {self.base_url}{path}", body and body.model_dump(mode="json")
        if self._closed:
            raise RuntimeError("the client is closed")

        async def send() -> Answer:
            async with connecting(self._headers) as http:
                budget = self._budget(limit_s)
                return await exchange(http, method, f"{self.base_url}{path}", sent, budget)

        try:
            answer = asyncio.run(send())
        except _UNREACHED as error:
            raise ServerUnreachable(f"{where}: {_reason(error)}") from error
        return _read(answer, where, parse)

    def _budget(self, total_s: float | None, most: int = MOST_BYTES) -> Budget:
        connect_s = min(self.timeout_s, _CONNECT_TIMEOUT_S, total_s or _CONNECT_TIMEOUT_S)
        return Budget(total_s, connect_s, self._transfer_s, most)


def _reason(error: BaseException) -> str:
    if isinstance(error, (NoJson, Unfit)):
        return "not an answer of a rollout server"
    if isinstance(error, TimeoutError):
        return "timed out"
    number = _error_number(error)
    said = str(error) if number is None else f"[Errno {number}] {os.strerror(number)}"
    return printable(said or type(error).__name__, most=_SAID)


def _error_number(error: BaseException | None) -> int | None:
    """That of the system, wherever below `error` it is; of several addresses the first one's."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
            return error.errno
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        else:
            error = error.__cause__ or error.__context__
    return None


def _read(answer: Answer, where: str, parse: Callable[[bytes], T]) -> T:
    if answer.status == _UNAUTHORIZED:
        found, do = "the server needs a token, and the learner has none", f"Set {TOKEN_VARIABLE} to"
        if _authorization():
            source = TOKEN_FILE_VARIABLE if os.environ.get(TOKEN_FILE_VARIABLE) else TOKEN_VARIABLE
            found, do = f"the server refuses the token of {source}", "Set it to"
        raise ContractError(where, found, f"{do} the token the server was started with")
    if not answer.is_success:
        raise _refusal(_problem_of(answer, where), answer)
    try:
        if answer.fault is not None:
            raise Unfit(answer.fault)
        return parse(answer.body)
    except NoJson:
        raise ProblemError(_foreign(answer, where, _said(answer))) from None
    except Unfit as error:
        raise ProblemError(_foreign(answer, where, str(error))) from None


def _authorization(token: str | None = None) -> dict[str, str]:
    """The header of `token`, or of that in the environment; empty without one.

    Raises ContractError for a token that no header can carry, and for two that differ.
    """
    token = given_token(os.environ) if token is None else token
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _refusal(problem: Problem, answer: Answer) -> ProblemError:
    if problem.type == _OTHER_WEIGHTS:
        return OtherWeights(problem)
    if problem.status == _TOO_MANY:
        pause = answer.headers.get("Retry-After", "")
        return TooManyCalls(problem, float(pause) if pause.isdecimal() else None)
    return ProblemError(problem)


def _problem_of(answer: Answer, where: str) -> Problem:
    """Return the problem document of an error answer, also if a proxy wrote the body."""
    if answer.fault is not None:
        return _foreign(answer, where, answer.fault)
    try:
        problem = parse_answer(answer.body, Problem)
    except (NoJson, Unfit):
        return _foreign(answer, where, _said(answer))
    if problem.status != answer.status:
        return _foreign(answer, where, f"a problem of status {problem.status}: {problem.detail}")
    return problem.model_copy(update={"where": f"{where} {problem.where}"})


def _said(answer: Answer) -> str:
    """Return the start of a foreign body in one line; of an HTML page the title or text."""
    text, said = answer.body[:_LOOKED_AT].decode(errors="replace"), ""
    if "html" in answer.headers.get("Content-Type", "") or text.lstrip().startswith("<"):
        title = _HTML_TITLE.search(text)
        text = html.unescape(title[1] if title else _HTML_TAGS.sub(" ", text))
        said = "an HTML page: "
    return said + " ".join(text.split())[:_SAID]


def _foreign(answer: Answer, where: str, detail: str) -> Problem:
    """Return an answer outside of the contract as a problem."""
    title = answer.reason or "Error"
    return Problem(
        type="about:blank",
        title="Not an answer of a rollout server"
        if answer.is_success
        else printable(title, most=MOST_CHARACTERS),
        status=answer.status,
        detail=printable(detail, most=MOST_CHARACTERS),
        where=where,
    )
