"""The learner's end of an NCCL group, with what it needs of vLLM.

Importing vLLM takes seconds: whoever asks a server for such a group imports this module first.
"""

import base64
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from operator import methodcaller

import torch
from torch import Tensor
from torch.distributed import TCPStore
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group
from vllm.distributed.weight_transfer.packed_tensor import (
    DEFAULT_PACKED_NUM_BUFFERS,
    packed_nccl_broadcast_producer,
)

from shared_contracts.rendezvous import Rendezvous
from shared_contracts.weights import InitCommunicator, ParameterMeta


def new_nccl_id() -> str:
    """What the ranks of one NCCL group meet by, as base64."""
    return base64.b64encode(bytes(NCCLLibrary().ncclGetUniqueId().internal)).decode()


class NcclGroup:
    """Rank 0 over NCCL with vLLM's own packed producer, on the current GPU.

    Weights may be on the CPU, where those of a sharded model are gathered.

    given_up: set when nobody waits for the group any more.
    """

    def __init__(self, body: InitCommunicator, given_up: threading.Event) -> None:
        assert body.nccl_unique_id is not None
        unique_id = base64.b64decode(body.nccl_unique_id)
        self._device = torch.accelerator.current_device_index()
        self._bucket_bytes = body.bucket_bytes

        def enter() -> PyNcclCommunicator:
            torch.accelerator.set_device_index(self._device)
            return uid_init_process_group(unique_id, 0, body.world_size, self._device)

        self._group: PyNcclCommunicator = Rendezvous(
            TCPStore(
                body.host,
                body.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=body.timeout_s),
            ),
            0,
            body.world_size,
            body.timeout_s,
            enter,
            methodcaller("destroy"),
            given_up.is_set,
        ).meet()

    def send(
        self, parameters: Sequence[ParameterMeta], weights: Iterable[tuple[str, Tensor]]
    ) -> None:
        torch.accelerator.set_device_index(self._device)
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
