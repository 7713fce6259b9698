"""The learner's end of a weight group: rank 0, which sends (SYNC-03).

gloo   no GPU needed; the wire format is in `shared_contracts.weights`
nccl   vLLM's stock packed broadcast; the server's workers run its stock engine
"""

import ipaddress
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore, Work

from shared_contracts.errors import ContractError
from shared_contracts.weights import (
    GLOO_STORE_PREFIX,
    InitCommunicator,
    ParameterMeta,
    plan_buckets,
)

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

_STORE_PROBE_S = 2.0
_STORE_POLL_S = 0.02

# Buckets that are sent at the same time.
_IN_FLIGHT = 2


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


def join_group(body: InitCommunicator, given_up: threading.Event) -> WeightGroup:
    """Join the group that `POST /init_communicator/` with `body` forms.

    given_up: set when the call was refused, so that nobody waits for its group any more.
    """
    match body.transport:
        case "gloo":
            _wait_for_store(body, given_up)
            return GlooGroup(body)
        case "nccl":
            return NcclGroup(body)
        case "ipc":
            raise ContractError(
                "rollout_matching.vllm.sync.transport",
                "ipc serves a learner and an engine on the same GPU",
                "Use nccl (distinct GPUs) or gloo (no GPU) with a rollout server",
            )


def _wait_for_store(body: InitCommunicator, given_up: threading.Event) -> None:
    """Wait until the server has opened the rendezvous.

    Torch's own wait cannot be ended: left behind, it would join a later group, or abort
    the process at its exit.
    """
    deadline = time.monotonic() + body.timeout_s
    while not given_up.is_set():
        try:
            socket.create_connection((body.host, body.port), _STORE_PROBE_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                address = f"{body.host}:{body.port}"
                raise TimeoutError(
                    f"nothing listens on {address} after {body.timeout_s:g} s ({error})"
                ) from error
        given_up.wait(_STORE_POLL_S)
    raise ConnectionAbortedError("the group was given up")


class GlooGroup:
    """Rank 0 over gloo, outside torch's default group.

    While one bucket is on its way the next is packed, so two buffers of a bucket's size are
    kept. A parameter that travels alone is sent from where it lies.

    Raises RuntimeError (torch's) when a rank is missing after `timeout_s`.
    """

    def __init__(self, body: InitCommunicator) -> None:
        timeout = timedelta(seconds=body.timeout_s)
        store = TCPStore(
            body.host, body.port, is_master=False, wait_for_workers=False, timeout=timeout
        )
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [_device(body.host)]
        prefixed = PrefixStore(GLOO_STORE_PREFIX, store)
        self._group = ProcessGroupGloo(prefixed, 0, body.world_size, options)
        self._group.barrier().wait()  # type: ignore[attr-defined]
        self._bucket_bytes = body.bucket_bytes
        self._buffers = deque(torch.empty(0, dtype=torch.uint8) for _ in range(_IN_FLIGHT))
        self._abandoned = threading.Event()

    def send(
        self, parameters: Sequence[ParameterMeta], weights: Iterable[tuple[str, Tensor]]
    ) -> None:
        stream, group = iter(weights), self._group
        sending: deque[Work] = deque()
        for indices in plan_buckets(parameters, self._bucket_bytes):
            if len(sending) == _IN_FLIGHT:
                sending.popleft().wait()
            if self._abandoned.is_set():
                raise ConnectionAbortedError("the group was given up")
            bucket = self._packed([parameters[i] for i in indices], stream)
            sending.append(group.broadcast(bucket, 0))  # type: ignore[attr-defined]
        for work in sending:
            work.wait()

    def close(self) -> None:
        self._group.shutdown()

    def abandon(self) -> None:
        """The group ends where its last collective does: within `timeout_s`, in a thread.

        Nothing can interrupt a collective of gloo, and the end of its group waits for it.
        """
        self._abandoned.set()
        held = [self._group]
        del self._group
        threading.Thread(target=held.clear, daemon=True).start()

    def _packed(
        self, parameters: Sequence[ParameterMeta], stream: Iterator[tuple[str, Tensor]]
    ) -> Tensor:
        """The next bucket; what it lies in is free again `_IN_FLIGHT` buckets later."""
        first = parameters[0]
        if len(parameters) == 1 and first.num_bytes == first.wire_bytes:
            return _next_bytes(first, stream)
        size = sum(p.wire_bytes for p in parameters)
        self._buffers.rotate()
        if self._buffers[0].numel() < size:
            self._buffers[0] = torch.empty(size, dtype=torch.uint8)
        bucket = self._buffers[0][:size]
        pack_bucket(parameters, stream, bucket)
        return bucket


def _device(host: str) -> "ProcessGroupGloo.Device":
    if ipaddress.ip_address(host).is_loopback:
        return ProcessGroupGloo.create_device(hostname=host)
    return ProcessGroupGloo.create_default_device()


def pack_bucket(
    parameters: Sequence[ParameterMeta], stream: Iterator[tuple[str, Tensor]], bucket: Tensor
) -> None:
    """Fill `bucket` (uint8) with the next tensors, each padded to its `wire_bytes`."""
    offset = 0
    for parameter in parameters:
        data = _next_bytes(parameter, stream)
        end = offset + data.numel()
        bucket[offset:end] = data
        offset += parameter.wire_bytes
        bucket[end:offset] = 0


def _next_bytes(parameter: ParameterMeta, stream: Iterator[tuple[str, Tensor]]) -> Tensor:
    """The next tensor, which must be `parameter`, as flat uint8; in place where that can be."""
    name, tensor = next(stream)
    assert name == parameter.name, f"the manifest says {parameter.name}, the model {name}"
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    assert data.numel() == parameter.num_bytes, f"{name} is not what the manifest says"
    return data


class NcclGroup:
    """Rank 0 over NCCL with vLLM's own packed producer; owns the rendezvous store."""

    def __init__(self, body: InitCommunicator) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info = NCCLTrainerInitInfo(
            master_address=body.host,
            master_port=body.port,
            world_size=body.world_size,
            packed_buffer_size_bytes=body.bucket_bytes,
            rank=0,
        )
        self._info = info
        self._group: PyNcclCommunicator = trainer_init(info)

    def send(
        self, parameters: Sequence[ParameterMeta], weights: Iterable[tuple[str, Tensor]]
    ) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        torch.cuda.synchronize()  # the optimizer's kernels run on another stream
        packed_nccl_broadcast_producer(
            iterator=iter(weights),
            group=self._group,
            src=0,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=self._info.packed_buffer_size_bytes,
            num_buffers=self._info.packed_num_buffers,
        )

    def close(self) -> None:
        self._group.destroy()

    def abandon(self) -> None:
        threading.Thread(target=self._group.destroy, daemon=True).start()
