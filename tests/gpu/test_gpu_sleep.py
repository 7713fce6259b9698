"""A server that gives the memory of its GPU to a learner, and takes it back."""

from pathlib import Path

import pytest
import torch

from learner.rollout.client import RolloutClient
from tests.contract.running_server import running_server
from tests.contract.test_adapter import adapted, adapter_of
from tests.gpu.servers import FRACTION, LORA, SLEEPS, over
from tests.gpu.test_gpu_transfer import answers, push, weights_on

# Two servers one after another, which compile what they run and capture graphs.
pytestmark = [pytest.mark.gpu]

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
            push(server, "ipc", weights)
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
        push(server, "ipc", adapting)
        before = answers(server)
        client.sleep()
        client.wake_up()
        assert answers(server) == before
        client.sleep()
        push(server, "ipc", adapting)
        assert answers(server) == before
