"""A worker's member of an NCCL group: vLLM's own engine, which meets the others first (FULL-07).

What is imported here is imported before the engine of the server serves, and so before any rank
says that it is ready.
"""

from dataclasses import dataclass
from datetime import timedelta
from operator import methodcaller

import torch
from torch.distributed import TCPStore
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.weight_transfer.nccl_common import worker_init_process_group
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
)

from shared_contracts.rendezvous import Rendezvous


@dataclass(kw_only=True)
class NcclInitInfo(NCCLWeightTransferInitInfo):
    """host, port: of the store. timeout_s: for the rendezvous."""

    host: str
    port: int
    timeout_s: float


class NcclEngine(NCCLWeightTransferEngine):
    """vLLM's own, of whose group no rank is formed alone."""

    init_info_cls: type[NCCLWeightTransferInitInfo] = NcclInitInfo

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the group; returns once every rank has joined.

        Raises RendezvousGivenUp. A call of NCCL that does not come to an end is left behind in
        its thread then: the worker serves on.
        """
        assert isinstance(init_info, NcclInitInfo)
        self.shutdown()
        self.packed = init_info.packed
        self.packed_buffer_size_bytes = init_info.packed_buffer_size_bytes
        self.packed_num_buffers = init_info.packed_num_buffers
        NCCLLibrary()  # loads NCCL, or says why it cannot
        timeout = timedelta(seconds=init_info.timeout_s)

        def enter() -> PyNcclCommunicator:
            torch.accelerator.set_device_index(self.device)  # CUDA's is the thread's, at first 0
            return worker_init_process_group(init_info, self.parallel_config)

        self.model_update_group = Rendezvous(
            TCPStore(
                init_info.host,
                init_info.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timeout,
            ),
            init_info.rank_offset + self.parallel_config.rank,
            init_info.world_size,
            init_info.timeout_s,
            enter,
            methodcaller("destroy"),
        ).meet()
