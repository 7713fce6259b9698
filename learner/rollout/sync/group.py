"""The learner's part of a weight group: rank 0, which sends (SYNC-03).

The wire format is in `shared_contracts.weights`. While one bucket travels, the next one is packed.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import DistError, TCPStore
from torch.multiprocessing.reductions import reduce_tensor

from shared_contracts.weights import (
    HOST_MEMORY_NAME,
    DeviceMemory,
    HostMemory,
    InitCommunicator,
    ParameterMeta,
    SharedMemory,
    attempt_key,
    digest,
    join_ranks,
    plan_buckets,
    positions_of,
)

_STORE_PROBE_S = 2.0
_STORE_POLL_S = 0.02

# `ProcessGroupGloo` or `ProcessGroupNCCL`: the stubs of torch lack their methods.
ProcessGroup: TypeAlias = Any


def join_group(body: InitCommunicator, given_up: threading.Event, number: int = 0) -> "Sender":
    """Join the group that `POST /init_communicator/` with `body` forms.

    given_up: set when the call was refused. number: of this learner process among the senders.
    """
    store = _open_store(body, given_up)
    device = torch.device("cpu")
    if body.transport == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    group = join_ranks(torch, store, body, 0, number, device, given_up.is_set)
    kind = SharedMemorySender if body.transport == "ipc" else Sender
    return kind(group, body, device)


def _open_store(body: InitCommunicator, given_up: threading.Event) -> TCPStore:
    """Return the server's store once it is open.

    Torch's own wait cannot be ended: left behind, it would join a later group.
    """
    deadline = time.monotonic() + body.timeout_s
    while not given_up.is_set():
        try:
            socket.create_connection((body.host, body.port), _STORE_PROBE_S).close()
            probe = timedelta(seconds=_STORE_PROBE_S)
            store = TCPStore(
                body.host, body.port, is_master=False, wait_for_workers=False, timeout=probe
            )
            if store.check([attempt_key(body.attempt)]):
                store.set_timeout(timedelta(seconds=body.timeout_s))
                return store
            missing = "the store there is that of an earlier call"
        except (OSError, DistError) as error:
            missing = str(error)
        if time.monotonic() > deadline:
            address = f"{body.host}:{body.port}"
            raise TimeoutError(f"no rendezvous at {address} after {body.timeout_s:g} s ({missing})")
        given_up.wait(_STORE_POLL_S)
    raise ConnectionAbortedError("the group was given up")


class Sender:
    """Sends over sockets (gloo) or NCCL. device: of the buckets."""

    def __init__(self, group: ProcessGroup, body: InitCommunicator, device: torch.device) -> None:
        self._group: ProcessGroup | None = group
        self._bucket_bytes = body.bucket_bytes
        self._timeout_s = body.timeout_s
        self._device = device

    def send(
        self, parameters: Sequence[ParameterMeta], weights: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Send one pass of `weights`, which yields exactly `parameters`.

        Raises RuntimeError (torch's) if a worker has left, or is silent for the group's timeout,
        and ConnectionAbortedError if the group was abandoned.
        """
        deadline = time.monotonic() + self._timeout_s
        plan = plan_buckets(parameters, self._bucket_bytes)
        sizes = [sum(p.wire_bytes for p in members) for members in plan]
        packed = [size for members, size in zip(plan, sizes, strict=True) if self._packs(members)]
        slots = self._slots(max([*packed, 8 * len(plan)]))
        stream, found, sending = iter(weights), list[Tensor](), None
        for number, (members, size) in enumerate(zip(plan, sizes, strict=True)):
            if self._packs(members):
                bucket = slots[number % 2][:size]
                pack_bucket(members, stream, bucket)
            else:
                bucket = next_bytes(members[0], stream).to(self._device)
            words = bucket.view(torch.int64)
            found.append(digest(words, torch.arange(positions_of(len(words)), device=words.device)))
            sending = self._begin_after(sending, bucket, deadline)
        trailer = slots[len(plan) % 2][: 8 * len(plan)]
        trailer.view(torch.int64).copy_(torch.stack(found))
        self._begin_after(sending, trailer, deadline)()

    def abandon(self) -> None:
        """Leave the group, also in the middle of a `send`.

        Nothing can interrupt a collective of gloo. The end of its group waits for it, in a thread.
        """
        held, self._group = [self._group], None
        threading.Thread(target=held.clear, daemon=True).start()

    def _begin_after(
        self, former: Callable[[], object] | None, bucket: Tensor, deadline: float
    ) -> Callable[[], object]:
        """Wait for the former bucket, then begin to send this one; return the wait for it."""
        if former is not None:
            former()
        group = self._group
        if group is None:
            raise ConnectionAbortedError("the group was given up")
        left = timedelta(seconds=deadline - time.monotonic())
        if left <= timedelta(0):
            raise TimeoutError("the time of the transfer is over")
        group.set_timeout(left)
        return self._begin(group, bucket, left)

    def _packs(self, members: Sequence[ParameterMeta]) -> bool:
        """Return whether a bucket is packed; a single large tensor is sent without a copy."""
        return len(members) > 1 or members[0].num_bytes < members[0].wire_bytes

    def _slots(self, size: int) -> Sequence[Tensor]:
        return [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]

    def _begin(self, group: ProcessGroup, bucket: Tensor, left: timedelta) -> Callable[[], object]:
        return partial(group.broadcast(bucket, 0).wait, left)


class SharedMemorySender(Sender):
    """Sends through memory that the workers map (ipc), on the GPU if there is one."""

    def send(
        self, parameters: Sequence[ParameterMeta], weights: Iterable[tuple[str, Tensor]]
    ) -> None:
        with ExitStack() as self._sending:
            super().send(parameters, weights)

    def _packs(self, members: Sequence[ParameterMeta]) -> bool:
        return True

    def _slots(self, size: int) -> Sequence[Tensor]:
        if self._group is None:
            raise ConnectionAbortedError("the group was given up")
        data, shared = self._sending.enter_context(mapped_memory(size))
        text = torch.tensor(list(shared.model_dump_json().encode()), dtype=torch.uint8)
        timeout = timedelta(seconds=self._timeout_s)
        for part in (torch.tensor([len(text)]), text):
            self._group.broadcast(part, 0).wait(timeout)
        slots: Sequence[Tensor] = data.split(shared.slot_bytes)
        return slots

    def _begin(self, group: ProcessGroup, bucket: Tensor, left: timedelta) -> Callable[[], object]:
        """Let the workers copy the slot while the next one is packed."""
        if bucket.is_cuda:
            torch.cuda.synchronize(bucket.device)
        group.broadcast(torch.zeros(1, dtype=torch.uint8), 0).wait(left)
        return lambda: group.barrier().wait(left)


@contextmanager
def mapped_memory(size: int) -> Iterator[tuple[Tensor, SharedMemory]]:
    """Yield two slots of `size` bytes (uint8), and their description for other processes."""
    size = -(-size // 16) * 16
    if torch.cuda.is_available():
        data = torch.empty(2 * size, dtype=torch.uint8, device="cuda")
        yield data, SharedMemory(slot_bytes=size, memory=_device_memory(data))
        return
    with os.fdopen(os.memfd_create(HOST_MEMORY_NAME)) as file:
        os.truncate(file.fileno(), 2 * size)
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        data = torch.from_file(path, shared=True, size=2 * size, dtype=torch.uint8)
        yield data, SharedMemory(slot_bytes=size, memory=HostMemory(path=path))


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


def pack_bucket(
    parameters: Sequence[ParameterMeta], stream: Iterator[tuple[str, Tensor]], bucket: Tensor
) -> None:
    """Fill `bucket` (uint8) with the next tensors, each padded to its `wire_bytes`."""
    offset = 0
    for parameter in parameters:
        data = next_bytes(parameter, stream)
        end = offset + data.numel()
        bucket[offset:end] = data  # copies between devices, too
        del data  # a gathered parameter must not stay while the next one is gathered
        offset += parameter.wire_bytes
        bucket[end:offset] = 0


def next_bytes(parameter: ParameterMeta, stream: Iterator[tuple[str, Tensor]]) -> Tensor:
    """Return the next tensor, which must be `parameter`, as flat uint8."""
    name, tensor = next(stream)
    assert name == parameter.name, f"the manifest says {parameter.name}, the model {name}"
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    assert data.numel() == parameter.num_bytes, f"{name} is not what the manifest says"
    return data
