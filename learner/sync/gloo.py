"""Rank 0 of a gloo weight group: packed buckets over sockets, no GPU needed.

The wire format is in `shared_contracts.weights`.
"""

import threading
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore, Work

from shared_contracts.addresses import address_towards
from shared_contracts.weights import (
    GLOO_STORE_PREFIX,
    InitCommunicator,
    ParameterMeta,
    plan_buckets,
)

# Buckets that are sent at the same time.
_IN_FLIGHT = 2

CPU = torch.device("cpu")

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
