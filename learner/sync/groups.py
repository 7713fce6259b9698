"""The learner's end of a weight group: rank 0, which sends (SYNC-03).

gloo   over sockets, no GPU needed (`gloo.py`)
ipc    in memory that both sides map, on one machine (`ipc.py`)
nccl   vLLM's stock packed broadcast; the server's workers run its stock engine
"""

import base64
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.distributed import DistError, TCPStore

from learner.sync.gloo import GlooGroup
from learner.sync.ipc import IpcGroup
from shared_contracts.weights import InitCommunicator, ParameterMeta, attempt_key

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

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
            _wait_for_store(body, given_up)
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
    return None if opened else "the server still has that of an earlier call there"


def new_nccl_id() -> str:
    """What the ranks of one NCCL group meet by, as base64."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return base64.b64encode(bytes(NCCLLibrary().ncclGetUniqueId().internal)).decode()


class NcclGroup:
    """Rank 0 over NCCL with vLLM's own packed producer, on the current GPU.

    Weights may be on the CPU, where those of a sharded model are gathered.

    All ranks meet by the unique id of `body`: nothing listens on a port that an attempt which
    hangs would keep.
    """

    def __init__(self, body: InitCommunicator) -> None:
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        assert body.nccl_unique_id is not None
        self._device = torch.accelerator.current_device_index()
        self._bucket_bytes = body.bucket_bytes
        self._group: PyNcclCommunicator = uid_init_process_group(
            base64.b64decode(body.nccl_unique_id),
            rank=0,
            world_size=body.world_size,
            device=self._device,
        )

    def send(
        self, parameters: Sequence[ParameterMeta], weights: Iterable[tuple[str, Tensor]]
    ) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import (
            DEFAULT_PACKED_NUM_BUFFERS,
            packed_nccl_broadcast_producer,
        )

        torch.cuda.synchronize()  # the optimizer's kernels run on another stream
        packed_nccl_broadcast_producer(
            iterator=iter(weights),
            group=self._group,
            src=0,
            post_iter_func=lambda item: item[1].to(self._device, non_blocking=True),
            buffer_size_bytes=self._bucket_bytes,
            num_buffers=DEFAULT_PACKED_NUM_BUFFERS,
        )

    def close(self) -> None:
        self._group.destroy()

    def abandon(self) -> None:
        threading.Thread(target=self._group.destroy, daemon=True).start()
