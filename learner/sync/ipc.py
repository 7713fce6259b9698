"""The learner's end of the `ipc` transport: buckets in memory that the server's workers map.

The gloo group carries signals alone; the protocol is in `shared_contracts.weights`. On a GPU
the buffer is device memory and has not run on one yet; on the CPU it is a file without a
name, which ends with the last process that has mapped it.
"""

import os
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo
from torch.multiprocessing.reductions import reduce_tensor

from learner.sync.gloo import GlooRank, Plan, pack_bucket, wait_for
from shared_contracts.weights import (
    HOST_MEMORY_NAME,
    DeviceMemory,
    HostMemory,
    SharedBuffer,
)


class IpcGroup(GlooRank):
    """Fills the buffer with a bucket once all workers have copied the last one out."""

    def _send(
        self, group: ProcessGroupGloo, plan: Plan, stream: Iterator[tuple[str, Tensor]]
    ) -> None:
        sizes = [sum(p.wire_bytes for p in members) for members in plan]
        with Buffer(max(sizes)) as buffer:
            _announce(group, buffer.shared)
            for members, size in zip(plan, sizes, strict=True):
                self._go_on()
                pack_bucket(members, stream, buffer.data[:size])
                _hand_over(group, buffer)


def _announce(group: ProcessGroupGloo, shared: SharedBuffer) -> None:
    text = torch.tensor(list(shared.model_dump_json().encode()), dtype=torch.uint8)
    for part in (torch.tensor([len(text)]), text):
        wait_for(group.broadcast(part, 0))  # type: ignore[attr-defined]


def _hand_over(group: ProcessGroupGloo, buffer: "Buffer") -> None:
    if buffer.data.is_cuda:
        torch.cuda.synchronize(buffer.data.device)
    for _ in ("filled", "copied out"):
        wait_for(group.barrier())  # type: ignore[attr-defined]


class Buffer:
    """Memory that other processes of this machine can map, on the GPU if there is one.

    data: uint8. shared: what they need to know of it.
    """

    def __init__(self, size: int) -> None:
        self._file: int | None = None
        if torch.cuda.is_available():
            self.data = torch.empty(size, dtype=torch.uint8, device="cuda")
            memory: HostMemory | DeviceMemory = _device_memory(self.data)
        else:
            self._file = os.memfd_create(HOST_MEMORY_NAME)
            os.truncate(self._file, size)
            path = f"/proc/{os.getpid()}/fd/{self._file}"
            self.data = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            memory = HostMemory(path=path)
        self.shared = SharedBuffer(bytes=size, memory=memory)

    def __enter__(self) -> "Buffer":
        return self

    def __exit__(self, *_: object) -> None:
        del self.data
        if self._file is not None:
            os.close(self._file)


def _device_memory(data: Tensor) -> DeviceMemory:
    _, described = reduce_tensor(data)
    return DeviceMemory(
        gpu=str(torch.cuda.get_device_properties(data.device).uuid),
        tensor_offset=described[3],
        storage_handle=described[7],
        storage_size_bytes=described[8],
        storage_offset_bytes=described[9],
        ref_counter_handle=described[11],
        ref_counter_offset=described[12],
        event_handle=described[13],
        event_sync_required=described[14],
    )
