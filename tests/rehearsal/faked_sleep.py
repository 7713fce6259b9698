"""Sleep and wake-up of an engine on a GPU that is not there: what is in its memory at each time.

    python -m tests.rehearsal.faked_sleep    a line of JSON for each scene: what was seen

The phases of a push (`WeightUpdates`), `VllmEngine`, vLLM's AsyncLLM, EngineCoreProc, executor,
GPU worker and its allocator are the real ones. Faked are vLLM's platform, the scheduler's queues,
and below the allocator the driver: memory of a GPU is memory of this process, which is filled with
garbage where the driver takes or gives it.

A process of its own: vLLM has one platform in a process.
"""

import asyncio
import ctypes
import json
import types
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from rollout_server.weights.weight_updates import WeightUpdates
from shared_contracts.errors import ProblemError
from tests.contract.update_bench import ANSWERS, Bench
from tests.rehearsal.faked_gpus import fake_nvml, put_platform

# Bytes of the weights, of a tensor that no push brings (as of Qwen3-VL's deepstack), of the cache.
SIZES = {"weights": 64, "beside": 32, "kv_cache": 128}
TAGS = {"weights": "weights", "beside": "weights", "kv_cache": "kv_cache"}
TOTAL, GARBAGE = 2**20, b"\xab"


class Gpu:
    """What the driver and the allocator's library do. full: no memory is left to be mapped."""

    def __init__(self) -> None:
        self.memory = {name: ctypes.create_string_buffer(size) for name, size in SIZES.items()}
        self.mapped = set(SIZES)
        self.full = False

    def handle(self, name: str) -> tuple[int, int, int, int]:
        return (0, SIZES[name], ctypes.addressof(self.memory[name]), 0)

    def _name(self, address: int) -> str:
        (name,) = (n for n, m in self.memory.items() if ctypes.addressof(m) == address)
        return name

    def create_and_map(self, _: int, size: int, address: int, __: int) -> None:
        if self.full:
            raise RuntimeError("CUDA Error: out of memory")
        ctypes.memset(address, GARBAGE[0], size)
        self.mapped.add(self._name(address))

    def unmap_and_release(self, _: int, size: int, address: int, __: int) -> None:
        ctypes.memset(address, GARBAGE[0], size)
        self.mapped.remove(self._name(address))

    def info(self) -> tuple[int, int]:
        return TOTAL - sum(SIZES[name] for name in self.mapped), TOTAL

    def holds(self, name: str) -> str:
        """What is there: one letter, `garbage`, or `nothing`."""
        if name not in self.mapped:
            return "nothing"
        (found,) = set(self.memory[name].raw)
        return "garbage" if bytes([found]) == GARBAGE else chr(found)

    def write(self, name: str, letter: str) -> None:
        assert name in self.mapped, f"{name} is written to, and is not there"
        ctypes.memset(self.memory[name], ord(letter), SIZES[name])

    def seen(self) -> str:
        return " ".join(self.holds(name) for name in SIZES)


class Scheduler:
    """Queues without a request."""

    def __init__(self) -> None:
        from vllm.v1.core.sched.interface import PauseState

        self.pause_state = PauseState.UNPAUSED
        self.resets = 0

    def set_pause_state(self, state: Any) -> None:
        self.pause_state = state

    def has_requests(self) -> bool:
        return False

    has_unfinished_requests = has_requests

    def finish_requests(self, *_: Any) -> list[Any]:
        return []

    def reset_prefix_cache(self, *_: Any, **__: Any) -> bool:
        self.resets += 1
        return True

    def reset_encoder_cache(self) -> None: ...


def executor_of(gpu: Gpu) -> Any:
    """vLLM's executor over its GPU worker, whose memory is in the allocator's pools."""
    from vllm.device_allocator import AllocationData, cumem
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.worker.gpu_worker import Worker

    pools: Any = cumem
    pools.python_create_and_map = gpu.create_and_map
    pools.python_unmap_and_release = gpu.unmap_and_release
    pools.libcudart = types.SimpleNamespace(cudaMemcpy=ctypes.memmove)
    pools.CuMemAllocator.instance = None
    allocator = cumem.CuMemAllocator.get_instance()
    for name, tag in TAGS.items():
        handle = gpu.handle(name)
        allocator.pointer_to_data[handle[2]] = AllocationData(handle, tag)
    accelerator: Any = torch.accelerator
    accelerator.synchronize = accelerator.empty_cache = lambda *_: None
    accelerator.get_memory_info = lambda *_: gpu.info()

    worker: Any = object.__new__(Worker)
    model = types.SimpleNamespace(sleep_mode_backend="cumem", enable_nccl_comm_suspend=False)
    worker.vllm_config, worker.model_config = types.SimpleNamespace(model_config=model), model
    worker._sleep_mode_backend = None
    model.sleep_preserve_parameter_names = None
    runner = types.SimpleNamespace(model=torch.nn.Module(), get_draft_model=lambda: None)
    worker.model_runner = runner
    worker._sleep_saved_parameters = worker._sleep_saved_buffers = {}
    worker._sleep_saved_draft_buffers = {}
    worker.synchronize_device = worker.reset_mm_cache = worker.reset_encoder_cache = lambda: None
    executor: Any = object.__new__(UniProcExecutor)
    executor.driver_worker, executor.sleeping_tags = worker, set()
    return executor


class CoreClient:
    """Calls of AsyncLLM to its engine core, without a process in between."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._core, name.removesuffix("_async"))

        async def call(*arguments: Any, **named: Any) -> Any:
            done = method(*arguments, **named)
            assert not hasattr(done, "add_done_callback"), "nothing has to be waited for"
            return done

        return call


class Scene:
    """A server with one engine. seen: the memory (see SIZES) when a phase of a push began."""

    def __init__(self) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.core import EngineCoreProc

        from rollout_server.engines.vllm.engine import VllmEngine

        self.gpu, self.scheduler = Gpu(), Scheduler()
        for name, letter in (("weights", "0"), ("beside", "z"), ("kv_cache", "k")):
            self.gpu.write(name, letter)
        core: Any = object.__new__(EngineCoreProc)
        core.model_executor, core.scheduler = executor_of(self.gpu), self.scheduler
        core.engines_running, core.batch_queue, core.mm_receiver_cache = False, None, None
        core.set_weight_version = lambda version: None
        llm: Any = object.__new__(AsyncLLM)
        llm.engine_core, llm.logger_manager = CoreClient(core), None
        llm.renderer = types.SimpleNamespace(
            clear_mm_cache_async=_nothing, _join_mm_warmup=lambda: None, shutdown=lambda: None
        )
        self.seen: dict[str, str] = {}
        self.dead = False
        scene = self

        class Engine(VllmEngine):
            """Its weight phases are those of a bench; `receive_weights` brings the letter."""

            dtype = "float32"
            received = ""

            async def weight_phase(self, name: str, **arguments: Any) -> list[Any]:
                scene.seen[name] = f"{scene.gpu.seen()} {scene.paused}"
                if name == "receive_weights":
                    scene.gpu.write("weights", self.received)
                return ANSWERS.get(name, [None])

            def declare_dead(self) -> None:
                scene.dead = True
                super().declare_dead()

        self.engine: Any = Engine(llm, 0, None)
        self.bench = Bench()
        self.bench.world_size = 2
        engines: Any = types.SimpleNamespace(
            all=lambda: [self.engine], alive=lambda: [] if self.dead else [self.engine]
        )
        self.updates = WeightUpdates(engines, 1, "gloo", lambda: "epoch", 60.0)
        self.bench.updates = self.updates

    @property
    def paused(self) -> str:
        return "runs" if self.scheduler.pause_state.name == "UNPAUSED" else "paused"

    def note(self, name: str) -> None:
        self.seen[name] = f"{self.gpu.seen()} {self.paused}"

    async def push(self, version: int) -> None:
        self.engine.received = str(version)
        await self.bench.push(version)

    async def refused(self, call: Awaitable[Any]) -> str:
        try:
            await call
        except ProblemError as error:
            return f"{error.problem.status} {error.problem.detail}"
        return "no"


async def _nothing() -> None: ...


async def steps() -> dict[str, Any]:
    """Two steps with a push, and then answers without one."""
    scene = Scene()
    await scene.bench.init()
    await scene.updates.sleep()
    scene.note("asleep")
    before = scene.scheduler.resets
    await scene.updates.sleep()
    scene.note("asleep twice")
    await scene.push(1)
    scene.note("pushed")
    resets = scene.scheduler.resets - before
    await scene.updates.sleep()
    await scene.push(2)
    scene.note("pushed again")
    await scene.updates.sleep()
    await scene.updates.wake_up()
    scene.note("woken")
    return scene.seen | {"resets": resets > 0}


async def no_memory() -> dict[str, Any]:
    """The learner has left too little when its push begins."""
    scene = Scene()
    await scene.bench.init()
    await scene.updates.sleep()
    scene.gpu.full = True
    refusal = await scene.refused(scene.push(1))
    return {"refusal": refusal, "state": scene.updates.state, "dead": scene.dead}


async def level_2() -> dict[str, Any]:
    """Where the engine would drop its weights, and a push comes."""
    scene = Scene()
    await scene.bench.init()
    await scene.engine.pause()
    await scene.engine._llm.sleep(level=2, mode="wait")
    scene.engine._asleep = {"weights", "kv_cache"}
    await scene.push(1)
    scene.note("pushed")
    return scene.seen


def main() -> None:
    import vllm.v1.worker.gpu_worker  # noqa: F401  before its platform is put

    import rollout_server.engines.vllm.engine  # noqa: F401

    fake_nvml(80)
    put_platform()
    for scene in (steps, no_memory, level_2):
        print(json.dumps(asyncio.run(scene())))


if __name__ == "__main__":
    main()
