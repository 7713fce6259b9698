"""The learner's end of a weight group: rank 0, which sends (SYNC-03).

    gloo   over sockets, no GPU needed
    ipc    in memory that both sides map, on one machine; on a GPU it has not run yet
    nccl   vLLM's packed broadcast (`learner.rollout.sync.nccl`)

The wire format is in `shared_contracts.weights`.
"""

import os
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import DistError, PrefixStore, ProcessGroupGloo, TCPStore, Work
from torch.multiprocessing.reductions import reduce_tensor

from shared_contracts.machine import address_towards
from shared_contracts.weights import (
    GLOO_STORE_PREFIX,
    HOST_MEMORY_NAME,
    DeviceMemory,
    HostMemory,
    InitCommunicator,
    ParameterMeta,
    SharedBuffer,
    attempt_key,
    plan_buckets,
)

# Buckets that are sent at the same time.
_IN_FLIGHT = 2

CPU = torch.device("cpu")

T = TypeVar("T")

# The parameters of each bucket.
Plan = Sequence[Sequence[ParameterMeta]]


class RankLost(RuntimeError):
    """Another rank has left the group, or is missing after `timeout_s`; torch's own words."""


class GlooRank:
    """Rank 0 of a gloo group, outside torch's default group.

    Raises RankLost. The group is left then: the others, who wait for this rank, end at once.
    """

    def __init__(self, body: InitCommunicator) -> None:
        self._group: ProcessGroupGloo | None = form_group(body)
        self._bucket_bytes = body.bucket_bytes
        self._abandoned = threading.Event()

    def send(
        self, parameters: Sequence[ParameterMeta], weights: Iterable[tuple[str, Tensor]]
    ) -> None:
        group = self._group
        if group is None:
            raise ConnectionAbortedError("the group was given up")
        plan = [
            [parameters[i] for i in indices]
            for indices in plan_buckets(parameters, self._bucket_bytes)
        ]
        try:
            self._send(group, plan, iter(weights))
        except RankLost as error:
            self.abandon()
            del group
            traceback.clear_frames(error.__traceback__)  # they hold the group
            raise

    def close(self) -> None:
        if self._group is not None:
            self._group.shutdown()

    def abandon(self) -> None:
        """The group ends where its last collective does: within `timeout_s`, in a thread.

        Nothing can interrupt a collective of gloo, and the end of its group waits for it.
        """
        self._abandoned.set()
        held, self._group = [self._group], None
        threading.Thread(target=held.clear, daemon=True).start()

    def _send(
        self, group: ProcessGroupGloo, plan: Plan, stream: Iterator[tuple[str, Tensor]]
    ) -> None:
        """Bring each bucket of `plan` to the workers."""
        raise NotImplementedError

    def _go_on(self) -> None:
        """Raises ConnectionAbortedError when the group was abandoned."""
        if self._abandoned.is_set():
            raise ConnectionAbortedError("the group was given up")


class GlooGroup(GlooRank):
    """Sends buckets over sockets.

    While one bucket is on its way the next is packed, so two buffers of a bucket's size are
    kept. A parameter that travels alone is sent from where it lies.
    """

    def __init__(self, body: InitCommunicator) -> None:
        super().__init__(body)
        self._buffers = deque(torch.empty(0, dtype=torch.uint8) for _ in range(_IN_FLIGHT))

    def _send(
        self, group: ProcessGroupGloo, plan: Plan, stream: Iterator[tuple[str, Tensor]]
    ) -> None:
        sending: deque[Work] = deque()
        for members in plan:
            if len(sending) == _IN_FLIGHT:
                wait_for(sending.popleft())
            self._go_on()
            sending.append(group.broadcast(self._packed(members, stream), 0))  # type: ignore[attr-defined]
        for work in sending:
            wait_for(work)

    def _packed(
        self, parameters: Sequence[ParameterMeta], stream: Iterator[tuple[str, Tensor]]
    ) -> Tensor:
        """The next bucket; what it lies in is free again `_IN_FLIGHT` buckets later."""
        first = parameters[0]
        if len(parameters) == 1 and first.num_bytes == first.wire_bytes:
            return _next_bytes(first, stream, CPU)
        size = sum(p.wire_bytes for p in parameters)
        self._buffers.rotate()
        if self._buffers[0].numel() < size:
            self._buffers[0] = torch.empty(size, dtype=torch.uint8)
        bucket = self._buffers[0][:size]
        pack_bucket(parameters, stream, bucket)
        return bucket


def wait_for(work: Work) -> None:
    """Raises RankLost."""
    try:
        work.wait()
    except RuntimeError as error:
        raise RankLost(str(error)) from error


def form_group(body: InitCommunicator) -> ProcessGroupGloo:
    """Join the group of `body` as rank 0, once its store is open; returns when all have joined."""
    timeout = timedelta(seconds=body.timeout_s)
    store = TCPStore(body.host, body.port, is_master=False, wait_for_workers=False, timeout=timeout)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    here = address_towards(body.host)
    options._devices = [ProcessGroupGloo.create_device(hostname=here)]
    group = ProcessGroupGloo(PrefixStore(GLOO_STORE_PREFIX, store), 0, body.world_size, options)
    group.barrier().wait()  # type: ignore[attr-defined]
    return group


def pack_bucket(
    parameters: Sequence[ParameterMeta], stream: Iterator[tuple[str, Tensor]], bucket: Tensor
) -> None:
    """Fill `bucket` (uint8) with the next tensors, each padded to its `wire_bytes`."""
    offset = 0
    for parameter in parameters:
        data = _next_bytes(parameter, stream, bucket.device)
        end = offset + data.numel()
        bucket[offset:end] = data
        offset += parameter.wire_bytes
        bucket[end:offset] = 0


def _next_bytes(
    parameter: ParameterMeta, stream: Iterator[tuple[str, Tensor]], device: torch.device
) -> Tensor:
    """The next tensor, which must be `parameter`, as flat uint8; in place where that can be."""
    name, tensor = next(stream)
    assert name == parameter.name, f"the manifest says {parameter.name}, the model {name}"
    data = tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)
    assert data.numel() == parameter.num_bytes, f"{name} is not what the manifest says"
    return data


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


_STORE_PROBE_S = 2.0
_STORE_POLL_S = 0.02


class WeightGroup(Protocol):
    """Sends one pass of the weights to every worker of a server."""

    def send(
        self, parameters: Sequence[ParameterMeta], weights: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Broadcast `weights`, which yields exactly `parameters`, in packed buckets."""

    def close(self) -> None:
        """Leave the group in order."""

    def abandon(self) -> None:
        """Leave a group whose other side may hang, at once; a `send` of it ends by itself."""


class CurrentGpu:
    """The GPU that is current in this thread; CUDA starts every other thread at GPU 0.

    None was chosen in a process that has not used CUDA yet: it is not made to.
    """

    def __init__(self) -> None:
        self._index = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def used_by(self, call: Callable[[], T]) -> Callable[[], T]:
        """`call`, for another thread, in which it is made current first."""

        def on_it() -> T:
            if self._index is not None:
                torch.cuda.set_device(self._index)
            return call()

        return on_it


def new_nccl_id() -> str:
    """What the ranks of one NCCL group meet by; imports what joining that group needs."""
    from learner.rollout.sync import nccl

    return nccl.new_nccl_id()


def join_group(body: InitCommunicator, given_up: threading.Event) -> WeightGroup:
    """Join the group that `POST /init_communicator/` with `body` forms.

    given_up: set when the call was refused, so that nobody waits for its group any more.
    """
    _wait_for_store(body, given_up)
    match body.transport:
        case "gloo":
            return GlooGroup(body)
        case "nccl":
            from learner.rollout.sync.nccl import NcclGroup

            return NcclGroup(body, given_up)
        case "ipc":
            return IpcGroup(body)


def _wait_for_store(body: InitCommunicator, given_up: threading.Event) -> None:
    """Wait until the server has opened the rendezvous.

    Torch's own wait cannot be ended: left behind, it would join a later group, or abort
    the process at its exit.
    """
    deadline = time.monotonic() + body.timeout_s
    while not given_up.is_set():
        missing = _missing(body)
        if missing is None:
            return
        if time.monotonic() > deadline:
            address = f"{body.host}:{body.port}"
            raise TimeoutError(f"no rendezvous at {address} after {body.timeout_s:g} s ({missing})")
        given_up.wait(_STORE_POLL_S)
    raise ConnectionAbortedError("the group was given up")


def _missing(body: InitCommunicator) -> str | None:
    """Why nobody can be met yet, or None; takes a few seconds at most."""
    probe = timedelta(seconds=_STORE_PROBE_S)
    try:
        socket.create_connection((body.host, body.port), _STORE_PROBE_S).close()
        store = TCPStore(
            body.host, body.port, is_master=False, wait_for_workers=False, timeout=probe
        )
        opened = store.check([attempt_key(body.attempt)])
    except (OSError, DistError) as error:
        return str(error)
    return None if opened else "the store there is that of an earlier call"
