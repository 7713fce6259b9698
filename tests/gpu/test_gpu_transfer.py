"""A push between GPUs: over NCCL from one GPU to another, and within one through CUDA's IPC."""

import threading
from pathlib import Path

import pytest
import torch

from learner.operate.server_process import free_ports
from learner.sync.groups import join_group, new_nccl_id
from shared_contracts.weights import InitCommunicator, Transport
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
LEARNER_GPUS: dict[Transport, int] = {"nccl": 1, "ipc": 0}


@pytest.mark.gpu
@pytest.mark.req("SYNC-03", "SYNC-06", "ROLL-03")
@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_pushed_between_gpus_equals_loaded(
    transport: Transport, tied: Path, other_tied: Path, tmp_path: Path
) -> None:
    learner_gpu = LEARNER_GPUS[transport]
    if torch.cuda.device_count() <= learner_gpu:
        pytest.skip(f"{transport} needs {learner_gpu + 1} GPU(s)")
    torch.cuda.set_device(learner_gpu)
    weights = read_weights(other_tied)
    (port,) = free_ports(1)
    body = InitCommunicator(
        host="127.0.0.1",
        port=port,
        world_size=2,
        transport=transport,
        nccl_unique_id=new_nccl_id() if transport == "nccl" else None,
    )
    pushed_to = (*SERVER_GPU, "--weight-transport", transport)
    with running_server(tied, tmp_path / "pushed", device=pushed_to) as server:
        before = answers(server)
        forming = Posting(server.http, "/init_communicator/", body.model_dump())
        group = join_group(body, threading.Event())
        assert forming.answer().status_code == 200, forming.answer().text
        assert start(server.http, 1, weights).status_code == 200
        transfer = begin_transfer(server.http, 1)
        on_gpu = ((name, weight.to(f"cuda:{learner_gpu}")) for name, weight in weights.items())
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
