"""A rollout server's state behind real HTTP, and the weight channel that pushes into it."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from learner.rollout.client import ServerUnreachable
from shared_contracts.errors import ContractError, RunError
from shared_contracts.infer import InferCall, RolloutEnvelope
from shared_contracts.repeat_guard import RepeatTerminateConfig
from shared_contracts.server_info import Info, WorldSize
from shared_contracts.weights import CommunicatorReady, SyncReport, WeightStatus
from tests.unit.scripted_server import (
    HangUp,
    Reply,
    ScriptedServer,
    envelope,
    health,
    info,
    live,
    problem,
)

INFER = "POST /infer/"


class ScriptedRollouts:
    """Answers request `uuid` with that number as its token, and with the seed of its place.

    faults: for each of the next calls of `/infer/` one of the methods below; then none.
    dead: every connection is hung up on. starting_looks: so many more looks find it starting.
    guarded: its guard is active.
    stale: a replica lacks the weights of the others.
    peak: most requests that were in flight at once. answered: numbers of requests, by call.
    """

    def __init__(self, server: ScriptedServer, world_size: int = 1) -> None:
        self.server = server
        self.world_size = world_size
        self.faults: deque[Fault] = deque()
        self.dead = False
        self.starting_looks = 0
        self.guarded = True
        self.process, self.losses = 1, 0
        self.version: int | None = 0
        self.poisoned = False
        self.stale = False
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
        }

    @property
    def epoch(self) -> str:
        return f"process{self.process}-{self.losses}"

    # --- faults, of which each is the answer to a call

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

    def too_many(self, call: InferCall) -> Reply:
        return *problem("too-many-calls", "try again", INFER), {"Retry-After": "3"}

    def lose_a_replica(self, call: InferCall) -> Reply:
        """Another replica answers; the lost one comes back with the checkpoint's weights."""
        self.losses += 1
        self.stale = True
        return self._answers(call)

    def lose_the_only_replica(self, call: InferCall) -> Reply:
        self.losses += 1
        self.version = None
        return self.not_ready(call)

    def restart(self, call: InferCall) -> Reply:
        self.start_anew()
        return HangUp()

    def poison(self, call: InferCall) -> Reply:
        self.poisoned = True
        return self._refusal()

    def die(self, call: InferCall) -> Reply:
        self.dead = True
        return HangUp()

    def start_anew(self) -> None:
        self.process, self.losses = self.process + 1, 0
        self.version, self.poisoned, self.stale = 0, False, False

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

    def _info(self, _: object) -> Info:
        said = {"weights_version": self.version or 0, "server_epoch": self.epoch}
        state = {"weights_state": "POISONED" if self.poisoned else "READY"}
        guard = RepeatTerminateConfig() if self.guarded else None
        told = info(guard, world_size=self.world_size)
        return told.model_copy(update=said | state)

    def _refusal(self) -> Reply | None:
        if self.poisoned:
            return problem("weights-poisoned", "an update broke", "weights")
        if self.version is None:
            return problem("push-needed", "the replica was built again", "replicas[0]")
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
        fault = self.faults.popleft() if self.faults else ScriptedRollouts.ok
        return fault(self, call)

    def _answers(self, call: InferCall) -> list[RolloutEnvelope]:
        self.answered.append(_numbers(call))
        seed = call.request_config.seed if call.request_config else None
        return [self._envelope(n, seed, i) for i, n in enumerate(_numbers(call))]

    def _envelope(self, number: int, seed: int | None, index: int) -> RolloutEnvelope:
        made = envelope([number], [1, 2], None if seed is None else seed + index)
        held = (self.version, self.version)
        return _with_stamp(made, weights_version=held, server_epoch=self.epoch)


Fault = Callable[[ScriptedRollouts, InferCall], Reply]


def _numbers(call: InferCall) -> list[int]:
    return [int(str(request.uuid)) for request in call.infer_requests]


def _with_stamp(made: RolloutEnvelope, **stamp: Any) -> RolloutEnvelope:
    return made.model_copy(update={"coordexp": made.coordexp.model_copy(update=stamp)})


class ScriptedChannel:
    """Pushes into the state of a scripted server, which refuses as the real one does.

    failures: errors of the next pushes, raised before the weights arrive, or with
        `answer_lost` and `disbelieved` after that.
    taken: by another learner, when a group is to be formed the next time.
    blocked: no group can be formed. tries: how often that was tried.
    loses_a_replica: at the end of the next push. forms_anew: the next push begins with that.
    pushed: versions that arrived. groups: how often the group was formed.
    """

    def __init__(self, rollouts: ScriptedRollouts) -> None:
        self.failures: deque[Exception] = deque()
        self.answer_lost = False
        self.disbelieved = False
        self.taken: ContractError | None = None
        self.blocked = False
        self.tries = 0
        self.loses_a_replica = False
        self.forms_anew = False
        self.pushed: list[int] = []
        self.groups = 0
        self.closed = False
        self._rollouts = rollouts
        self._ready: CommunicatorReady | None = None

    def connect(self) -> CommunicatorReady:
        if self._rollouts.dead:
            raise RunError("nobody is there")
        if self._ready is None:
            self.tries += 1
            if self.taken is not None:
                raise self.taken
            if self.blocked:
                raise RunError("the port of the group is blocked")
            self.groups += 1
            self._ready = CommunicatorReady(
                weights_version=self._rollouts.version or 0,
                world_size=1 + self._rollouts.world_size,
                transport="gloo",
                server_epoch=self._rollouts.epoch,
                dtype="float32",
            )
        return self._ready

    def push(self, version: int) -> SyncReport:
        if self.forms_anew:
            self.abandon()
        ready, rollouts = self.connect(), self._rollouts
        if ready.server_epoch != rollouts.epoch:
            raise RunError("there is no weight group")
        if self.failures:
            rollouts.poisoned = True
            raise self.failures.popleft()
        if rollouts.version == version and not (rollouts.poisoned or rollouts.stale):
            raise RunError(f"version {version} does not come after the server's")
        self.pushed.append(version)
        rollouts.version, rollouts.poisoned, rollouts.stale = version, False, False
        if self.answer_lost:
            self.answer_lost = False
            raise RunError("the answer was lost") from ServerUnreachable("timed out")
        if self.disbelieved:
            raise RunError("it compared 0 of 3 parameters")
        if self.loses_a_replica:
            self.loses_a_replica = False
            rollouts.losses, rollouts.stale = rollouts.losses + 1, True
        return report(version, rollouts.epoch)

    def abandon(self) -> None:
        self._ready = None

    def close(self) -> None:
        self.closed = True


def report(version: int, epoch: str, seconds: float = 2.0, size: int = 4_000_000_000) -> SyncReport:
    """Of a push that took `seconds`, a quarter of them to send."""
    return SyncReport(
        status=WeightStatus(state="READY", weights_version=version, server_epoch=epoch),
        seconds={"load": 0.1, "send": seconds / 4, "total": seconds},
        bytes=size,
        verified=3,
    )


def bodies(server: ScriptedServer) -> list[InferCall]:
    """The calls of `/infer/`, in the order of arrival."""
    return [InferCall.model_validate(body) for body in server.bodies(INFER)]
