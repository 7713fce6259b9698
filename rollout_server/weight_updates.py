"""Weight updates over all replicas: the states and the phases (section 5).

              start               finish
    READY(v) --------> UPDATING ---------> READY(v+1)
                          |
                          |  a phase failed, or none came within timeout_s
                          v
                       POISONED --- start, update, finish ---> READY(v+1)

Every phase runs on all replicas at once and has a deadline. From `start` on the engines
are paused, and they resume only in READY: a mixture of weights never answers anything.
Two things lead back from `start` to where it came from, with nothing changed: a drain that
takes too long, and a manifest that is not what the model expects. `finish` ends in READY
only when what the engines hold is what was sent. A transfer that broke ends the group, too:
a rank has left it. The loss of a replica breaks the group, and with it an update that runs.
A trial loads nothing: READY is what it ends in, wherever it breaks.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import TypeVar

from rollout_server.opening import open_update, unfit_base
from rollout_server.problems import refusal
from rollout_server.stopwatch import timed
from rollout_server.transfer_info import update_info
from rollout_server.updatable import (
    EngineCall,
    UpdatableEngine,
    UpdatableEngines,
    Update,
    worker_phase,
)
from rollout_server.verification import differ, differences, unknown_digests
from rollout_server.weight_group import WeightGroup, where_of
from shared_contracts.errors import ProblemError
from shared_contracts.weights import (
    CommunicatorReady,
    FinishWeightUpdate,
    InitCommunicator,
    ParameterDigest,
    StartWeightUpdate,
    SyncReport,
    Transport,
    UpdateWeights,
    WeightState,
    WeightStatus,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


class WeightUpdates:
    """worker_margin_s: as of `WeightGroup`; and so long an engine may take to clean up after an
    update that broke.
    """

    def __init__(
        self,
        engines: UpdatableEngines,
        tensor_parallel_size: int,
        transport: Transport,
        server_epoch: Callable[[], str],
        worker_margin_s: float = 5.0,
    ) -> None:
        self.state: WeightState = "READY"
        self.version = 0
        self.group = WeightGroup(engines, tensor_parallel_size, transport, worker_margin_s)
        self._engines = engines
        self._transport = transport
        self._server_epoch = server_epoch
        self._worker_margin_s = worker_margin_s
        self._update: Update | None = None
        self._one_phase = asyncio.Lock()
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

    async def wait_until_ready(self) -> None:
        """Sit out a running update; raises the `weights-poisoned` problem."""
        await self._settled.wait()
        if self.state == "POISONED":
            raise poisoned()

    async def init_communicator(self, init: InitCommunicator) -> CommunicatorReady:
        """Form the weight group; answers when the learner and every worker have joined.

        With `if_none` it keeps out of the way of a group that stands, and of a phase that runs.
        """
        self.group.check(init)
        if init.if_none and self._one_phase.locked():
            raise refusal("weight-update-order", "another learner's phase runs", "if_none")
        self.group.check_alone(init)
        self.group.stop_meeting()
        async with self._phase():
            self.group.check_alone(init)
            await self._abandon_update("a new weight group was asked for")
            await self.group.leave()
            await self.group.form(init)
        return CommunicatorReady(
            weights_version=self.version,
            world_size=init.world_size,
            transport=self._transport,
            server_epoch=self._server_epoch(),
            dtype=self._engines.all()[0].dtype,
        )

    async def start(self, body: StartWeightUpdate) -> WeightStatus:
        """Drain and pause every engine, make its layers loadable, check the manifest."""
        async with self._phase():
            self.group.require("/start_weight_update/", body.attempt)
            if body.trial:
                self._check_trial(body.version)
            else:
                self._check_order(body.version)
            if (fault := unfit_base(body)) is not None:
                raise refusal("invalid-request", fault, "base")
            before = self.state
            if body.adapter is not None and before == "POISONED":
                raise refusal("adapter-refused", "server: only full weights can mend it", "adapter")
            self._update = Update(body.version, body.parameters, body.trial)
            self._enter("UPDATING")
            with self._timed("pause"):
                await self._drain(before)
                await self._open(body, before)
        return self.status

    async def receive(self, body: UpdateWeights) -> WeightStatus:
        """Receive the parameters of the manifest from the learner and load them."""
        async with self._phase():
            update = self._require_update("/update_weights/", body.attempt)
            if body.version != update.version:
                found = f"version {update.version} was started, not {body.version}"
                raise refusal("weight-update-order", found, "version")
            info = update_info(self._transport, update.parameters)
            call = worker_phase("receive_weights", update_info=info)
            update.add_slowest(await self._on_all("transfer", call))
            update.bytes = sum(p.num_bytes for p in update.parameters)
        return self.status

    async def finish(self, body: FinishWeightUpdate) -> SyncReport:
        """Complete and verify the load, drop what old weights cached, resume as new version."""
        async with self._phase():
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

    def keep(self, attempt: str) -> WeightStatus:
        """Note that the learner of the group lives, whatever phase runs."""
        self.group.keep(attempt)
        return self.status

    async def close_communicator(self, attempt: str | None = None) -> WeightStatus:
        """Leave the group of an attempt, or whichever stands; another's is left alone."""
        if self.group.is_anothers(attempt):
            return self.status
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
        return self._update

    def _check_order(self, version: int) -> None:
        """A version comes once, so that an engine built anew cannot pass for one that has it.

        It may come again to replicas that do not have it, or to weights that are a mixture.
        """
        engines = self._engines.all()
        if self.state == "UPDATING":
            raise refusal("weight-update-order", "an update is in progress already", "weights")
        behind = any(engine.weights_version != self.version for engine in engines)
        again = self.version > 0 and (behind or self.state == "POISONED")
        if version < self.version + (not again):
            found = f"version {version} does not come after the server's, {self.version}"
            raise refusal("weight-update-order", found, "version")

    def _check_trial(self, version: int) -> None:
        """Only weights that are whole and everywhere the same can be compared."""
        held = {engine.weights_version for engine in self._engines.all()}
        if self.state != "READY" or held != {version} or self.version != version:
            found = f"version {version} cannot be tried: the server is {self.state} with version "
            raise refusal("weight-update-order", f"{found}{self.version}", "version")

    async def _open(self, body: StartWeightUpdate, before: WeightState) -> None:
        """Make every worker ready for what comes; what does not fit takes `start` back."""
        problem = await open_update(self._on_all, body, self._engines.all()[0].dtype)
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

    async def _drain(self, before: WeightState) -> None:
        """Pause; when sequences run on for too long, let them and take `start` back."""
        group = self.group.require("start")
        try:
            pauses = [engine.pause() for engine in self._engines.all()]
            await self.group.within(group.timeout_s, "start: drain", pauses, group)
        except ProblemError:
            await self._back_to(before)
            raise

    async def _back_to(self, before: WeightState) -> None:
        """End an update that changed nothing."""
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
        self, engines: Sequence[UpdatableEngine], phase: str, call: EngineCall[T]
    ) -> list[T]:
        init = self.group.require(phase)
        try:
            return await self.group.together(phase, [call(engine) for engine in engines], init)
        except BaseException as error:
            await self._poison(str(error) or type(error).__name__, group_broke=phase == "transfer")
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
        if self._update is not None and self._update.trial:
            await self._take_trial_back(self._update, reason, group_broke)
            return
        logger.error("weights poisoned: %s", reason)
        self._enter("POISONED")
        engines = self._engines.alive()
        clean_up: list[Awaitable[object]] = []
        for engine in engines:
            clean_up += [engine.weight_phase("abandon_weight_update"), engine.abort_all()]
        if group_broke:
            self.group.broke()
            clean_up += [e.weight_phase("shutdown_weight_transfer_engine") for e in engines]
        joint = asyncio.gather(*clean_up, return_exceptions=True)
        try:  # a call that is given up is cancelled, so that the engine is watched again
            outcomes = await asyncio.wait_for(joint, self._worker_margin_s)
        except TimeoutError:
            logger.error("an engine hangs after a broken update")
            return
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                logger.error("while cleaning up after a broken update: %s", outcome)

    async def _take_trial_back(self, trial: Update, reason: str, group_broke: bool) -> None:
        """End a trial, which has loaded nothing; what breaks on the way poisons."""
        logger.error("the trial of %d parameter(s) broke: %s", len(trial.parameters), reason)
        trial.trial = False
        phases = ["abandon_trial"] + ["shutdown_weight_transfer_engine"] * group_broke
        for name in phases:
            await self._on(self._engines.alive(), "trial: undo", worker_phase(name))
        await self._back_to("READY")
        if group_broke:
            self.group.broke()

    def _arm_expiry(self, idle_s: float) -> None:
        def expire() -> None:
            self._expiring = asyncio.ensure_future(self._expire(idle_s, self._phases_begun))

        self._expiry = asyncio.get_running_loop().call_later(idle_s, expire)

    async def _expire(self, idle_s: float, phases_begun: int) -> None:
        """Poison an update whose learner has gone silent since phase `phases_begun`."""
        async with self._one_phase:
            if self.state == "UPDATING" and self._phases_begun == phases_begun:
                await self._poison(f"no next phase of the update within {idle_s:g} s")

    def _timed(self, name: str) -> AbstractContextManager[None]:
        assert self._update is not None
        return timed(self._update.seconds, name)


def poisoned() -> ProblemError:
    """The refusal of a server whose last update broke."""
    return refusal("weights-poisoned", "the last update broke half way", "weights")
