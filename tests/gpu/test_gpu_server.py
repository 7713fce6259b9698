"""Servers on GPUs: pushes over NCCL and through CUDA's IPC, sleep, log-probabilities, refusals.

Engines hold the toy checkpoints, which are float32, in bfloat16.
"""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from learner.data.toy import ToyData
from learner.rollout.client import RolloutClient
from learner.rollout.server_process import free_ports
from learner.rollout.sync.probe import ProofOfEffect, probe_call
from learner.rollout.sync.weights import SyncMode
from rollout_server.settings.preflight import check_unused
from shared_contracts.errors import ContractError
from shared_contracts.machine import IDLE_MIB, query_gpu_use
from shared_contracts.weights import Transport
from tests.contract.running_server import (
    RunningServer,
    draw_scene,
    image_request,
    response_ids,
    running_server,
    text_request,
)
from tests.contract.test_adapter import adapted, adapter_of
from tests.contract.test_learner_killed import learner
from tests.gpu.servers import FRACTION, LORA, OF_TWO_WORKERS, ON_0, SHARED_0, SLEEPS, over
from tests.unit.fleets import wait_until
from tests.unit.loaded_models import load_small

pytestmark = pytest.mark.gpu


def weights_on(gpu: int, checkpoint: Path) -> SyncMode:
    """Return full weights of a learner that trains on this GPU."""
    torch.cuda.set_device(gpu)
    model: torch.nn.Module = Qwen3VLForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32
    )
    return SyncMode.of(model.to(f"cuda:{gpu}"), "full", fallback_to_full=False)


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
        server.push_by_learner(weights, transport)
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
        server.push_by_learner(adapter_of(adapting), "ipc")
        assert answers(server) != before
        server.push_by_learner(adapter_of(idle), "ipc")
        assert answers(server) == before, "an adapter that adds nothing"


@pytest.mark.gpu(2)
@pytest.mark.req("SYNC-04", "SYNC-05", "SYNC-07")
def test_a_learner_killed_in_a_broadcast_leaves_a_server_for_the_next_one(
    tied: Path, other_tied: Path, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    weights, visible = weights_on(1, tied), {"CUDA_VISIBLE_DEVICES": "1"}
    with running_server(tied, tmp_path, *over("nccl"), device=ON_0) as server:
        before = answers(server)
        with learner(server, port, other_tied, "transfer", "nccl", **visible) as process:
            process.kill()
        wait_until(lambda: server.info()["weights_state"] == "PUSH_NEEDED")
        server.push_by_learner(weights, "nccl")
        assert answers(server) == before


# --- sleep

# Of the fraction, what an engine gives up at least: all but what it needs for a forward.
GIVEN_UP = 0.5


def free_bytes() -> int:
    return torch.cuda.mem_get_info(0)[0]


@pytest.mark.req("ROLL-03", "SYNC-03", "FULL-06")
def test_a_sleeping_server_frees_the_gpu_and_answers_afterwards(
    tied: Path, other_tied: Path, tmp_path: Path
) -> None:
    weights = weights_on(0, other_tied)
    total = torch.cuda.mem_get_info(0)[1]
    options = (*SLEEPS, *over("ipc"))
    with running_server(tied, tmp_path / "slept", device=options) as server:
        client = RolloutClient(server.process.base_url)
        before, awake = answers(server), free_bytes()
        client.sleep()
        asleep = free_bytes()
        assert asleep - awake > GIVEN_UP * FRACTION * total
        torch.empty(int(0.9 * asleep), dtype=torch.uint8, device="cuda:0")  # a step's memory
        torch.cuda.empty_cache()
        client.wake_up()
        assert answers(server) == before
        assert free_bytes() < asleep - GIVEN_UP * FRACTION * total
        for _ in range(2):
            client.sleep()
            server.push_by_learner(weights, "ipc")
            pushed = answers(server)
        client.sleep()
        assert free_bytes() > asleep - 2**30, "a push leaves no memory behind"
    with running_server(other_tied, tmp_path / "loaded", device=options) as server:
        assert pushed == answers(server)
    assert pushed != before


@pytest.mark.req("ROLL-03", "SYNC-01")
def test_a_base_and_its_adapter_are_there_after_a_sleep(tied: Path, tmp_path: Path) -> None:
    adapting = adapter_of(adapted(tied, seed=1).to("cuda:0"))
    with running_server(tied, tmp_path, *LORA, device=(*SLEEPS, *over("ipc"))) as server:
        client = RolloutClient(server.process.base_url)
        server.push_by_learner(adapting, "ipc")
        before = answers(server)
        client.sleep()
        client.wake_up()
        assert answers(server) == before
        client.sleep()
        server.push_by_learner(adapting, "ipc")
        assert answers(server) == before


# --- the learner's weights and the machine's nvidia-smi


@pytest.mark.req("ROLL-01")
def test_learner_and_engine_give_answers_the_same_log_probabilities(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    in_16_bits = {"torch_dtype": "bfloat16"}
    loaded = load_small(toy_checkpoint, toy_data, tmp_path / "run", model=in_16_bits)
    loaded.model.to("cuda:0")
    options = ("--dtype", "bfloat16")
    with running_server(toy_checkpoint, tmp_path / "server", *options, device=SHARED_0) as server:
        client = RolloutClient(server.process.base_url)
        answers = client.infer(probe_call(0))
        ProofOfEffect(loaded, "full").check(server.process.base_url, answers, "bfloat16")


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
