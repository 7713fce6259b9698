"""Worker side of the `ipc` weight transfer: buckets lie in memory that the learner shares.

The gloo group carries signals alone (the protocol is in `shared_contracts.weights`). The
memory is the GPU's, or on the CPU a file without a name; either stays mapped until the next
update maps another, or the group is left.
"""

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
from shared_contracts.weights import DeviceMemory, ParameterMeta, SharedBuffer


@dataclass
class Handover:
    """One bucket: the learner fills the buffer, the worker copies it out, the buffer is free."""

    group: ProcessGroupGloo
    buffer: Tensor
    into: Tensor

    def wait(self) -> None:
        """Raises RuntimeError (torch's) when another rank is missing for too long."""
        self.group.barrier().wait()  # type: ignore[attr-defined]
        self.into.copy_(self.buffer[: len(self.into)])
        if self.into.is_cuda:
            torch.cuda.synchronize(self.into.device)
        self.group.barrier().wait()  # type: ignore[attr-defined]


class IpcWeightTransferEngine(GlooWeightTransferEngine):
    _buffer: Tensor | None = None

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Map the learner's buffer, then receive as over gloo."""
        if self._group is not None:
            self._buffer = mapped(receive_buffer(self._group))
        super().receive_weights(update_info)

    def shutdown(self) -> None:
        super().shutdown()
        self._buffer = None

    def _begin(self, parameters: list[ParameterMeta]) -> Bucket:
        if self._group is None or self._buffer is None:
            raise RuntimeError("the weight group is not formed; call /init_communicator/ first")
        size = sum(p.wire_bytes for p in parameters)
        data = torch.empty(size, dtype=torch.uint8, device=self._buffer.device)
        return Bucket(parameters, data, Handover(self._group, self._buffer, data))


def receive_buffer(group: ProcessGroupGloo) -> SharedBuffer:
    """What the learner says of its buffer."""
    length = torch.empty(1, dtype=torch.int64)
    group.broadcast(length, 0).wait()  # type: ignore[attr-defined]
    text = torch.empty(int(length), dtype=torch.uint8)
    group.broadcast(text, 0).wait()  # type: ignore[attr-defined]
    return SharedBuffer.model_validate_json(bytes(text.tolist()))


def mapped(shared: SharedBuffer) -> Tensor:
    """The learner's buffer as a uint8 tensor of this process.

    Raises RuntimeError where it cannot be mapped: another machine, or another GPU.
    """
    memory = shared.memory
    if isinstance(memory, DeviceMemory):
        return _device_tensor(memory, shared.bytes)
    return torch.from_file(memory.path, shared=True, size=shared.bytes, dtype=torch.uint8)


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
