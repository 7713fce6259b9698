"""Pushes into engines on GPUs: over NCCL between GPUs, through CUDA's IPC within one.

Engines hold the toy checkpoints, which are float32, in bfloat16.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from learner.rollout.client import RolloutClient
from learner.rollout.server_process import free_ports
from learner.rollout.sync.push import WeightPusher
from learner.rollout.sync.weights import AdapterWeights, MergedWeights, OneSource, WeightSource
from shared_contracts.weights import SyncReport, Transport
from tests.contract.running_server import (
    RunningServer,
    draw_scene,
    image_request,
    response_ids,
    running_server,
    text_request,
)
from tests.contract.test_adapter import adapted
from tests.contract.test_learner_killed import die_in, wait_until_poisoned
from tests.contract.weight_sender import BUCKET_BYTES
from tests.gpu.servers import LORA, OF_TWO_WORKERS, ON_0, SHARED_0, over

# Two servers one after another, which compile what they run and capture graphs.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

TIMEOUT_S = 60.0


def model_on(gpu: int, checkpoint: Path) -> torch.nn.Module:
    """As a learner has it that trains on this GPU."""
    torch.cuda.set_device(gpu)
    model: torch.nn.Module = Qwen3VLForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32
    )
    return model.to(f"cuda:{gpu}")


def push(server: RunningServer, transport: Transport, *sources: WeightSource) -> list[SyncReport]:
    """Push one after another, each verified in full."""
    (port,) = free_ports(1)
    reports = []
    with RolloutClient(server.process.base_url, TIMEOUT_S) as client:
        for source in sources:
            choice = OneSource(source)
            pusher = WeightPusher(client, port, choice, transport, BUCKET_BYTES, "full")
            reports.append(pusher.push(client.info().weights_version + 1))
            pusher.close()
    return reports


def answers(server: RunningServer) -> list[list[int]]:
    """Greedy, each alone: in bfloat16 a batch of another size may round otherwise."""
    scenes = [str(draw_scene(server.media / f"{i}.png", i)) for i in range(4)]
    requests = [text_request(), *map(image_request, scenes)]
    return [response_ids(server.infer([request], max_tokens=32)[0]) for request in requests]


@pytest.mark.req("SYNC-03", "SYNC-06", "ROLL-03")
@pytest.mark.parametrize(
    ("transport", "devices", "learner_gpu"),
    [
        pytest.param("nccl", ON_0, 1, marks=pytest.mark.gpu(2), id="nccl"),
        pytest.param("ipc", SHARED_0, 0, id="ipc"),
        pytest.param(
            "nccl",
            OF_TWO_WORKERS,
            2,
            marks=pytest.mark.gpu(3),
            id="nccl to an engine of two workers",
        ),
    ],
)
def test_pushed_between_gpus_equals_loaded(
    transport: Transport,
    devices: tuple[str, ...],
    learner_gpu: int,
    tied: Path,
    other_tied: Path,
    tmp_path: Path,
) -> None:
    model = model_on(learner_gpu, other_tied)
    pushed_to = (*devices, *over(transport))
    with running_server(tied, tmp_path / "pushed", device=pushed_to) as server:
        before = answers(server)
        (report,) = push(server, transport, MergedWeights(model))
        pushed = answers(server)
    assert report.verified == len(list(model.named_parameters()))
    with running_server(other_tied, tmp_path / "loaded", device=devices) as server:
        assert pushed == answers(server)
    assert pushed != before


@pytest.mark.gpu(2)
@pytest.mark.req("SYNC-01", "SYNC-03", "SYNC-06")
def test_an_adapter_is_pushed_over_nccl_and_replaced(tied: Path, tmp_path: Path) -> None:
    torch.cuda.set_device(1)
    adapting, idle = (adapted(tied, seed=1).to("cuda:1") for _ in range(2))
    with torch.no_grad():
        for name, parameter in idle.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    with running_server(tied, tmp_path, *LORA, *over("nccl"), device=ON_0) as server:
        before = answers(server)
        push(server, "nccl", AdapterWeights(adapting))
        assert answers(server) != before
        push(server, "nccl", AdapterWeights(idle))
        assert answers(server) == before, "an adapter that adds nothing"


@pytest.mark.gpu(2)
@pytest.mark.req("SYNC-04", "SYNC-05", "SYNC-07")
def test_a_learner_killed_in_a_broadcast_leaves_a_server_for_the_next_one(
    tied: Path, other_tied: Path, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    model = model_on(1, tied)
    command = [sys.executable, "-m", "tests.contract.dying_pusher"]
    with running_server(tied, tmp_path, *over("nccl"), device=ON_0) as server:
        before = answers(server)
        arguments = [server.process.base_url, str(port), str(other_tied), "transfer", "nccl"]
        with subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "1"},
        ) as process:
            die_in(process, "transfer")
        wait_until_poisoned(server, replica_lost=False)
        push(server, "nccl", MergedWeights(model))
        assert answers(server) == before
