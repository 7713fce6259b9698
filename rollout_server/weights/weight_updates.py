"""Weight updates over all replicas: the states and the phases (section 5).

              start               finish
    READY(v) --------> UPDATING ---------> READY(v+1)
                          |
                          |  a phase failed, or none came within timeout_s
                          v
                       POISONED --- start, update, finish ---> READY(v+1)

Every phase runs on all replicas at once and has a deadline. It ends before that when its learner
gives no heartbeat for GONE_AFTER_S, when another group is asked for, and when its own is
closed: as every phase that breaks. From `start` on the engines
are paused, and they resume only in READY: a mixture of weights never answers anything.
Two things lead back from `start` to where it came from, with nothing changed: a drain that
takes too long, and a manifest that is not what the model expects. `finish` ends in READY
only when what the engines hold is what was sent. A transfer that broke ends the group, too:
a rank has left it. The loss of a replica breaks the group, and with it an update that runs.
A trial loads nothing: READY is what it ends in, wherever it breaks.

In READY the engines can `sleep`: their memory is given up. `start` takes that of the weights back,
and the KV cache comes back where the engines resume.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from rollout_server.engines.engine_protocol import (
    FIRST_VERSION,
    EngineCall,
    EngineDead,
    UpdatableEngine,
    UpdatableEngines,
    worker_phase,
)
from rollout_server.engines.verification import differ, differences, unknown_digests
from rollout_server.runtime.concurrency import Silence, gather_with_deadline, timed
from rollout_server.runtime.refusals import refusal
from rollout_server.weights.update_admission import admit_update, unfit_base
from rollout_server.weights.weight_group import WeightGroup, where_of
from shared_contracts.errors import ProblemError
from shared_contracts.server_info import WeightCall
from shared_contracts.weights import (
    GONE_AFTER_S,
    MOST_VERSION_STEP,
    CommunicatorReady,
    FinishWeightUpdate,
    InitCommunicator,
    ParameterDigest,
    ParameterMeta,
    StartWeightUpdate,
    SyncReport,
    Transport,
    UpdateWeights,
    WeightState,
    WeightStatus,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How often the learner of a call, or of an update, is looked after.
LOOK_S = 0.25


@dataclass
class _Call:
    """A learner's call under way. ending: ends it before its time. broken: why it was ended."""

    route: str
    attempt: str
    ending: asyncio.Timeout
    broken: str | None = None


@dataclass
class Update:
    """The update in progress; seconds by phase, bytes of one replica that came.

    trial: nothing is loaded, so that whatever breaks changes nothing.
    """

    version: int
    parameters: Sequence[ParameterMeta]
    trial: bool = False
    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def by_name(self) -> dict[str, ParameterMeta]:
        return {parameter.name: parameter for parameter in self.parameters}

    def add_slowest(self, answers: Sequence[Sequence[dict[str, float]]]) -> None:
        """Add to each phase what its slowest worker needed, of any engine."""
        of_workers = [seconds for engine in answers for seconds in engine]
        for phase in {phase for seconds in of_workers for phase in seconds}:
            slowest = max(seconds.get(phase, 0.0) for seconds in of_workers)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + slowest

    def __str__(self) -> str:
        shown = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in self.seconds.items())
        rate = self.bytes / 1e9 / max(sum(self.seconds.values()), 1e-9)
        return (
            f"weights {self.version}: {self.bytes} bytes of {len(self.parameters)} parameters; "
            f"{shown}; {rate:.3f} GB/s"
        )


class WeightUpdates:
    """worker_margin_s: as of `WeightGroup`; and so long an engine may take to clean up after an
    update that broke. longest_s: of the `timeout_s` of a group; a longer one is cut to it.
    gone_after_s: silence of a learner after which what it has begun is given up.
    """

    def __init__(
        self,
        engines: UpdatableEngines,
        tensor_parallel_size: int,
        transport: Transport,
        server_epoch: Callable[[], str],
        longest_s: float,
        worker_margin_s: float = 5.0,
        gone_after_s: float = GONE_AFTER_S,
    ) -> None:
        self.state: WeightState = "READY"
        self.version = FIRST_VERSION
        self.group = WeightGroup(engines, tensor_parallel_size, transport, worker_margin_s)
        self._engines = engines
        self._transport = transport
        self._server_epoch = server_epoch
        self._longest_s = longest_s
        self._worker_margin_s = worker_margin_s
        self._update: Update | None = None
        self._gone_after_s = gone_after_s
        self._one_phase = asyncio.Lock()
        self._call: _Call | None = None  # the one under way, as long as it can be broken
        self._call_since = 0.0  # when it came, or the last one ended
        self._watching: asyncio.Task[None] | None = None
        self._phases_begun = 0
        self._expiry: asyncio.TimerHandle | None = None
        self._expiring: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def status(self) -> WeightStatus:
        return WeightStatus(
            state=self.state, weights_version=self.version, server_epoch=self._server_epoch()
        )

    @property
    def call(self) -> WeightCall | None:
        """What the server is at, or waits for the learner with; None where it is nothing."""
        if self._call is not None:
            route, attempt = self._call.route, self._call.attempt
        elif self.state == "UPDATING" and self.group.formed is not None:
            route, attempt = None, self.group.formed.attempt
        else:
            return None
        running_s = time.monotonic() - self._call_since
        return WeightCall(
            route=route, attempt=attempt, running_s=running_s, heard_s=self.group.silent_s
        )

    async def wait_until_ready(self) -> None:
        """Wait for the end of a running update; raises the `weights-poisoned` problem."""
        await self._settled.wait()
        if self.state == "POISONED":
            raise poisoned()

    async def init_communicator(self, init: InitCommunicator) -> CommunicatorReady:
        """Form the weight group; answers when the learner and every worker have joined.

        With `if_none` it keeps out of the way of a group that stands, and of a phase that runs.
        Without, such a phase is broken.
        """
        self.group.check(init)
        init = init.model_copy(update={"timeout_s": min(init.timeout_s, self._longest_s)})
        if init.if_none and self._one_phase.locked():
            raise refusal("weight-update-order", "another learner's phase runs", "if_none")
        self.group.check_only_if_free(init)
        self._break("a new weight group was requested")
        async with self._called("/init_communicator/", init):
            self.group.check_only_if_free(init)
            await self._abandon_update("a new weight group was requested")
            await self.group.leave()
            try:
                await self.group.form(init)
            except BaseException:
                self._call = None  # nothing breaks what it does now
                await self._leave_what_broke()
                raise
        return CommunicatorReady(
            weights_version=self.version,
            world_size=init.world_size,
            transport=self._transport,
            server_epoch=self._server_epoch(),
            dtype=self._engines.all()[0].dtype,
        )

    async def start(self, body: StartWeightUpdate) -> WeightStatus:
        """Drain and pause every engine, make its layers loadable, check the manifest."""
        async with self._called("/start_weight_update/"):
            self.group.require("/start_weight_update/", body.attempt)
            self.group.hear()
            if body.trial:
                self._check_trial(body.version)
            else:
                self._check_order(body.version)
            if (fault := unfit_base(body)) is not None:
                raise refusal("invalid-request", fault, "base")
            before = self.state
            if body.adapter is not None and before == "POISONED":
                raise refusal(
                    "adapter-refused", "server: only full weights can repair it", "adapter"
                )
            self._update = Update(body.version, body.parameters, body.trial)
            self._enter("UPDATING")
            with self._timed("pause"):
                await self._drain(before)
                await self._on_all("start: wake up", lambda e: e.wake_weights())
                await self._open(body, before)
        return self.status

    async def receive(self, body: UpdateWeights) -> WeightStatus:
        """Receive the parameters of the manifest from the learner and load them."""
        async with self._called("/update_weights/"):
            update = self._require_update("/update_weights/", body.attempt)
            if body.version != update.version:
                found = f"version {update.version} was started, not {body.version}"
                raise refusal("weight-update-order", found, "version")
            parameters = [parameter.model_dump() for parameter in update.parameters]
            call = worker_phase("receive_weights", transport=self._transport, parameters=parameters)
            update.add_slowest(await self._on_all("transfer", call))
            update.bytes = sum(p.num_bytes for p in update.parameters)
        return self.status

    async def finish(self, body: FinishWeightUpdate) -> SyncReport:
        """Complete and verify the load, drop what old weights cached, resume as new version."""
        async with self._called("/finish_weight_update/"):
            update = self._require_update("/finish_weight_update/", body.attempt)
            self._check_finish(body, update)
            loaded = await self._on_all("finish: load", worker_phase("complete_load"))
            update.add_slowest(loaded)
            with self._timed("verify"):
                await self._verify(update, body.digests)
            with self._timed("caches"):
                if not update.trial:
                    await self._on_all("finish: caches", lambda e: e.publish(update.version))
                await self._on_all("finish: resume", lambda e: e.resume())
            self.version = update.version
            self._enter("READY")
        logger.info("%s", update)
        return SyncReport(
            status=self.status,
            seconds=update.seconds,
            bytes=update.bytes,
            verified=len(body.digests),
            trial=update.trial,
        )

    async def sleep(self) -> WeightStatus:
        """Let running sequences end, then have every engine give its memory up."""
        await self._on_ready("/sleep/", lambda e: e.sleep())
        return self.status

    async def wake_up(self) -> WeightStatus:
        """Have every engine take its memory back, with the weights of before."""
        await self._on_ready("/wake_up/", lambda e: e.resume())
        return self.status

    def heartbeat(self, attempt: str) -> WeightStatus:
        """Note that the learner of the group lives, whatever phase runs."""
        self.group.heartbeat(attempt)
        return self.status

    async def close_communicator(self, attempt: str | None = None) -> WeightStatus:
        """Leave the group of an attempt, or whichever stands; another's is left alone.

        A phase of it that runs is broken.
        """
        if self.group.is_anothers(attempt):
            return self.status
        self._break("the weight group was closed", attempt)
        async with self._phase():
            if self.group.is_anothers(attempt):  # formed meanwhile
                return self.status
            await self._abandon_update("the weight group was closed")
            await self.group.leave()
        return self.status

    async def replica_lost(self, reason: str) -> None:
        """Give up the group, of which a rank is gone, and an update that ran over it."""
        async with self._phase():
            await self._abandon_update(reason)
            await self.group.leave()

    # --- what the phases are made of

    def _require_update(self, route: str, attempt: str | None) -> Update:
        if self.state != "UPDATING" or self._update is None:
            raise refusal(
                "weight-update-order",
                f"the state is {self.state}; /start_weight_update/ first",
                route,
            )
        self.group.require(route, attempt)
        self.group.hear()
        return self._update

    def _check_order(self, version: int) -> None:
        """A version comes once, so that an engine built anew cannot pass for one that has it.

        It may come again to replicas that do not have it, or to weights that are a mixture. Its
        step is bounded, so that no push leaves none for the next.
        """
        engines = self._engines.all()
        if self.state == "UPDATING":
            raise refusal("weight-update-order", "an update is in progress already", "weights")
        behind = any(engine.weights_version != self.version for engine in engines)
        again = self.version > 0 and (behind or self.state == "POISONED")
        if version < self.version + (not again):
            found = f"version {version} does not come after the server's, {self.version}"
            raise refusal("weight-update-order", found, "version")
        if version > self.version + MOST_VERSION_STEP:
            found = f"version {version} is more than {MOST_VERSION_STEP} after the server's, "
            raise refusal("weight-update-order", f"{found}{self.version}", "version")

    def _check_trial(self, version: int) -> None:
        """Only weights that are whole and everywhere the same can be compared."""
        held = {engine.weights_version for engine in self._engines.all()}
        if self.state != "READY" or held != {version} or self.version != version:
            found = f"version {version} cannot be tried: the server is {self.state} with version "
            raise refusal("weight-update-order", f"{found}{self.version}", "version")

    async def _open(self, body: StartWeightUpdate, before: WeightState) -> None:
        """Make every worker ready for what comes; what does not fit takes `start` back."""
        problem = await admit_update(self._on_all, body, self._engines.all()[0].dtype)
        if problem is not None:
            undo = "abandon_trial" if body.trial else "abandon_weight_update"
            await self._on_all("start: undo", worker_phase(undo))
            await self._back_to(before)
            raise problem

    def _check_finish(self, body: FinishWeightUpdate, update: Update) -> None:
        if body.version != update.version or update.bytes == 0:
            raise refusal(
                "weight-update-order",
                f"version {update.version} was started and {update.bytes} bytes came; "
                f"it cannot be finished as version {body.version}",
                "version",
            )
        fault = unknown_digests(body.digests, update.by_name)
        if fault is not None:
            raise refusal("invalid-request", fault, "digests")

    async def _verify(self, update: Update, digests: Sequence[ParameterDigest]) -> None:
        """Compare what every worker holds with what was sent; a difference poisons."""
        if not digests:
            return
        asked = [(digest.name, digest.columns) for digest in digests]
        answers = await self._on_all("verify", worker_phase("read_back", asked=asked))
        found = [
            difference
            for replica, workers in enumerate(answers)
            for difference in differences(replica, digests, update.by_name, workers)
        ]
        if found:
            problem = differ(found, len(digests), where_of("verify", self.group.require("verify")))
            await self._poison(str(problem))
            raise problem

    async def _on_ready(self, route: str, call: EngineCall[None]) -> None:
        """Run `call` on every engine, while nothing is pushed and the weights are whole."""
        async with self._phase():
            if self.state != "READY":
                raise refusal("weight-update-order", f"the state is {self.state}", route)
            calls = [call(engine) for engine in self._engines.all()]
            try:
                await gather_with_deadline(calls, route, self._longest_s, self._worker_margin_s)
            except EngineDead as error:
                raise refusal("not-ready", f"server: {error}", route) from error

    # --- phases

    @asynccontextmanager
    async def _phase(self) -> AsyncIterator[None]:
        """One phase at a time; between the phases of an update a timer runs."""
        async with self._one_phase:
            self._phases_begun += 1
            if self._expiry is not None:
                self._expiry.cancel()
            try:
                yield
            finally:
                if self.state == "UPDATING" and self.group.formed is not None:
                    self._arm_expiry(self.group.formed.timeout_s)

    @asynccontextmanager
    async def _called(
        self, route: str, forms: InitCommunicator | None = None
    ) -> AsyncIterator[None]:
        """A phase for a learner, which can be broken. forms: the group, where none stands yet."""
        async with self._phase():
            init = forms or self.group.require(route)
            call = _Call(route, init.attempt, asyncio.timeout(None))
            try:
                async with call.ending:
                    self._call, self._call_since = call, time.monotonic()
                    self._watch()
                    yield
            except TimeoutError:
                if call.broken is None:
                    raise
                raise refusal(
                    "weight-transfer-failed", call.broken, where_of(route, init)
                ) from None
            finally:
                self._call, self._call_since = None, time.monotonic()

    def _break(self, reason: str, attempt: str | None = None) -> None:
        """End the call under way, of this attempt or of whichever; it cleans up after itself."""
        call = self._call
        if call is not None and call.broken is None and attempt in (None, call.attempt):
            call.broken = reason
            call.ending.reschedule(asyncio.get_running_loop().time())

    def _watch(self) -> None:
        """Look after the learner for as long as a call of its runs, or an update."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._give_up_the_silent())

    async def _give_up_the_silent(self) -> None:
        look_s = min(LOOK_S, self._gone_after_s / 4)
        silence = Silence(look_s)
        reason = f"learner (rank 0): no heartbeat for {self._gone_after_s:g} s"
        while self._call is not None or self.state == "UPDATING":
            await asyncio.sleep(look_s)
            if silence.looked(self.group.silent_s) > self._gone_after_s:
                self._break(reason)
                if not self._one_phase.locked():
                    await self._expire(reason, self._phases_begun)

    async def _drain(self, before: WeightState) -> None:
        """Pause; when sequences run on for too long, let them and take `start` back."""
        group = self.group.require("start")
        try:
            pauses = [engine.pause() for engine in self._engines.all()]
            await self.group.within(group.timeout_s, "start: drain", pauses, group)
        except (ProblemError, asyncio.CancelledError):
            await self._back_to(before)
            raise

    async def _back_to(self, before: WeightState) -> None:
        """End an update that changed nothing."""
        self._call = None  # nothing breaks what it does now
        if before == "READY":
            await self._on(self._engines.alive(), "start: resume", lambda e: e.resume())
        self._enter(before)

    async def _on_all(self, phase: str, call: EngineCall[T]) -> list[T]:
        """Run a phase that changes weights on every engine; a failure poisons."""
        try:
            engines = self._engines.all()
        except ProblemError as error:
            await self._poison(str(error))
            raise
        return await self._on(engines, phase, call)

    async def _on(
        self,
        engines: Sequence[UpdatableEngine],
        phase: str,
        call: EngineCall[T],
        group_broke: bool = False,
    ) -> list[T]:
        """group_broke: a worker may be held in it, which is not waited for as long as else."""
        init = self.group.require(phase)
        longest_s = min(init.timeout_s, self._gone_after_s) if group_broke else init.timeout_s
        deadline_s = longest_s + self._worker_margin_s
        calls = [call(engine) for engine in engines]
        try:
            return await self.group.within(deadline_s, phase, calls, init)
        except BaseException as error:
            group_broke |= phase == "transfer"
            await self._poison(str(error) or type(error).__name__, group_broke)
            raise

    # --- states

    def _enter(self, state: WeightState) -> None:
        self.state = state
        if state == "UPDATING":
            self._settled.clear()
        else:
            self._update = None
            self._settled.set()

    async def _abandon_update(self, reason: str) -> None:
        if self.state == "UPDATING":
            await self._poison(reason)

    async def _poison(self, reason: str, group_broke: bool = False) -> None:
        """Make every engine reloadable, leave it paused and end what waits in it.

        A trial is taken back instead.

        group_broke: a rank has left the group; the others leave it, too.
        """
        self._call = None  # nothing breaks what it does now
        if self._update is not None and self._update.trial:
            await self._take_trial_back(self._update, reason, group_broke)
            return
        logger.error("weights poisoned: %s", reason)
        self._enter("POISONED")
        clean_up: list[Awaitable[object]] = []
        for engine in self._engines.alive():
            clean_up += [engine.weight_phase("abandon_weight_update"), engine.abort_all()]
        joint = asyncio.gather(*clean_up, return_exceptions=True)
        try:  # a call that is given up is cancelled, so that the engine is watched again
            for outcome in await asyncio.wait_for(joint, self._worker_margin_s):
                if isinstance(outcome, BaseException):
                    logger.error("while cleaning up after a broken update: %s", outcome)
        except TimeoutError:
            logger.error("an engine hangs after a broken update")
        if group_broke:
            self.group.broke()
            await self._leave_what_broke()

    async def _leave_what_broke(self) -> None:
        """Have all workers leave a group that broke; who cannot is lost with its engine.

        A worker that waits in a collective of gloo or NCCL is free once the learner has left, too.
        Nothing else can interrupt it.
        """
        leaving = {
            asyncio.ensure_future(engine.weight_phase("leave_group")): engine
            for engine in self._engines.alive()
        }
        if not leaving:
            return
        left, held = await asyncio.wait(leaving, timeout=self._gone_after_s)
        for call in left:
            if (failure := call.exception()) is not None:
                logger.error("while leaving a weight group that broke: %s", failure)
        for call in held:
            call.cancel()
            logger.error("a worker is held by a weight group that broke; its engine is given up")
            leaving[call].declare_dead()

    async def _take_trial_back(self, trial: Update, reason: str, group_broke: bool) -> None:
        """End a trial, which has loaded nothing; what breaks on the way poisons."""
        logger.error("the trial of %d parameter(s) broke: %s", len(trial.parameters), reason)
        trial.trial = False
        phases = ["abandon_trial"] + ["leave_group"] * group_broke
        for name in phases:
            call = worker_phase(name)
            await self._on(self._engines.alive(), "trial: undo", call, group_broke)
        await self._back_to("READY")
        if group_broke:
            self.group.broke()

    def _arm_expiry(self, idle_s: float) -> None:
        def expire() -> None:
            reason = f"no next phase of the update within {idle_s:g} s"
            self._expiring = asyncio.ensure_future(self._expire(reason, self._phases_begun))

        self._expiry = asyncio.get_running_loop().call_later(idle_s, expire)

    async def _expire(self, reason: str, phases_begun: int) -> None:
        """Poison an update whose learner has begun none after phase `phases_begun`."""
        async with self._one_phase:
            if self.state == "UPDATING" and self._phases_begun == phases_begun:
                await self._poison(reason)

    def _timed(self, name: str) -> AbstractContextManager[None]:
        assert self._update is not None
        return timed(self._update.seconds, name)


def poisoned() -> ProblemError:
    """The refusal of a server whose last update broke."""
    return refusal("weights-poisoned", "the last update broke half way", "weights")
