"""The checkpoint of a LoRA run in vLLM: exported. test_openai.py serves one as it is."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from learner.data.toy import ToyData
from learner.operate.export import export
from learner.training.input_checks import check_inputs
from learner.training.train import train
from tests.unit.small_run import small_config

pytestmark = pytest.mark.slow


@pytest.mark.req("RUN-01")
def test_an_exported_adapter_is_served_by_vllm(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    tuner = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4, "use_dora": True}
    training = {"max_steps": 1, "save_steps": 1, "warmup_ratio": 0.0}
    config = small_config(
        toy_checkpoint, toy_data, tmp_path / "run", tuner=tuner, training=training
    )
    train(config, check_inputs(config), [], Console(file=io.StringIO()))
    adapter, out = tmp_path / "run" / "checkpoint-1", tmp_path / "exported"
    proofs = export(adapter, out, "auto", "all")
    assert [proof.split()[0] for proof in proofs] == ["transformers", "vLLM"]
