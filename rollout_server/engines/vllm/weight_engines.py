"""Weight transfer inside a worker: vLLM's plugin with the `gloo` and `ipc` engines.

vLLM's own engines need CUDA; `nccl_engine` has the one that is used. These receive packed buckets
over a gloo group in which the learner is rank 0 and the workers of all replicas are ranks 1.. (the
wire format is in `shared_contracts.weights`). With `ipc` the group carries signals only: the bytes
lie in memory that the learner shares, on the GPU or in a file without a name. Loading goes through
vLLM's layerwise reload, as in its NCCL engine, with two differences:

- A broken transfer is finalized at once, so that no layer stays on the meta device; the worker
  leaves the group, so that the other ranks end, too.
- On the CPU a tied `lm_head` multiplies with a packed copy of the embedding that the
  reload does not rebuild; `finish_weight_update` does.
"""

import mmap
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from rollout_server.engines.vllm.load_plan import LoadableModel
from rollout_server.engines.vllm.nccl_engine import NcclEngine
from rollout_server.runtime.concurrency import timed
from rollout_server.runtime.processes import die_with_parent
from shared_contracts.machine import address_towards
from shared_contracts.weights import (
    GLOO_STORE_PREFIX,
    GLOO_TRANSPORTS,
    HOST_MEMORY_NAME,
    DeviceMemory,
    InitCommunicator,
    ParameterMeta,
    SharedBuffer,
    Transport,
    plan_buckets,
)

# Under which vLLM knows the engine of each transport. Its own `ipc` takes pickled handles, and in
# its own `nccl` a rank waits without end for one that does not come.
ENGINES: dict[Transport, str] = {"gloo": "gloo", "nccl": "nccl-met", "ipc": "shared-memory"}


def init_info(init: InitCommunicator, transport: Transport, rank_offset: int) -> dict[str, Any]:
    """What a worker's transfer engine needs to join the group.

    rank_offset: rank of the engine's first worker; the learner is rank 0.
    """
    if transport in GLOO_TRANSPORTS:
        return {
            "host": init.host,
            "port": init.port,
            "rank_offset": rank_offset,
            "world_size": init.world_size,
            "bucket_bytes": init.bucket_bytes,
            "timeout_s": init.timeout_s,
        }
    assert transport == "nccl"
    return {
        "host": init.host,
        "port": init.port,
        "timeout_s": init.timeout_s,
        "nccl_unique_id_b64": init.nccl_unique_id,
        "rank_offset": rank_offset,
        "world_size": init.world_size,
        "packed": True,
        "packed_buffer_size_bytes": init.bucket_bytes,
    }


def update_info(transport: Transport, parameters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a worker's transfer engine needs to receive `parameters` (`ParameterMeta`)."""
    if transport in GLOO_TRANSPORTS:
        return {"parameters": list(parameters)}
    assert transport == "nccl"
    return {
        "names": [parameter["name"] for parameter in parameters],
        "dtype_names": [parameter["dtype"] for parameter in parameters],
        "shapes": [parameter["shape"] for parameter in parameters],
    }


# --- gloo


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """rank_offset: rank in the weight group of this engine's first worker."""

    host: str
    port: int
    rank_offset: int
    world_size: int
    bucket_bytes: int
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """parameters: `ParameterMeta` as plain dicts, in the order they travel."""

    parameters: list[dict[str, Any]]


class Broadcast(Protocol):
    """A broadcast under way (torch's `Work`)."""

    def wait(self) -> object: ...


@dataclass
class Bucket:
    """Parameters that travel together, their bytes, and the broadcast that fills these."""

    parameters: list[ParameterMeta]
    data: torch.Tensor
    arriving: Broadcast


@dataclass
class Progress:
    """How far a transfer is.

    seconds: spent on waiting for buckets (`transfer`) and on loading them (`load`).
    parameter: the one loaded last.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    parameter: str = "the first parameter"


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """A worker's member of the weight group; vLLM calls it phase by phase."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._group: ProcessGroupGloo | None = None
        self._bucket_bytes = 0
        self._timeout_s = 0.0
        self._deadline = 0.0
        self.progress = Progress()

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the weight group; returns once every rank of it has joined.

        Raises RuntimeError when a rank is missing after `timeout_s`.
        """
        self.shutdown()
        self._group = join_group(init_info, init_info.rank_offset + self.parallel_config.rank)
        self._bucket_bytes = init_info.bucket_bytes
        self._timeout_s = init_info.timeout_s

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive bucket after bucket within `timeout_s`; while one is loaded, the next comes.

        Raises RuntimeError when the group is not formed, and with the names of what the
        learner did not send (in time) or what cannot be loaded; the group is left then.
        """
        self._deadline = time.monotonic() + self._timeout_s
        try:
            self._receive(update_info)
        except BaseException:
            self.shutdown()
            raise

    def _receive(self, update_info: GlooUpdateInfo) -> None:
        self.progress = progress = Progress()
        parameters = [ParameterMeta.model_validate(p) for p in update_info.parameters]
        plan = [parameters[b.start : b.stop] for b in plan_buckets(parameters, self._bucket_bytes)]
        coming = self._begin(plan[0])
        for following in [*plan[1:], None]:
            bucket = coming
            with timed(progress.seconds, "transfer"):
                self._await(bucket)
            if following is not None:
                coming = self._begin(following)
            with timed(progress.seconds, "load"):
                self._load(bucket)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            rebuild_packed_heads(self.model)

    def shutdown(self) -> None:
        """Leave the group: its connections close when it is destroyed, and only then.

        That waits for a collective under way, which nothing can interrupt: in a thread.
        """
        if self._group is not None:
            held = [self._group]
            self._group = None
            threading.Thread(target=held.clear, daemon=True).start()

    def _group_in_time(self) -> ProcessGroupGloo:
        """The group, for a collective that has what is left of the update's time."""
        if self._group is None:
            raise RuntimeError("the weight group is not formed; call /init_communicator/ first")
        left = timedelta(seconds=self._deadline - time.monotonic())
        if left < timedelta(milliseconds=1):  # gloo counts in these
            raise RuntimeError(f"the transfer was not over within {self._timeout_s:g} s")
        self._group.set_timeout(left)
        return self._group

    def _begin(self, parameters: list[ParameterMeta]) -> Bucket:
        group = self._group_in_time()
        # A fresh buffer each time: the reload keeps views of it until a layer is complete.
        data = torch.empty(sum(p.wire_bytes for p in parameters), dtype=torch.uint8)
        arriving = group.broadcast(data, 0)  # type: ignore[attr-defined]
        return Bucket(parameters, data, arriving)

    def _await(self, bucket: Bucket) -> None:
        try:
            bucket.arriving.wait()
        except RuntimeError as error:
            names = f"{bucket.parameters[0].name} to {bucket.parameters[-1].name}"
            raise RuntimeError(f"the bucket of {names} did not come: {error}") from error

    def _load(self, bucket: Bucket) -> None:
        try:
            cast(LoadableModel, self.model).load_weights(self._noted(bucket))
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"{self.progress.parameter} cannot be loaded: {failure}") from error

    def _noted(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in unpack(bucket.data, bucket.parameters, self.device):
            self.progress.parameter = name
            yield name, tensor


def join_group(info: GlooInitInfo, rank: int) -> ProcessGroupGloo:
    """Form the group of learner and workers, apart from torch's default group.

    The barrier keeps the server from closing the store while another rank still reads it.
    """
    timeout = timedelta(seconds=info.timeout_s)
    store = TCPStore(info.host, info.port, is_master=False, wait_for_workers=False, timeout=timeout)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    here = address_towards(info.host)
    options._devices = [ProcessGroupGloo.create_device(hostname=here)]
    prefixed = PrefixStore(GLOO_STORE_PREFIX, store)
    group = ProcessGroupGloo(prefixed, rank, info.world_size, options)
    group.barrier().wait()  # type: ignore[attr-defined]
    return group


def unpack(
    bucket: torch.Tensor, parameters: Sequence[ParameterMeta], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Cut a uint8 bucket into its named tensors (views of it on the CPU)."""
    offset = 0
    for parameter in parameters:
        data = bucket[offset : offset + parameter.num_bytes]
        tensor = data.view(getattr(torch, parameter.dtype)).view(parameter.shape)
        yield parameter.name, tensor.to(device)
        offset += parameter.wire_bytes


def rebuild_packed_heads(model: torch.nn.Module) -> None:
    """Make the packed copy of each language-model head follow its weight."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


# --- ipc


# Bytes of a `SharedBuffer` as JSON.
MOST_SAID = 64 * 2**10


@dataclass
class Handover:
    """One bucket: the learner fills the buffer, the worker copies it out, the buffer is free.

    group: the group, with the time that is left.
    """

    group: Callable[[], ProcessGroupGloo]
    buffer: Tensor
    into: Tensor

    def wait(self) -> None:
        """Raises RuntimeError (torch's) when another rank is missing for too long."""
        self.group().barrier().wait()  # type: ignore[attr-defined]
        self.into.copy_(self.buffer[: len(self.into)])
        if self.into.is_cuda:
            torch.cuda.synchronize(self.into.device)
        self.group().barrier().wait()  # type: ignore[attr-defined]


class IpcWeightTransferEngine(GlooWeightTransferEngine):
    """As over gloo, but for where the bytes of a bucket come from."""

    _buffer: Tensor | None = None

    def _receive(self, update_info: GlooUpdateInfo) -> None:
        """Map the learner's buffer, then receive as over gloo."""
        try:
            self._buffer = mapped(receive_buffer(self._group_in_time()))
            super()._receive(update_info)
        finally:
            self._buffer = None

    def _begin(self, parameters: list[ParameterMeta]) -> Bucket:
        assert self._buffer is not None
        size = sum(p.wire_bytes for p in parameters)
        data = torch.empty(size, dtype=torch.uint8, device=self._buffer.device)
        return Bucket(parameters, data, Handover(self._group_in_time, self._buffer, data))


def receive_buffer(group: ProcessGroupGloo) -> SharedBuffer:
    """What the learner says of its buffer.

    Raises RuntimeError when it would say more than `MOST_SAID` bytes.
    """
    length = torch.empty(1, dtype=torch.int64)
    group.broadcast(length, 0).wait()  # type: ignore[attr-defined]
    if not 0 < int(length) <= MOST_SAID:
        raise RuntimeError(f"{int(length)} bytes cannot describe the learner's buffer")
    text = torch.empty(int(length), dtype=torch.uint8)
    group.broadcast(text, 0).wait()  # type: ignore[attr-defined]
    return SharedBuffer.model_validate_json(bytes(text.tolist()))


def mapped(shared: SharedBuffer) -> Tensor:
    """The learner's buffer as a uint8 tensor of this process.

    Raises RuntimeError where it cannot be mapped (another machine, or another GPU) or is
    no buffer of a learner's.
    """
    memory = shared.memory
    if isinstance(memory, DeviceMemory):
        return _device_tensor(memory, shared.bytes)
    return _host_tensor(memory.path, shared.bytes)


def _host_tensor(path: str, size: int) -> Tensor:
    """Read-only, and never more than the file has: what is mapped stays as it is."""
    try:
        # Not blocking: what the path names may be a pipe.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeError(f"the learner's buffer cannot be opened: {error}") from error
    try:
        found, held = os.readlink(f"/proc/self/fd/{file}"), os.fstat(file).st_size
        if not found.startswith(f"/memfd:{HOST_MEMORY_NAME}") or held != size:
            raise RuntimeError(f"{path} is {found} of {held} bytes, not a buffer of {size} bytes")
        memory = mmap.mmap(file, size, prot=mmap.PROT_READ)
    finally:
        os.close(file)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


def _device_tensor(memory: DeviceMemory, size: int) -> Tensor:
    tensor: Tensor = rebuild_cuda_tensor(
        torch.Tensor,
        torch.Size([size]),
        (1,),
        memory.tensor_offset,
        torch.storage.TypedStorage,
        torch.uint8,
        _device_of(memory.gpu),
        memory.storage_handle,
        memory.storage_size_bytes,
        memory.storage_offset_bytes,
        False,
        memory.ref_counter_handle,
        memory.ref_counter_offset,
        memory.event_handle,
        memory.event_sync_required,
    )
    return tensor


def _device_of(gpu: str) -> int:
    """Which of the GPUs that this process sees has that UUID."""
    for device in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(device).uuid) == gpu:
            return device
    raise RuntimeError(f"the learner's GPU {gpu} is not visible to this worker; use nccl or gloo")


@cache
def register() -> None:
    """In every process of an engine: our engines, and a life tied to its parent's."""
    die_with_parent()
    WeightTransferEngineFactory.register_engine(ENGINES["gloo"], GlooWeightTransferEngine)
    WeightTransferEngineFactory.register_engine(ENGINES["ipc"], IpcWeightTransferEngine)
    WeightTransferEngineFactory.register_engine(ENGINES["nccl"], NcclEngine)
