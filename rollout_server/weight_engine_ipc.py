"""Worker side of the `ipc` weight transfer: buckets lie in memory that the learner shares.

The gloo group carries signals alone (the protocol is in `shared_contracts.weights`). The
memory is the GPU's, or on the CPU a file without a name; either is mapped while an update is
received.
"""

import mmap
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rollout_server.weight_engine_gloo import (
    Bucket,
    GlooUpdateInfo,
    GlooWeightTransferEngine,
)
from shared_contracts.weights import (
    HOST_MEMORY_NAME,
    DeviceMemory,
    ParameterMeta,
    SharedBuffer,
)

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
