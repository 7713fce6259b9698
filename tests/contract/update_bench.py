"""`WeightUpdates` over two scripted engines, and a learner that joins their group."""

import asyncio
import base64
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

from torch.distributed import TCPStore

from learner.rollout.server_process import free_ports
from rollout_server.runtime.refusals import refusal
from rollout_server.weights.weight_updates import WeightUpdates
from shared_contracts.weights import (
    GLOO_STORE_PREFIX,
    DtypeName,
    FinishWeightUpdate,
    InitCommunicator,
    ParameterDigest,
    ParameterMeta,
    StartWeightUpdate,
    SyncReport,
    UpdateWeights,
    WeightStatus,
)

P = ParamSpec("P")
# Only a test that fails waits so long.
LIMIT_S = 60.0

NCCL_ID = base64.b64encode(bytes(range(128))).decode()
PARAMETER = ParameterMeta(name="a", dtype="float32", shape=[2])
DIGEST = ParameterDigest(name="a", digest=f"{7:016x}")
FAULT = {"name": "a", "kind": "missing", "detail": "1 of 2 elements are filled"}

# Answers of the one worker, by phase.
ANSWERS: dict[str, list[Any]] = {
    "open_weight_update": [[]],
    "adapter_faults": [[]],
    "check_base": [([], [[("m", 0, 0, 2, 1, 7)]])],
    "receive_weights": [{"transfer": 1.0, "load": 2.0}],
    "complete_load": [{"load": 4.0}],
    "read_back": [[[("m", 0, 0, 2, 1, 7)]]],
}

Happening = Callable[[], Awaitable[list[Any] | None]]


class ScriptedEngine:
    """Records the calls; `script` maps a phase to a function that runs in it.

    That function may return the answers of the engine's workers. An engine has one.
    """

    dtype: DtypeName = "float32"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.script: dict[str, Happening] = {}
        self.inits: list[dict[str, Any]] = []
        self.weights_version = 0
        self.given_up = False
        self.asleep = False

    def declare_dead(self) -> None:
        self.given_up = True

    async def _do(self, name: str) -> list[Any]:
        self.calls.append(name)
        answers = await self.script[name]() if name in self.script else None
        return ANSWERS.get(name, [None]) if answers is None else answers

    async def pause(self) -> None:
        await self._do("pause")

    async def resume(self) -> None:
        await self._do("resume")
        self.asleep = False

    async def sleep(self) -> None:
        await self._do("sleep")
        self.asleep = True

    async def wake_weights(self) -> None:
        if self.asleep:
            await self._do("wake_weights")

    async def abort_all(self) -> None:
        await self._do("abort_all")

    async def publish(self, version: int) -> None:
        await self._do(f"publish {version}")
        self.weights_version = version

    async def weight_phase(self, name: str, **arguments: Any) -> list[Any]:
        if name == "join_group":
            self.inits.append(arguments["init"] | {"rank_offset": arguments["rank_offset"]})
        return await self._do(name)


def fails(error: Exception) -> Happening:
    async def fail() -> None:
        raise error

    return fail


def answers(*of_workers: Any) -> Happening:
    async def answer() -> list[Any]:
        return list(of_workers)

    return answer


class Hang:
    """A phase that never ends. given_up: whether it was cancelled."""

    given_up = False

    async def __call__(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up = True
            raise


class ScriptedEngines(list[ScriptedEngine]):
    """Two engines; `lost` holds the indices of those that are gone."""

    def __init__(self) -> None:
        super().__init__([ScriptedEngine(), ScriptedEngine()])
        self.lost: set[int] = set()

    def all(self) -> list[ScriptedEngine]:
        if self.lost:
            raise refusal("not-ready", "an engine is gone", f"replicas[{min(self.lost)}]")
        return list(self)

    def alive(self) -> list[ScriptedEngine]:
        return [engine for index, engine in enumerate(self) if index not in self.lost]


async def arrive(port: int) -> None:
    """Do what a learner's process group does first, as soon as there is a store at `port`."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.005)
        else:
            writer.close()
            break
    store = await asyncio.to_thread(
        TCPStore, "127.0.0.1", port, is_master=False, wait_for_workers=False
    )
    await asyncio.to_thread(store.set, f"{GLOO_STORE_PREFIX}/0/0", "")


class Bench:
    def __init__(
        self,
        transport: Any = "gloo",
        tensor_parallel_size: int = 1,
        worker_margin_s: float = 0.1,
        longest_s: float = 60.0,
        gone_after_s: float = 10.0,
    ) -> None:
        self.engines = ScriptedEngines()
        self.updates = WeightUpdates(
            self.engines,
            tensor_parallel_size,
            transport,
            lambda: "epoch",
            longest_s,
            worker_margin_s,
            gone_after_s,
        )
        self.transport = transport
        self.world_size = 1 + 2 * tensor_parallel_size

    @classmethod
    async def formed(cls, **options: Any) -> "Bench":
        """With a weight group."""
        bench = cls(**options)
        await bench.init()
        return bench

    async def init(
        self,
        timeout_s: float = 5.0,
        attempt: str = "",
        if_none: bool = False,
        learner_comes: bool = True,
    ) -> None:
        (port,) = free_ports(1)
        coming = asyncio.create_task(arrive(port)) if learner_comes else None
        try:
            await self.updates.init_communicator(
                InitCommunicator(
                    host="127.0.0.1",
                    port=port,
                    world_size=self.world_size,
                    transport=self.transport,
                    timeout_s=timeout_s,
                    attempt=attempt,
                    if_none=if_none,
                    nccl_unique_id=NCCL_ID if self.transport == "nccl" else None,
                )
            )
        finally:
            if coming is not None:
                coming.cancel()

    @property
    def state(self) -> str:
        return self.updates.state

    async def start(self, version: int) -> WeightStatus:
        return await self.updates.start(
            StartWeightUpdate(version=version, parameters=[PARAMETER], attempt=None)
        )

    async def receive(self, version: int) -> WeightStatus:
        return await self.updates.receive(UpdateWeights(version=version, attempt=None))

    async def finish(self, version: int) -> SyncReport:
        return await self.updates.finish(
            FinishWeightUpdate(version=version, digests=[DIGEST], attempt=None)
        )

    async def push(self, version: int) -> SyncReport:
        await self.start(version)
        await self.receive(version)
        return await self.finish(version)


def asynchronous(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that runs in an event loop of its own."""

    @wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), LIMIT_S))

    return run
