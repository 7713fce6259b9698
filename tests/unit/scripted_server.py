"""One scripted rollout server: real HTTP on loopback, with answers that a test chooses.

ScriptedServer     routes to functions, and every call that arrived
ScriptedRollouts   the state of a rollout server on these routes, with a script of faults
ScriptedPusher    pushes into that state in place of a weight group
"""

import json
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pydantic import BaseModel

from learner.rollout.client import ServerUnreachable
from learner.rollout.sync.push import WeightPusher
from shared_contracts.errors import PROBLEM_MEDIA_TYPE, Problem, RunError
from shared_contracts.infer import (
    ChatCompletionResponse,
    ChatMessage,
    Choice,
    InferCall,
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
    ReplicaState,
    ReplicaStatus,
    WorldSize,
)
from shared_contracts.weights import CommunicatorReady, DtypeName, SyncReport, WeightStatus

INFER = "POST /infer/"

# A body (status 200), or a status with a body and optional headers. Text is sent unchanged.
Reply = Any
Route = Callable[[Any], Reply]


@dataclass(frozen=True)
class HangUp:
    """Closes the connection, after the first half of the reply `after` if there is one."""

    after: Reply = None


class ScriptedServer:
    """Routes by `METHOD /path/`, each a function of the body; records every call.

    calls: (route, body) in the order of arrival; a body that is no JSON as (query, bytes).
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
        """Ignore a connection that the client has closed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    """Serve on a free loopback port until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # otherwise an answer takes 40 ms

        def do_GET(self) -> None:
            self._serve()

        def do_POST(self) -> None:
            self._serve()

        def _serve(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path, _, query = self.path.partition("?")
            body = json.loads(content) if content and not query else (query, content)
            server.authorizations.append(self.headers.get("Authorization"))
            reply = server.answer(f"{self.command} {path}", body if content else None)
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
            """Log nothing."""

    http = _QuietServer(("127.0.0.1", 0), Handler)
    server = ScriptedServer(f"http://127.0.0.1:{http.server_port}")
    thread = threading.Thread(target=http.serve_forever, args=(0.005,))
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.socket.close()


def _whole(reply: Reply) -> tuple[int, Any, dict[str, str]]:
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
    refused = Problem.of(kind, detail, where)
    return refused.status, refused


def health(version: int = 0) -> Health:
    return Health(
        state="READY", weights_version=version, server_epoch="epoch-1", replicas=[replica(0)]
    )


def live(epoch: str = "epoch-1") -> Live:
    return Live(server_epoch=epoch, heartbeat_age_s=[0.1])


def replica(index: int, state: ReplicaState = "serving") -> ReplicaStatus:
    return ReplicaStatus(index=index, state=state, detail=state, heartbeat_age_s=0.1, restarts=0)


def info(
    guard: RepeatTerminateConfig | None = None,
    replicas: int = 1,
    active: bool | None = None,
    **fields: Any,
) -> Info:
    """guard: of the server, and active unless `active` says otherwise; None: off."""
    status = RepeatTerminateStatus(
        active=guard is not None if active is None else active,
        config=guard or RepeatTerminateConfig(),
    )
    made = Info(
        model="toy",
        world_size=1,
        replicas=[replica(index) for index in range(replicas)],
        max_model_len=1024,
        max_num_seqs=64,
        enable_lora=False,
        weights_state="READY",
        weights_version=0,
        weight_transport="gloo",
        server_epoch="epoch-1",
        repeat_terminate=status,
        versions={"rollmatch": "0"},
    )
    return made.model_copy(update=fields)


def envelope(
    token_ids: list[int], prompt_ids: list[int], seed: int | None = None, text: str = "", n: int = 1
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


class ScriptedRollouts:
    """Answers a request with its `uuid` as the token, and with the seed of its position.

    faults: how the next calls of `/infer/` are answered, each by one of the methods below.
    dead: every connection is closed. asleep: until a push or `/wake_up/`.
    starting_looks: the next calls of `/health/` that find it starting.
    guarded: its guard is active. stale: a replica lacks the newest weights. broken: a push broke.
    dtype: of its weights.
    peak: most requests in flight at once. answered: numbers of the requests, by call.
    """

    def __init__(self, server: ScriptedServer, world_size: int = 1) -> None:
        self.server = server
        self.world_size = world_size
        self.faults: deque[Fault] = deque()
        self.dead = False
        self.starting_looks = 0
        self.guarded = True
        self.process, self.losses = 1, 0
        self.dtype: DtypeName = "float32"
        self.version: int | None = 0
        self.broken = self.stale = self.asleep = False
        self.peak = 0
        self.answered: list[list[int]] = []
        self._call_ids: dict[str, list[int]] = {}
        self._in_flight = 0
        self._lock = threading.Lock()
        server.routes |= {
            "GET /health/": self._unless_dead(self._health),
            "GET /live/": self._unless_dead(lambda _: live(self.epoch)),
            "GET /info/": self._unless_dead(self._info),
            "GET /get_world_size/": self._unless_dead(lambda _: WorldSize(world_size=world_size)),
            INFER: self._unless_dead(self._infer),
            "POST /wake_up/": self._unless_dead(self._wake_up),
        }

    @property
    def epoch(self) -> str:
        return f"process{self.process}-{self.losses}"

    # --- faults: each answers one call

    def ok(self, call: InferCall) -> Reply:
        return self._answers(call)

    def hang_up(self, call: InferCall) -> Reply:
        return HangUp()

    def hang_up_half_way(self, call: InferCall) -> Reply:
        return HangUp(after=self._answers(call))

    def not_ready(self, call: InferCall) -> Reply:
        return problem("not-ready", "an engine died", "replicas[0]")

    def gateway(self, call: InferCall) -> Reply:
        return 502, "<html>bad gateway</html>"

    def gateway_timeout(self, call: InferCall) -> Reply:
        return 504, "<title>504 Gateway Time-out</title>"

    def too_many(self, call: InferCall) -> Reply:
        return problem("too-many-calls", "try again", INFER)

    def lose_a_replica(self, call: InferCall) -> Reply:
        """Another replica answers. The lost one restarts with the weights of the checkpoint."""
        self.losses += 1
        self.stale = True
        return self._answers(call)

    def lose_the_only_replica(self, call: InferCall) -> Reply:
        self.losses += 1
        self.version = None
        return self.not_ready(call)

    def fall_asleep(self, call: InferCall) -> Reply:
        self.asleep = True
        return self._refusal()

    def restart(self, call: InferCall) -> Reply:
        self.restart_process()
        return HangUp()

    def break_a_push(self, call: InferCall) -> Reply:
        """A push of another learner; the engines have been built again."""
        self.losses, self.broken = self.losses + 1, True
        return self._refusal()

    def die(self, call: InferCall) -> Reply:
        self.dead = True
        return HangUp()

    def restart_process(self) -> None:
        self.process, self.losses = self.process + 1, 0
        self.version, self.broken, self.stale, self.asleep = 0, False, False, False

    # --- routes

    def _unless_dead(self, route: Callable[[Any], Reply]) -> Callable[[Any], Reply]:
        return lambda body: HangUp() if self.dead else route(body)

    def _health(self, _: object) -> Reply:
        if self.starting_looks:
            self.starting_looks -= 1
            return problem("not-ready", "replica 0 is starting", "replicas[0]")
        if (refused := self._refusal()) is not None:
            return refused
        if self.stale:
            return problem("push-needed", "a replica was built again", "replicas[0]")
        return health(self.version or 0).model_copy(update={"server_epoch": self.epoch})

    def _wake_up(self, _: object) -> WeightStatus:
        self.asleep = False
        version = self.version or 0
        return WeightStatus(state="READY", weights_version=version, server_epoch=self.epoch)

    def _info(self, _: object) -> Info:
        made = info(
            RepeatTerminateConfig() if self.guarded else None,
            world_size=self.world_size,
            weights_state="PUSH_NEEDED" if self.broken else "READY",
            weights_version=self.version or 0,
            server_epoch=self.epoch,
        )
        asleep = [replica(0, "asleep")]
        return made.model_copy(update={"replicas": asleep}) if self.asleep else made

    def _refusal(self) -> Reply | None:
        if self.broken:
            return problem("push-needed", "a push broke", "weights")
        if self.version is None:
            return problem("push-needed", "the replica was built again", "replicas[0]")
        if self.asleep:
            return problem("push-needed", "replica 0 is asleep", "replicas[0]")
        return None

    def _infer(self, body: Any) -> Reply:
        call = InferCall.model_validate(body)
        count = len(call.infer_requests)
        with self._lock:
            self._in_flight += count
            self.peak = max(self.peak, self._in_flight)
        try:
            return self._reply(call)
        finally:
            with self._lock:
                self._in_flight -= count

    def _reply(self, call: InferCall) -> Reply:
        assert call.request_id is not None
        numbers = _numbers(call)
        assert self._call_ids.setdefault(call.request_id, numbers) == numbers, "an id twice"
        if (refused := self._refusal()) is not None:
            return refused
        if call.expected_weights_version not in (None, self.version):
            return problem("other-weights", f"version {self.version} is held", "weights")
        with self._lock:
            fault = self.faults.popleft() if self.faults else ScriptedRollouts.ok
        return fault(self, call)

    def _answers(self, call: InferCall) -> list[RolloutEnvelope]:
        self.answered.append(_numbers(call))
        seed = call.request_config.seed if call.request_config else None
        return [self._envelope(n, seed, i) for i, n in enumerate(_numbers(call))]

    def _envelope(self, number: int, seed: int | None, index: int) -> RolloutEnvelope:
        made = envelope([number], [1, 2], None if seed is None else seed + index)
        stamp = {"weights_version": (self.version, self.version), "server_epoch": self.epoch}
        return made.model_copy(update={"coordexp": made.coordexp.model_copy(update=stamp)})


Fault = Callable[[ScriptedRollouts, InferCall], Reply]


def _numbers(call: InferCall) -> list[int]:
    return [int(str(request.uuid)) for request in call.infer_requests]


class ScriptedPusher(WeightPusher):
    """Pushes into the state of scripted rollouts, which refuse what a real server refuses.

    failures: errors of the next pushes, raised before the weights arrive. answer_lost: the next
        push fails after they have arrived.
    refuses: raised when a group is to be formed.
    loses_a_replica: at the end of the next push. forms_anew: the next push forms a group first.
    tries: attempts to form a group. groups: groups that were formed. pushed: versions.
    """

    def __init__(self, rollouts: ScriptedRollouts) -> None:
        self.failures: deque[Exception] = deque()
        self.answer_lost = False
        self.refuses: Exception | None = None
        self.tries = 0
        self.loses_a_replica = False
        self.forms_anew = False
        self.pushed: list[int] = []
        self.groups = 0
        self.closed = False
        self._rollouts = rollouts
        self._ready = None

    def connect(self) -> CommunicatorReady:
        if self._rollouts.dead:
            raise RunError("no server")
        if self._ready is None:
            self.tries += 1
            if self.refuses is not None:
                raise self.refuses
            self.groups += 1
            self._ready = CommunicatorReady(
                weights_version=self._rollouts.version or 0,
                world_size=1 + self._rollouts.world_size,
                transport="gloo",
                server_epoch=self._rollouts.epoch,
                dtype=self._rollouts.dtype,
            )
        return self._ready

    def push(self, version: int) -> SyncReport:
        if self.forms_anew:
            self.abandon()
        ready, rollouts = self.connect(), self._rollouts
        if ready.server_epoch != rollouts.epoch:
            raise RunError("there is no weight group")
        if self.failures:
            rollouts.losses, rollouts.broken = rollouts.losses + 1, True
            raise self.failures.popleft()
        if rollouts.version == version and not (rollouts.broken or rollouts.stale):
            raise RunError(f"version {version} does not come after the server's")
        self.pushed.append(version)
        rollouts.version = version
        rollouts.broken = rollouts.stale = rollouts.asleep = False
        if self.answer_lost:
            self.answer_lost = False
            raise RunError("the answer was lost") from ServerUnreachable("timed out")
        if self.loses_a_replica:
            self.loses_a_replica = False
            rollouts.losses, rollouts.stale = rollouts.losses + 1, True
        return report(version, rollouts.epoch)

    def abandon(self) -> None:
        self._ready = None

    def close(self) -> None:
        self.closed = True


def report(version: int, epoch: str, seconds: float = 2.0, size: int = 4_000_000_000) -> SyncReport:
    """The report of a push of `seconds`; the transfer took a quarter of them."""
    return SyncReport(
        status=WeightStatus(state="READY", weights_version=version, server_epoch=epoch),
        seconds={"pause": 0.1, "transfer": seconds / 4, "finish": 0.2, "total": seconds},
        bytes=size,
    )


def bodies(server: ScriptedServer) -> list[InferCall]:
    return [InferCall.model_validate(body) for body in server.bodies(INFER)]
