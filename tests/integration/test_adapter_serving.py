"""The checkpoint of a LoRA run in vLLM: exported, and served as it is."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from learner.data.toy import make_data
from learner.models.toy import make_model
from learner.operate.export import export
from learner.rollout.client import RolloutClient
from learner.rollout.server_process import ServerProcess
from learner.rollout.sync.probe import probe_call
from learner.training.start_checks import check_inputs
from learner.training.train import train
from tests.unit.small_run import small_config

pytestmark = pytest.mark.slow


@pytest.mark.req("RUN-01")
def test_an_adapter_is_exported_and_served_by_vllm(tmp_path: Path) -> None:
    toy_checkpoint = tmp_path / "model"
    make_model(toy_checkpoint, seed=0)
    toy_data = make_data(tmp_path / "data", 16, 4, 0, polygons=False)
    tuner = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4, "use_dora": True}
    config = small_config(toy_checkpoint, toy_data, tmp_path / "run", tuner=tuner)
    train(config, check_inputs(config), [], Console(file=io.StringIO()))
    adapter, out = tmp_path / "run" / "checkpoint-3", tmp_path / "exported"
    proofs = export(adapter, out, "auto", "all")
    assert [proof.split()[0] for proof in proofs] == ["transformers", "vLLM"]

    answers = []
    for model in (out, adapter):
        options = ["--model", str(model), "--device", "cpu"]
        with ServerProcess(options, tmp_path / "server.log") as server:
            server.wait_until_healthy(240)
            with RolloutClient(server.base_url) as client:
                replies = client.infer(probe_call())
                assert client.info().model == str(model)
        answers.append([reply.response.choices[0].token_ids for reply in replies])
    assert answers[0] == answers[1]
