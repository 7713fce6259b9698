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
from learner.rollout.sync.weights import SyncMode
from shared_contracts.weights import Transport
from tests.contract.running_server import (
    START_TIMEOUT_S,
    RunningServer,
    draw_scene,
    image_request,
    response_ids,
    running_server,
    text_request,
)
from tests.contract.test_adapter import adapted, adapter_of
from tests.contract.weight_sender import BUCKET_BYTES
from tests.gpu.servers import LORA, OF_TWO_WORKERS, ON_0, SHARED_0, over
from tests.unit.fleets import wait_until

# Two servers one after another, which compile what they run and capture graphs.
pytestmark = [pytest.mark.gpu]

# Of a learner that is killed: its end is noticed before.
LONG_S = 600.0


def weights_on(gpu: int, checkpoint: Path) -> SyncMode:
    """Return full weights of a learner that trains on this GPU."""
    torch.cuda.set_device(gpu)
    model: torch.nn.Module = Qwen3VLForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32
    )
    return SyncMode.of(model.to(f"cuda:{gpu}"), "full", fallback_to_full=False)


def push(server: RunningServer, transport: Transport, mode: SyncMode) -> None:
    client = RolloutClient(server.process.base_url, START_TIMEOUT_S)
    pusher = WeightPusher(client, free_ports(1)[0], mode, transport, BUCKET_BYTES)
    pusher.push(client.info().weights_version + 1)
    pusher.close()


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
    weights = weights_on(learner_gpu, other_tied)
    pushed_to = (*devices, *over(transport))
    with running_server(tied, tmp_path / "pushed", device=pushed_to) as server:
        before = answers(server)
        push(server, transport, weights)
        pushed = answers(server)
    with running_server(other_tied, tmp_path / "loaded", device=devices) as server:
        assert pushed == answers(server)
    assert pushed != before


@pytest.mark.req("SYNC-01", "SYNC-06")
def test_an_adapter_is_pushed_and_replaced(tied: Path, tmp_path: Path) -> None:
    """The learner trains on the GPU of the engine."""
    adapting, idle = (adapted(tied, seed=1).to("cuda:0") for _ in range(2))
    with torch.no_grad():
        for name, parameter in idle.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    options = (*LORA, *over("ipc"))
    with running_server(tied, tmp_path, *options, device=SHARED_0) as server:
        before = answers(server)
        push(server, "ipc", adapter_of(adapting))
        assert answers(server) != before
        push(server, "ipc", adapter_of(idle))
        assert answers(server) == before, "an adapter that adds nothing"


@pytest.mark.gpu(2)
@pytest.mark.req("SYNC-04", "SYNC-05", "SYNC-07")
def test_a_learner_killed_in_a_broadcast_leaves_a_server_for_the_next_one(
    tied: Path, other_tied: Path, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    weights = weights_on(1, tied)
    command = [sys.executable, "-m", "tests.contract.dying_pusher"]
    with running_server(tied, tmp_path, *over("nccl"), device=ON_0) as server:
        before = answers(server)
        url, phase = server.process.base_url, "transfer"
        with subprocess.Popen(
            [*command, url, str(port), str(other_tied), phase, str(LONG_S), "nccl"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "1"},
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == phase, "its error is above"
            process.kill()
        wait_until(lambda: server.http.get("/info/").json()["weights_state"] == "PUSH_NEEDED")
        push(server, "nccl", weights)
        assert answers(server) == before
