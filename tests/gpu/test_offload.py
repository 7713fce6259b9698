"""Offloading between a GPU and the host."""

import pytest
import torch
from torch import nn

from learner.models.load import Offload


@pytest.mark.gpu
@pytest.mark.req("ROLL-03")
def test_offloading_frees_the_memory_of_the_gpu() -> None:
    model = nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    weights = [weight.clone() for weight in model.parameters()]
    before_bytes = torch.cuda.memory_allocated()
    offload, buffers = Offload(model, optimizer), []
    for _ in range(2):
        with offload.room():
            assert torch.cuda.memory_allocated() < before_bytes - 3 * 4096 * 4096 * 4 + 2**20
            assert all(weight.is_pinned() for weight in model.parameters())
            buffers.append([weight.data_ptr() for weight in model.parameters()])
        assert {weight.device.type for weight in model.parameters()} == {"cuda"}
        assert all(map(torch.equal, model.parameters(), weights))
    assert buffers[0] == buffers[1]
    optimizer.step()
