"""A push over NCCL: the learner on one GPU, the server on another."""

import threading
from pathlib import Path

import pytest
import torch

from learner.operate.server_process import free_ports
from learner.sync.groups import join_group, new_nccl_id
from shared_contracts.weights import InitCommunicator
from tests.contract.running_server import running_server
from tests.contract.test_fresh_engine import answers
from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import (
    Posting,
    begin_transfer,
    digests,
    finish,
    manifest,
    start,
)

SERVER_GPU = ("--gpus", "0", "--gpu-memory-utilization", "0.2")
LEARNER_GPU = 1


@pytest.mark.gpu
@pytest.mark.req("SYNC-03", "SYNC-06")
def test_pushed_over_nccl_equals_loaded(tied: Path, other_tied: Path, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU of its own for each rank")
    torch.cuda.set_device(LEARNER_GPU)
    weights = read_weights(other_tied)
    (port,) = free_ports(1)
    body = InitCommunicator(
        host="127.0.0.1",
        port=port,
        world_size=2,
        transport="nccl",
        nccl_unique_id=new_nccl_id(),
    )
    with running_server(tied, tmp_path / "pushed", device=SERVER_GPU) as server:
        before = answers(server)
        forming = Posting(server.http, "/init_communicator/", body.model_dump())
        group = join_group(body, threading.Event())
        assert forming.answer().status_code == 200, forming.answer().text
        assert start(server.http, 1, weights).status_code == 200
        transfer = begin_transfer(server.http, 1)
        on_gpu = ((name, weight.to(f"cuda:{LEARNER_GPU}")) for name, weight in weights.items())
        group.send(manifest(weights), on_gpu)
        assert transfer.answer().status_code == 200, transfer.answer().text
        finished = finish(server.http, 1, digests(weights))
        assert finished.status_code == 200, finished.text
        assert finished.json()["verified"] == len(weights)
        pushed = answers(server)
        group.close()
    with running_server(other_tied, tmp_path / "loaded", device=SERVER_GPU) as server:
        assert pushed == answers(server)
    assert pushed != before
