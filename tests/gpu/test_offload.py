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
    with Offload(model, optimizer).room():
        assert torch.cuda.memory_allocated() < before_bytes - 3 * 4096 * 4096 * 4 + 2**20
        assert {weight.device.type for weight in model.parameters()} == {"cpu"}
    assert {weight.device.type for weight in model.parameters()} == {"cuda"}
    assert all(map(torch.equal, model.parameters(), weights))
    optimizer.step()
