"""Checkpoints of LoRA and DoRA runs as the model to train, to serve and to export."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from learner.data.checkpoint import Checkpoint
from learner.data.toy import ToyData
from learner.models.load import check_parameters, load_model, read_model
from learner.models.toy import make_model
from learner.operate.export import export, require_exportable
from learner.rollout.sync.weights import MergedWeights
from learner.runs.checkpoint import MANIFEST
from learner.training.input_checks import check_inputs
from learner.training.train import train
from rollout_server.engines.merge import merge, with_merged_model
from rollout_server.settings.options import ServerSettings
from shared_contracts.checkpoints import ADAPTER, checkpoint_chain
from shared_contracts.errors import ContractError, RunError
from tests.unit.small_run import small_config

LORA = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4}
TUNERS = {"lora": {**LORA, "train_coordinate_rows": False}, "dora": {**LORA, "use_dora": True}}


def trained(model: Path, data: ToyData, folder: Path, **sections: Any) -> Path:
    """The checkpoint of a short run."""
    training = {"learning_rate": 0.01, "lr_scheduler_type": "constant", "warmup_ratio": 0.0}
    config = small_config(model, data, folder, training=training, **sections)
    train(config, check_inputs(config), [], Console(file=io.StringIO()))
    return folder / "checkpoint-3"


@pytest.fixture(scope="module", params=TUNERS)
def tuner(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def base(tuner: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied for one of the tuners."""
    path = tmp_path_factory.mktemp("base") / "model"
    make_model(path, seed=3, tie=tuner == "lora")
    return path


@pytest.fixture(scope="module")
def adapter(
    tuner: str, base: Path, toy_data: ToyData, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("run") / tuner
    return trained(base, toy_data, folder, tuner=TUNERS[tuner])


def pushed(adapter: Path, base: Path) -> dict[str, Tensor]:
    """The full weights of the model that was trained, by peft's own reading of both."""
    from peft import PeftModel

    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    return {
        name: weight.clone()
        for name, weight in MergedWeights(PeftModel.from_pretrained(model, str(adapter))).tensors(
            "float32"
        )
    }


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert torch.allclose(found[name], weight, atol=1e-6), name


@pytest.mark.slow
def test_an_adapter_is_a_model_to_train(
    base: Path, adapter: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    Checkpoint(adapter).require_vocabulary()
    wanted = pushed(adapter, base)
    original = load_file(base / "model.safetensors")
    assert any(not torch.equal(weight, original[name]) for name, weight in wanted.items())
    for tuner in ({}, {**LORA, "train_coordinate_rows": False}):
        loaded = load_model(small_config(adapter, toy_data, tmp_path, tuner=tuner))
        assert_same(dict(MergedWeights(loaded.model).tensors("float32")), wanted)
    check_parameters(adapter)


def test_an_adapter_on_an_adapter_names_it(
    base: Path, adapter: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    second = trained(adapter, toy_data, tmp_path / "second", tuner=TUNERS["lora"])
    assert checkpoint_chain(second, "model.model") == [second, adapter, base]
    first = dict(read_model(adapter, torch.float32).named_parameters())
    both = dict(read_model(second, torch.float32).named_parameters())
    assert any(not torch.equal(both[name], first[name]) for name in both)


def test_the_server_merges_an_adapter_alike(base: Path, adapter: Path, tmp_path: Path) -> None:
    merge(adapter, tmp_path / "merged")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert_same(dict(again.named_parameters()), pushed(adapter, base))
    AutoProcessor.from_pretrained(tmp_path / "merged")


@pytest.mark.req("SRV-04")
def test_a_merge_has_the_deadline_of_a_start(adapter: Path) -> None:
    settings = ServerSettings(model=adapter, device="cpu", start_seconds=0.1)
    with pytest.raises(RunError, match=r"not merged within 0.1 s \(--start-seconds\)"):
        with_merged_model(settings)


@pytest.mark.req("RUN-01")
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_an_export_is_a_plain_checkpoint(
    base: Path, adapter: Path, tmp_path: Path, dtype: Any
) -> None:
    out = tmp_path / "exported"
    (proof,) = export(adapter, out, dtype, "transformers")
    assert "transformers" in proof
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not names & {ADAPTER, MANIFEST, "optimizer.pt", "scheduler.pt", "trainer_state.json"}
    assert str(base.parent) not in (out / "config.json").read_text()
    Checkpoint(out).require_vocabulary()
    again = AutoModelForImageTextToText.from_pretrained(out, dtype="auto")
    assert again.dtype == (torch.float32 if dtype == "auto" else torch.bfloat16)
    if dtype == "auto":
        assert_same(dict(again.named_parameters()), pushed(adapter, base))
    with pytest.raises(ContractError, match="not an empty"):
        require_exportable(adapter, out, "transformers")


def test_an_adapter_that_lacks_parameters_is_refused(adapter: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    first, *_, last = sorted(weights)
    save_file({name: weights[name] for name in weights if name not in (first, last)}, file)
    check_parameters(adapter)
    with pytest.raises(ContractError, match=f"lacks 2 parameters, first {first}"):
        check_parameters(folder)


def test_a_folder_without_a_whole_checkpoint_is_not_exported(tmp_path: Path, base: Path) -> None:
    with pytest.raises(ContractError) as caught:
        require_exportable(tmp_path, tmp_path / "out", "transformers")
    assert caught.value.where == "CHECKPOINT"
    torn = shutil.copytree(base, tmp_path / "torn")
    (torn / MANIFEST).write_text("{}")
    with pytest.raises(ContractError, match=f"has no {MANIFEST}"):
        require_exportable(torn, tmp_path / "out", "transformers")


@pytest.mark.parametrize("content", ["", "{}", '{"base_model_name_or_path": "/nowhere"}', None])
def test_an_adapter_without_a_base_is_refused(tmp_path: Path, content: str | None) -> None:
    """None: an adapter whose base is itself."""
    own = json.dumps({"base_model_name_or_path": str(tmp_path)})
    (tmp_path / ADAPTER).write_text(own if content is None else content)
    with pytest.raises(ContractError) as caught:
        Checkpoint(tmp_path).require_vocabulary()
    assert caught.value.where == "model.model"
    assert str(tmp_path) in caught.value.found
