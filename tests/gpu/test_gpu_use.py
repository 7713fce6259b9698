"""What the machine's own nvidia-smi tells of a GPU in use."""

import pytest
import torch

from rollout_server.settings.preflight import check_unused
from shared_contracts.errors import ContractError
from shared_contracts.machine import IDLE_MIB, query_gpu_use


@pytest.mark.gpu
@pytest.mark.req("SRV-04")
def test_a_gpu_this_process_fills_is_refused() -> None:
    held = torch.zeros((IDLE_MIB + 1024) * 2**20, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    use = query_gpu_use()
    assert use is not None
    assert [gpu.index for gpu in use.gpus] == list(range(len(use.gpus)))
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    (filled,) = (gpu for gpu in use.gpus if gpu.uuid.removeprefix("GPU-") == uuid)
    with pytest.raises(ContractError, match=f"GPU {filled.index}"):
        check_unused([filled.index], use)
    del held
