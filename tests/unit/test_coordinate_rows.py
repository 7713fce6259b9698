"""Rows of coordinate tokens beside adapters: seen as untrained, trained, pushed, saved, resumed."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration

from learner.config import parse_config
from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.models.coord_tokens import smooth_rows, untrained
from learner.models.load import LoadedModel, load_model
from learner.models.toy import make_model
from learner.rollout.sync.weights import MergedWeights, SyncMode
from learner.training.input_checks import check_inputs
from learner.training.train import train
from shared_contracts.errors import ContractError
from tests.unit.small_run import small_config, small_mapping

EMBEDDING = "model.language_model.embed_tokens.weight"
HEAD = "lm_head.weight"
LORA = {"train_type": "lora", "lora_rank": 2, "lora_alpha": 4}
DORA = {**LORA, "use_dora": True}


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


def run(config: Config) -> str:
    """What the terminal says."""
    said = io.StringIO()
    train(config, check_inputs(config), [], Console(file=said, width=400))
    return said.getvalue()


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
    assert "look untrained" in run(whole)
    halves = {"tuner": tuner, "training": {**steady, "save_steps": 2, "max_steps": 2}}
    run(small_config(checkpoint, toy_data, tmp_path / "halves", **halves))
    more = {"tuner": tuner, "training": {**steady, "resume": "auto"}}
    run(small_config(checkpoint, toy_data, tmp_path / "halves", **more))
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
def test_trained_rows_are_pushed_in_full_weights(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    loaded = load_model(small_config(toy_checkpoint, toy_data, tmp_path, tuner=LORA))
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
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path, tuner: dict[str, Any], warned: bool
) -> None:
    loaded = load_model(small_config(toy_checkpoint, toy_data, tmp_path, tuner=tuner))
    assert not rows_of(loaded)
    assert any("look untrained" in note for note in loaded.notes) == warned


def test_trained_rows_are_trained_on_only_where_that_is_wanted(
    checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    training = {"learning_rate": 0.05, "lr_scheduler_type": "constant", "warmup_ratio": 0.0}
    run(small_config(checkpoint, toy_data, first, training=training))
    source = first / "checkpoint-3"
    for wanted, trained in (("auto", False), (True, True)):
        tuner = {**LORA, "train_coordinate_rows": wanted}
        loaded = load_model(small_config(source, toy_data, tmp_path / "second", tuner=tuner))
        assert bool(rows_of(loaded)) == trained
        assert not loaded.notes
