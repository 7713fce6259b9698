"""Training and serving on a GPU compute the same, up to what bfloat16 rounds."""

from pathlib import Path

import pytest

from learner.data.toy import ToyData
from learner.rollout.client import RolloutClient
from learner.rollout.sync.probe import ProofOfEffect, probe_call
from tests.contract.running_server import running_server
from tests.gpu.servers import SHARED_0
from tests.unit.loaded_models import load_small


@pytest.mark.gpu
@pytest.mark.req("ROLL-01")
def test_learner_and_engine_give_answers_the_same_log_probabilities(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    in_16_bits = {"torch_dtype": "bfloat16"}
    learner = load_small(toy_checkpoint, toy_data, tmp_path / "run", model=in_16_bits)
    learner.model.to("cuda:0")
    options = ("--dtype", "bfloat16")
    with running_server(toy_checkpoint, tmp_path / "server", *options, device=SHARED_0) as server:
        client = RolloutClient(server.process.base_url)
        answers = client.infer(probe_call(0))
        ProofOfEffect(learner, "full").check(server.process.base_url, answers, "bfloat16")
