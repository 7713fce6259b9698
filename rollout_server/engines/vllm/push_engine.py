"""The workers' part of a push: vLLM's plug-in for weight transfer (SYNC-03).

    init_transfer_engine   join the group                         POST /init_communicator/
    start_weight_update    vLLM's layerwise reload begins         POST /start_weight_update/
    receive_weights        buckets -> one stream -> load_weights  POST /update_weights/
    finish_weight_update   vLLM's layerwise reload ends           POST /finish_weight_update/
    shutdown               leave the group                        POST /close_communicator/

The wire format is in `shared_contracts.weights`. A failed worker leaves the group, which ends the
learner's send at once.
"""

import mmap
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import TCPStore
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from shared_contracts.machine import signal_at_death_of
from shared_contracts.weights import (
    HOST_MEMORY_NAME,
    DeviceMemory,
    InitCommunicator,
    ParameterMeta,
    SharedMemory,
    digest,
    join_ranks,
    plan_buckets,
    positions_of,
)

BACKEND = "rollmatch"
# Limit of a `SharedMemory` as JSON, in bytes.
_MOST_JSON = 64 * 2**10


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """group: fields of the `InitCommunicator`.

    first_worker: index of the engine's first worker among the workers of all engines.
    """

    group: dict[str, Any]
    first_worker: int


@dataclass
class Manifest(WeightTransferUpdateInfo):
    """parameters: fields of each `ParameterMeta`, in wire order."""

    parameters: list[dict[str, Any]]


class PushEngine(WeightTransferEngine[GroupInfo, Manifest]):
    """vLLM's weight transfer engine of one worker."""

    init_info_cls = GroupInfo
    update_info_cls = Manifest

    _group: "Receiver | None" = None
    _bucket_bytes = 0
    _loading = ""  # name of the parameter being loaded

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Join the group, and wait for all ranks.

        Raises TimeoutError with the missing ranks after `timeout_s`.
        """
        self.shutdown()
        init = InitCommunicator.model_validate(init_info.group)
        self._bucket_bytes = init.bucket_bytes
        timeout = timedelta(seconds=init.timeout_s)
        store = TCPStore(
            init.host, init.port, is_master=False, wait_for_workers=False, timeout=timeout
        )
        worker = init_info.first_worker + self.parallel_config.rank
        share = init.world_size // init.senders - 1  # workers of each sender
        buckets_on = torch.device("cpu")
        if init.transport == "nccl":
            torch.accelerator.set_device_index(self.device)
            buckets_on = self.device
        group = join_ranks(torch, store, init, 1 + worker % share, worker // share, buckets_on)
        kind = SharedMemoryReceiver if init.transport == "ipc" else Receiver
        self._group = kind(group, init.timeout_s, buckets_on)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)
        for module in self.model.modules() if self.device.type == "cpu" else ():
            # The set-up of this kernel packs the experts' weights; a reload alone does not.
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None

    def receive_weights(self, update_info: Manifest) -> None:
        """Receive all buckets and load them by one `load_weights`.

        Raises RuntimeError with the parameter that cannot be loaded, or for a wrong digest.
        """
        if self._group is None:
            raise RuntimeError("there is no weight group")
        parameters = [ParameterMeta.model_validate(each) for each in update_info.parameters]
        self._loading = ""
        try:
            self.model.load_weights(self._stream(parameters, self._group))  # type: ignore[operator]
        except BaseException as error:
            self.shutdown()
            if self._loading and isinstance(error, Exception):
                found = f"{type(error).__name__}: {error}"
                raise RuntimeError(f"{self._loading} cannot be loaded: {found}") from error
            raise

    def _stream(
        self, parameters: Sequence[ParameterMeta], group: "Receiver"
    ) -> Iterator[tuple[str, Tensor]]:
        plan = plan_buckets(parameters, self._bucket_bytes)
        sizes = [sum(p.wire_bytes for p in members) for members in plan]
        buckets = group.receive([*sizes, 8 * len(sizes)])
        digests = list[Tensor]()
        for members in plan:
            bucket = next(buckets)
            words = bucket.view(torch.int64)
            if not digests:  # one range for all buckets: each new one takes as long as a digest
                positions = torch.arange(positions_of(max(sizes) // 8), device=words.device)
            digests.append(digest(words, positions))
            for name, tensor in unpacked(bucket, members):
                self._loading = name
                yield name, tensor.to(self.device)
            self._loading = ""
        sent = next(buckets).view(torch.int64).tolist()
        wrong = [i for i, total in enumerate(digests) if int(total) != sent[i]]
        if wrong:
            first = plan[wrong[0]]
            raise RuntimeError(
                f"{len(wrong)} of {len(plan)} buckets are not as they were sent; the first has "
                f"{first[0].name} to {first[-1].name}"
            )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        weights = set[int]()
        for module in self.model.modules() if self.device.type == "cpu" else ():
            # A layer with adapters shares the weight of its `base_layer`, which is packed already.
            if hasattr(module, "base_layer"):
                continue
            # A tied head has a packed copy of the embedding, which the reload does not update.
            weight: Any = getattr(module, "weight", None)
            if id(weight) in weights and (method := getattr(module, "quant_method", None)):
                method.process_weights_after_loading(module)
            weights.add(id(weight))

    def shutdown(self) -> None:
        """Leave the group; its connections close after its last collective."""
        if self._group is not None:
            held, self._group = [self._group], None
            threading.Thread(target=held.clear, daemon=True).start()


def unpacked(bucket: Tensor, parameters: Sequence[ParameterMeta]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a uint8 bucket, as views."""
    offset = 0
    for parameter in parameters:
        data = bucket[offset : offset + parameter.num_bytes]
        yield parameter.name, data.view(getattr(torch, parameter.dtype)).view(parameter.shape)
        offset += parameter.wire_bytes


# `ProcessGroupGloo` or `ProcessGroupNCCL`; torch's stubs lack their methods.
ProcessGroup: TypeAlias = Any


@dataclass
class Receiver:
    """Receives buckets over sockets or NCCL. device: of the buckets."""

    group: ProcessGroup
    timeout_s: float
    device: torch.device

    def receive(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Yield a uint8 tensor of each size; the next one is received meanwhile.

        Raises RuntimeError if rank 0 is lost or the transfer exceeds the group's timeout.
        """
        left = _countdown(self.timeout_s)
        arriving = self._begin(sizes[0], left)
        for size in [*sizes[1:], None]:
            data, work = arriving
            work.wait(left())
            if size is not None:
                arriving = self._begin(size, left)
            yield data

    def _begin(self, size: int, left: Callable[[], timedelta]) -> tuple[Tensor, Any]:
        self.group.set_timeout(left())
        # A new tensor each time: the reload keeps views of it until a layer is complete.
        data = torch.empty(size, dtype=torch.uint8, device=self.device)
        return data, self.group.broadcast(data, 0)


class SharedMemoryReceiver(Receiver):
    """Copies buckets from the learner's memory."""

    def receive(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Yield a uint8 tensor of each size; rank 0 fills the next slot meanwhile."""
        left = _countdown(self.timeout_s)
        length = int(self._broadcast(torch.empty(1, dtype=torch.int64), left))
        if not 0 < length <= _MOST_JSON:
            raise RuntimeError(f"{length} bytes cannot describe the learner's memory")
        text = self._broadcast(torch.empty(length, dtype=torch.uint8), left)
        shared = SharedMemory.model_validate_json(bytes(text.tolist()))
        slots = mapped(shared).split(shared.slot_bytes)
        for number, size in enumerate(sizes):
            self._broadcast(torch.empty(1, dtype=torch.uint8), left)
            data = slots[number % 2][:size].clone()
            if data.is_cuda:
                torch.cuda.synchronize(data.device)
            self.group.set_timeout(left())
            self.group.barrier().wait(left())
            yield data

    def _broadcast(self, tensor: Tensor, left: Callable[[], timedelta]) -> Tensor:
        self.group.set_timeout(left())
        self.group.broadcast(tensor, 0).wait(left())
        return tensor


def _countdown(timeout_s: float) -> Callable[[], timedelta]:
    """Return a function that returns the time left, or raises RuntimeError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s

    def left() -> timedelta:
        seconds = deadline - time.monotonic()
        if seconds < 0.001:  # gloo counts in milliseconds
            raise RuntimeError(f"the transfer was not over within {timeout_s:g} s")
        return timedelta(seconds=seconds)

    return left


def mapped(shared: SharedMemory) -> Tensor:
    """Map the learner's memory (two slots) as a uint8 tensor.

    Raises RuntimeError if it cannot be mapped (another machine or GPU) or is no learner's memory.
    """
    memory, size = shared.memory, 2 * shared.slot_bytes
    if isinstance(memory, DeviceMemory):
        return _device_tensor(memory, size)
    try:
        # O_NONBLOCK: the path may name a pipe.
        file = os.open(memory.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeError(f"the learner's memory cannot be opened: {error}") from error
    try:
        target, held = os.readlink(f"/proc/self/fd/{file}"), os.fstat(file).st_size
        if not target.startswith(f"/memfd:{HOST_MEMORY_NAME}") or held != size:
            expected = f"not a learner's memory of {size} bytes"
            raise RuntimeError(f"{memory.path} is {target} of {held} bytes, {expected}")
        pages = mmap.mmap(file, size, prot=mmap.PROT_READ)
    finally:
        os.close(file)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(pages, dtype=torch.uint8)


def _device_tensor(memory: DeviceMemory, size: int) -> Tensor:
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    gpus = [str(device.uuid) for device in devices]
    if memory.gpu not in gpus:
        found = f"the learner's GPU {memory.gpu} is not visible to this worker"
        raise RuntimeError(f"{found}; use nccl or gloo")
    tensor: Tensor = rebuild_cuda_tensor(
        tensor_cls=torch.Tensor,
        tensor_size=torch.Size([size]),
        tensor_stride=(1,),
        storage_cls=torch.storage.TypedStorage,
        dtype=torch.uint8,
        storage_device=gpus.index(memory.gpu),
        requires_grad=False,
        **memory.model_dump(exclude={"gpu"}),
    )
    return tensor


@cache
def register() -> None:
    """Entry point of vLLM's plug-in, called in every engine process; it ends with its parent."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        signal_at_death_of(parent.pid, signal.SIGKILL)
    WeightTransferEngineFactory.register_engine(BACKEND, PushEngine)
