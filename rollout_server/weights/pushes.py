"""The server's part of a push: its states and phases (section 5 of the contract).

    init_communicator        the learner owns the server; the group is formed    (once)
    start_weight_update      READY -> UPDATING: the manifest is checked; drain and pause
    update_weights           the workers receive and load the buckets
    finish_weight_update     UPDATING -> READY: caches, version, resume
    close_communicator

The methods have the names of their routes, and of the methods of `learner.rollout.sync.push`. Each
runs on all replicas at once, within the `timeout_s` of the group. A drain that fails is taken back,
and nothing has changed. Any later failure, also the end of a call's connection, ends the engines:
UPDATING -> PUSH_NEEDED. They are rebuilt with the checkpoint's weights, for the next full push.

In READY the engines can `sleep`. `start_weight_update` wakes the weights, `finish_weight_update`
the KV cache.
"""

import asyncio
import errno
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from rollout_server.engines.engine_protocol import (
    FIRST_VERSION,
    Adapter,
    Engine,
    EngineDead,
    Engines,
    WeightPhaseFailed,
)
from rollout_server.runtime.concurrency import all_or_cancel, timed
from rollout_server.weights.manifest import check_manifest, write_adapter
from shared_contracts.errors import ProblemError, refusal
from shared_contracts.weights import (
    MOST_VERSION_STEP,
    CommunicatorReady,
    GroupCall,
    InitCommunicator,
    StartWeightUpdate,
    SyncReport,
    Transport,
    WeightState,
    WeightStatus,
    attempt_key,
    group_prefix,
    rank_name,
    ready_key,
)

logger = logging.getLogger(__name__)

POLL_S = 0.02
# The server waits this much longer than the deadline of a worker.
WORKER_MARGIN_S = 2.0
# Threads of an earlier group hold its store, and its port, for at most this time.
PORT_FREE_S = 1.0

OnEngine = Callable[[Engine], Coroutine[None, None, None]]
Expected = Callable[[], Mapping[str, list[int]]]
OpenStore = Callable[[InitCommunicator], Store]
# The last phase of the running push.
Progress = Literal["no push", "start", "transfer"]


@dataclass
class Pushes:
    """The pushes of one server; one phase runs at a time.

    workers: number of workers of all engines. expected: returns the parameters of the checkpoint
        (`manifest.checkpoint_parameters`); blocking.
    longest_s: largest `timeout_s` of a group. adapters: folder for received adapters; None:
        adapters are refused. open_store: opens the store of a group; blocking; None:
        `open_tcp_store`.

    state, version: of the weights. owner: the newest `InitCommunicator`, or None. settled: no push
        runs.
    """

    engines: Engines
    workers: int
    transport: Transport
    server_epoch: Callable[[], str]
    expected: Expected
    longest_s: float
    adapters: Path | None = None
    open_store: OpenStore | None = None

    def __post_init__(self) -> None:
        self.state: WeightState = "READY"
        self.version = FIRST_VERSION
        self.owner: InitCommunicator | None = None
        self.settled = asyncio.Event()
        self.settled.set()
        self._update: StartWeightUpdate  # of the newest push
        self._progress: Progress = "no push"
        self._seconds: dict[str, float] = {}
        self._formed = False  # whether the owner's group exists
        self._store: Store | None = None
        self._one_phase = asyncio.Lock()
        self._phase_limit: asyncio.Timeout | None = None  # of the running phase
        self._idle_limit: asyncio.TimerHandle | None = None  # between two phases of a push

    @property
    def status(self) -> WeightStatus:
        return WeightStatus(
            state=self.state, weights_version=self.version, server_epoch=self.server_epoch()
        )

    # --- phases of a push

    async def init_communicator(self, init: InitCommunicator) -> CommunicatorReady:
        """Take the server over, and form the weight group of the learner and all workers.

        A running phase ends, and its push fails.
        """
        self._check_group(init)
        # Two calls that replace the same group are from one learner.
        if init.replaces and self.owner is not None and self.owner.replaces != init.replaces:
            self._require_owner(init.replaces)
        init = init.model_copy(update={"timeout_s": min(init.timeout_s, self.longest_s)})
        self.owner = init
        self._end_phase()
        async with self._phase("rendezvous", init.attempt):
            await self._leave_group("a newer learner has taken the server over")
            await self._engines_ready()
            if init.world_size > 1:
                await self._form_group(init)
        return CommunicatorReady(
            weights_version=self.version,
            world_size=init.world_size,
            transport=init.transport,
            server_epoch=self.server_epoch(),
            dtype=self.engines.all()[0].dtype,
        )

    async def start_weight_update(self, body: StartWeightUpdate) -> WeightStatus:
        async with self._phase("start", body.attempt, after="no push"):
            if not self._formed:
                found = "no group with all replicas is formed; /init_communicator/ comes first"
                raise refusal("weight-update-order", found, "start")
            self._check_version(body.version)
            expected = await asyncio.to_thread(self.expected)
            check_manifest(body.parameters, expected, self.engines.all()[0].dtype)
            before, self._update, self._seconds = self.state, body, {}
            self._enter("UPDATING")
            with timed(self._seconds, "pause"):
                try:
                    await self._on_all(lambda engine: engine.pause())
                except BaseException:  # nothing has changed
                    self._enter(before)
                    await asyncio.gather(*(engine.resume() for engine in self.engines.alive()))
                    raise
                await self._on_all(lambda engine: engine.start_weight_update())
            self._progress = "start"
        return self.status

    async def update_weights(self, body: GroupCall) -> WeightStatus:
        async with self._phase("transfer", body.attempt, after="start"):
            with timed(self._seconds, "transfer"):
                parameters = self._update.parameters
                await self._on_all(lambda engine: engine.update_weights(parameters))
            self._progress = "transfer"
        return self.status

    async def finish_weight_update(self, body: GroupCall) -> SyncReport:
        async with self._phase("finish", body.attempt, after="transfer"):
            update = self._update
            with timed(self._seconds, "finish"):
                await self._on_all(lambda engine: engine.finish_weight_update(update.version))
                await self._on_all(lambda engine: engine.resume())
            self.version = update.version
            self._enter("READY")
        size = sum(parameter.num_bytes for parameter in update.parameters)
        logger.info("weights %d: %d bytes, seconds %s", self.version, size, self._seconds)
        return SyncReport(status=self.status, seconds=self._seconds, bytes=size)

    async def close_communicator(self, body: GroupCall) -> WeightStatus:
        """Leave the group, end a running phase, and clear the owner."""
        self._require_owner(body.attempt)
        self._end_phase()
        async with self._phase("close", body.attempt):
            await self._leave_group("the learner left in the middle of a push")
            self.owner = None
        return self.status

    async def load_adapter(self, version: int, attempt: str, content: bytes) -> SyncReport:
        """Answer with a LoRA adapter over the checkpoint's weights, without a pause or a group.

        content: safetensors of peft, with an `AdapterMeta` in their metadata.
        """
        seconds: dict[str, float] = {}
        async with self._phase("adapter", attempt, after="no push"):
            if self.state == "PUSH_NEEDED":
                raise refusal("push-needed", "only full weights can follow a broken push", "state")
            self._check_version(version)
            if self.adapters is None:
                found = "the server takes no adapters; start it with --enable-lora"
                raise refusal("adapter-refused", found, "adapter")
            if not all(engine.holds_checkpoint for engine in self.engines.all()):
                found = "full weights were pushed: the weights under the adapter are gone"
                raise refusal("adapter-refused", found, "adapter")
            with timed(seconds, "transfer"):
                expected = await asyncio.to_thread(self.expected)
                folder = await asyncio.to_thread(write_adapter, self.adapters, content, expected)
                adapter = Adapter(version, folder)
                try:
                    await self._on_all(lambda engine: engine.load_adapter(adapter))
                except WeightPhaseFailed as error:
                    raise refusal("adapter-refused", f"server: {error}", "adapter") from error
                await self._on_all(lambda engine: engine.use_adapter(adapter))
            self.version = version
        return SyncReport(status=self.status, seconds=seconds, bytes=len(content))

    # --- memory of the GPUs

    async def sleep(self) -> WeightStatus:
        return await self._move_memory("/sleep/", lambda engine: engine.sleep())

    async def wake_up(self) -> WeightStatus:
        return await self._move_memory("/wake_up/", lambda engine: engine.resume())

    async def _move_memory(self, route: str, call: OnEngine) -> WeightStatus:
        async with self._limited(self.longest_s, route), self._one_phase:
            if self.state != "READY":
                raise refusal("weight-update-order", f"the state is {self.state}", route)
            await self._on_all(call)
        return self.status

    # --- one phase

    @asynccontextmanager
    async def _phase(
        self, name: str, attempt: str, after: Progress | None = None
    ) -> AsyncIterator[None]:
        """Run a phase of the owner within its deadline; a failure in UPDATING breaks the push.

        The deadline includes the wait for an earlier phase, `/sleep/` or `/wake_up/`.
        after: the phase that has to come before; None: any.
        """
        owner = self._require_owner(attempt)
        where = f"{name} at {owner.host}:{owner.port}"
        async with self._limited(owner.timeout_s, where, attempt) as limit, self._one_phase:
            self._require_owner(attempt)
            if after not in (None, self._progress):
                found = f"{name} follows {after}; the last phase is {self._progress} ({self.state})"
                raise refusal("weight-update-order", found, name)
            if self._idle_limit is not None:
                self._idle_limit.cancel()
            self._phase_limit = limit
            try:
                yield
            except BaseException as error:
                if self.state == "UPDATING":
                    ended = "it ran out of time, or its connection ended"
                    self._give_up(f"{name}: {str(error) or ended}")
                raise
            finally:
                self._phase_limit = None
                if self.state == "UPDATING":
                    late, after_s = "the next phase did not come in time", owner.timeout_s
                    loop = asyncio.get_running_loop()
                    self._idle_limit = loop.call_later(after_s, self._give_up_idle, late)

    @asynccontextmanager
    async def _limited(
        self, limit_s: float, where: str, attempt: str | None = None
    ) -> AsyncIterator[asyncio.Timeout]:
        """Limit the time of a block, and convert its errors to problems.

        attempt: of the owner. If a newer owner ended the block, the problem names that one.
        """
        try:
            async with asyncio.timeout(limit_s + WORKER_MARGIN_S) as limit:
                yield limit
        except TimeoutError as error:
            if attempt is not None:
                self._require_owner(attempt)
            found = f"server: it was ended, or was not over within {limit_s:g} s"
            raise refusal("weight-transfer-timeout", found, where) from error
        except EngineDead as error:
            raise refusal("not-ready", f"server: {error}", where) from error
        except WeightPhaseFailed as error:
            raise refusal("weight-transfer-failed", f"server: {error}", where) from error

    def _end_phase(self) -> None:
        """End the running phase, unless it is ending."""
        if self._phase_limit is not None and not self._phase_limit.expired():
            self._phase_limit.reschedule(asyncio.get_running_loop().time())

    def _give_up(self, reason: str) -> None:
        """End a failed push and the engines, which are rebuilt."""
        logger.error("a push broke: %s", reason)
        self._enter("PUSH_NEEDED")
        self._formed, self._store = False, None
        for engine in self.engines.alive():
            engine.declare_dead()

    def _give_up_idle(self, reason: str) -> None:
        if self.state == "UPDATING" and not self._one_phase.locked():
            self._give_up(reason)

    def replica_lost(self, reason: str) -> None:
        """Fail a push that is between two phases; during a phase, the phase itself fails."""
        self._formed, self._store = False, None
        self._give_up_idle(reason)

    def _enter(self, state: WeightState) -> None:
        self.state = state
        if state == "UPDATING":
            self.settled.clear()
        else:
            self._progress = "no push"
            self.settled.set()

    async def _on_all(self, call: OnEngine) -> None:
        """Call all engines at once; on a failure, cancel the other calls and raise it."""
        await all_or_cancel(call(engine) for engine in self.engines.all())

    # --- the group

    async def _engines_ready(self) -> None:
        """Wait until the engines that a failed push ended are serving again."""
        while True:
            try:
                self.engines.all()
                return
            except ProblemError:
                await asyncio.sleep(POLL_S)

    async def _form_group(self, init: InitCommunicator) -> None:
        """Open a store, wait for the learner, then let all workers join.

        The workers join last, because an engine does not answer while its worker waits.
        """
        try:
            store = await asyncio.to_thread(self.open_store or open_tcp_store, init)
            self._store = store
            for number in range(init.senders):
                await self._wait_for_sender(PrefixStore(group_prefix(number), store), init)
            del store  # the traceback of a failure would keep it open
            engines = self.engines.all()
            each = self.workers // len(engines)
            await all_or_cancel(
                engine.join_group(init, index * each) for index, engine in enumerate(engines)
            )
        except BaseException:
            await self._leave_group("the group was not formed")
            raise
        if init.transport != "nccl":  # gloo does not need the store any more
            self._store = None
        self._formed = True

    async def _wait_for_sender(self, group: PrefixStore, init: InitCommunicator) -> None:
        deadline = time.monotonic() + init.timeout_s
        while not await asyncio.to_thread(group.check, [ready_key(0)]):
            if time.monotonic() > deadline:
                found = f"{rank_name(0)}: missing for {init.timeout_s:g} s"
                where = f"rendezvous at {init.host}:{init.port}"
                raise refusal("weight-transfer-timeout", found, where)
            await asyncio.sleep(POLL_S)

    async def _leave_group(self, reason: str) -> None:
        """Let all workers leave, or end their engine; end a running push, for `reason`.

        The store closes first: this ends a worker that waits for other ranks.
        """

        async def leave(engine: Engine) -> None:
            try:
                async with asyncio.timeout(WORKER_MARGIN_S):
                    await engine.leave_group()
            except (TimeoutError, WeightPhaseFailed, EngineDead) as error:
                logger.error("an engine is ended, as its workers are still in a group: %r", error)
                engine.declare_dead()

        if self.state == "UPDATING":
            self._give_up(reason)
        self._formed, self._store = False, None
        await asyncio.gather(*map(leave, self.engines.alive()))

    # --- checks

    def _require_owner(self, attempt: str) -> InitCommunicator:
        if self.owner is None:
            found = "no learner owns the server; /init_communicator/ comes first"
            raise refusal("weight-update-order", found, "attempt")
        if self.owner.attempt != attempt:
            found = f"{self.owner.learner or 'a newer learner'} has taken this server over"
            raise refusal("taken-over", found, "attempt")
        return self.owner

    def _check_group(self, init: InitCommunicator) -> None:
        whole = init.senders + self.workers
        if init.world_size not in (1, whole) or self.workers % init.senders:
            found = (
                f"is {init.world_size} with {init.senders} sender(s), and the server has "
                f"{self.workers} engine worker(s)"
            )
            raise refusal("invalid-request", found, "world_size")
        if init.transport not in (self.transport, "gloo"):
            found = f"is {init.transport}, but the server was started with {self.transport}"
            raise refusal("invalid-request", found, "transport")

    def _check_version(self, version: int) -> None:
        """Raise unless the version is new, or needed again (a rebuilt replica, a failed push)."""
        behind = any(e.weights_version != self.version for e in self.engines.all())
        least = self.version if behind else self.version + 1
        most = self.version + MOST_VERSION_STEP
        if not least <= version <= most:
            found = f"version {version} is not in {least} to {most}; the server has {self.version}"
            raise refusal("weight-update-order", found, "version")


def open_tcp_store(init: InitCommunicator) -> TCPStore:
    """Return a store on exactly `host:port`, which closes with the object; blocking.

    Raises the `group-port-taken` problem for a used port, `invalid-request` for an address of
    another machine, and `weight-transfer-timeout` if the time is too short.
    """
    try:
        store = TCPStore(
            init.host,
            init.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=init.timeout_s),
            master_listen_fd=_listen(init).detach(),
        )
    except DistError as error:
        found = f"server: no store within {init.timeout_s:g} s"
        raise refusal("weight-transfer-timeout", found, "timeout_s") from error
    store.set(attempt_key(init.attempt), "")
    return store


def _listen(init: InitCommunicator) -> socket.socket:
    """Listen on `host:port`; wait up to PORT_FREE_S for the store of an earlier group to close."""
    deadline = time.monotonic() + PORT_FREE_S
    while True:
        try:
            return socket.create_server((init.host, init.port))
        except (OSError, TypeError) as error:  # TypeError: a name with a zero byte
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            found = f"server: cannot listen on {init.host}:{init.port} ({error})"
        if not taken:
            raise refusal("invalid-request", f"{found}; name an address of the server", "host")
        if time.monotonic() > deadline:
            raise refusal("group-port-taken", f"{found}; set another group_port for it", "port")
        time.sleep(POLL_S)
