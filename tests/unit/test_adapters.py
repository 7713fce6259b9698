"""Checkpoints of LoRA and DoRA runs: trained on, served and exported, and their coordinate rows."""

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
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen3VLForConditionalGeneration

from learner.config import parse_config
from learner.data.checkpoint import Checkpoint
from learner.data.toy import ToyData
from learner.models.coord_tokens import smooth_rows, untrained
from learner.models.load import LoadedModel, check_parameters, load_model, read_model
from learner.models.toy import make_model
from learner.operate.export import export, require_exportable
from learner.rollout.sync.weights import MergedWeights, SyncMode
from learner.runs.checkpoint import MANIFEST
from learner.training.input_checks import check_inputs
from learner.training.train import train
from rollout_server.engines.merge import merge, with_merged_model
from rollout_server.settings.options import ServerSettings
from shared_contracts.checkpoints import ADAPTER, checkpoint_chain
from shared_contracts.errors import ContractError, RunError
from tests.unit.refusals import refused
from tests.unit.small_run import ConfigOf, run_quietly, small_config, small_mapping

LORA = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4}
DORA = {**LORA, "use_dora": True}
TUNERS = {"lora": {**LORA, "train_coordinate_rows": False}, "dora": DORA}


def trained(model: Path, data: ToyData, out: Path, *, rate: float = 0.01, **sections: Any) -> Path:
    training = {"learning_rate": rate, "lr_scheduler_type": "constant", "warmup_ratio": 0.0}
    run_quietly(small_config(model, data, out, training=training, **sections))
    return out / "checkpoint-3"


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
def test_exports_are_plain_checkpoints(
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
    with refused("CHECKPOINT"):
        require_exportable(tmp_path, tmp_path / "out", "transformers")
    torn = shutil.copytree(base, tmp_path / "torn")
    (torn / MANIFEST).write_text("{}")
    with pytest.raises(ContractError, match=f"has no {MANIFEST}"):
        require_exportable(torn, tmp_path / "out", "transformers")


@pytest.mark.parametrize("content", ["", "{}", '{"base_model_name_or_path": "/nowhere"}', None])
def test_an_adapter_without_a_base_is_refused(tmp_path: Path, content: str | None) -> None:
    """content: None names the adapter itself as its base."""
    own = json.dumps({"base_model_name_or_path": str(tmp_path)})
    (tmp_path / ADAPTER).write_text(own if content is None else content)
    with refused("model.model", str(tmp_path)):
        Checkpoint(tmp_path).require_vocabulary()


EMBEDDING = "model.language_model.embed_tokens.weight"
HEAD = "lm_head.weight"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "model"
    make_model(path, seed=3, tie=request.param)
    return path


def noise(seed: int = 0, width: int = 64) -> Tensor:
    return torch.randn(1000, width, generator=torch.Generator().manual_seed(seed))


def smooth(seed: int = 0) -> Tensor:
    return smooth_rows(64, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(1000, 64),
        noise()[:1].expand(1000, -1),
        0.02 * noise(),
        noise()[:1] + 1e-5 * noise(1),
        smooth(),
        0.02 * noise()[:1] + 0.002 * smooth(),
    ],
    ids=["zeros", "one row", "random", "mean of the others", "toy model", "expanded"],
)
def test_rows_that_nothing_has_trained_look_so(rows: Tensor, dtype: torch.dtype) -> None:
    assert untrained(rows.to(dtype)) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_were_trained_do_not(dtype: torch.dtype) -> None:
    assert untrained((smooth() + 0.1 * noise()).to(dtype)) is None
    assert untrained((0.02 * noise() + 0.01 * smooth()).to(dtype)) is None


def merged(loaded: LoadedModel) -> dict[str, Tensor]:
    return dict(MergedWeights(loaded.model).tensors("float32"))


def rows_of(loaded: LoadedModel) -> list[Tensor]:
    """Trained rows, of the embedding and of an untied head."""
    named = loaded.model.named_parameters()
    return [p for name, p in named if ".trainable_tokens_delta" in name and p.requires_grad]


@pytest.mark.slow
def test_untrained_rows_are_trained_told_saved_and_resumed(
    checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    before = load_file(checkpoint / "model.safetensors")
    tuner = DORA if HEAD in before else LORA
    steady = {"lr_scheduler_type": "constant", "warmup_ratio": 0.0}
    whole = small_config(checkpoint, toy_data, tmp_path / "whole", tuner=tuner, training=steady)
    said = io.StringIO()
    train(whole, check_inputs(whole), [], Console(file=said, width=400))
    assert "look untrained" in said.getvalue()
    halves = {"tuner": tuner, "training": {**steady, "save_steps": 2, "max_steps": 2}}
    run_quietly(small_config(checkpoint, toy_data, tmp_path / "halves", **halves))
    more = {"tuner": tuner, "training": {**steady, "resume": "auto"}}
    run_quietly(small_config(checkpoint, toy_data, tmp_path / "halves", **more))
    saved, resumed = (
        load_file(tmp_path / name / "checkpoint-3" / "adapter_model.safetensors")
        for name in ("whole", "halves")
    )
    kept = {name: rows for name, rows in saved.items() if "trainable_tokens_delta" in name}
    assert len(kept) == 1 + (HEAD in before)
    for name, rows in kept.items():
        source = before[HEAD if "lm_head" in name else EMBEDDING][-1000:]
        assert (rows - source).abs().max() > 1e-4
    assert saved.keys() == resumed.keys()
    assert all(torch.equal(saved[name], resumed[name]) for name in saved)


@pytest.mark.req("SYNC-02")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_push_of_full_weights_carries_trained_rows(
    checkpoint: Path, toy_data: ToyData, tmp_path: Path, dtype: str
) -> None:
    mapping = small_mapping(checkpoint, toy_data, tmp_path, tuner=DORA)
    mapping["model"]["torch_dtype"] = dtype
    loaded = load_model(parse_config(mapping))
    plain = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    rows = rows_of(loaded)
    assert {row.dtype for row in rows} == {torch.float32}
    with torch.no_grad():
        for row in rows:
            row.add_(1.0)
    sent = merged(loaded)
    assert sent.keys() == dict(plain.named_parameters()).keys()
    names = [EMBEDDING, HEAD] if HEAD in sent else [EMBEDDING]
    assert len(rows) == len(names)
    for name, row in zip(names, rows, strict=True):
        expected = plain.state_dict()[name].clone()
        expected[loaded.vocab.ids] = row
        assert torch.allclose(sent[name], expected, atol=0.02 if dtype == "bfloat16" else 0)
    plain.load_state_dict(sent, strict=HEAD in sent)
    plain.eval()
    loaded.model.eval()
    ids = torch.tensor([[*loaded.vocab.ids[:5], 1, 2, 3]])
    with torch.no_grad():
        ours, theirs = (model(input_ids=ids).logits.float() for model in (loaded.model, plain))
    assert torch.allclose(ours, theirs, atol=1e-4 if dtype == "float32" else 0.5)


@pytest.mark.req("SYNC-01")
def test_trained_rows_are_pushed_in_full_weights(config_of: ConfigOf) -> None:
    loaded = load_model(config_of(tuner=LORA))
    mode = SyncMode.of(loaded.model, "adapter", fallback_to_full=True)
    assert mode.adapter is None
    assert "tuner.train_coordinate_rows" in str(mode.fallback)
    with pytest.raises(ContractError, match="train_coordinate_rows"):
        SyncMode.of(loaded.model, "adapter", fallback_to_full=False)


@pytest.mark.parametrize(
    ("tuner", "warned"),
    [
        ({**LORA, "train_coordinate_rows": False}, True),
        ({**LORA, "target_modules": ["embed_tokens", "v_proj"]}, True),
        ({"train_type": "full"}, False),
    ],
    ids=["not wanted", "lora of embeddings", "full"],
)
def test_rows_are_left_alone_where_that_is_wanted_and_said(
    config_of: ConfigOf, tuner: dict[str, Any], warned: bool
) -> None:
    loaded = load_model(config_of(tuner=tuner))
    assert not rows_of(loaded)
    assert any("look untrained" in note for note in loaded.notes) == warned


def test_trained_rows_are_trained_on_only_where_that_is_wanted(
    checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    source = trained(checkpoint, toy_data, tmp_path / "first", rate=0.05)
    for wanted, found in (("auto", False), (True, True)):
        tuner = {**LORA, "train_coordinate_rows": wanted}
        loaded = load_model(small_config(source, toy_data, tmp_path / "second", tuner=tuner))
        assert bool(rows_of(loaded)) == found
        assert not loaded.notes
