"""Pretraining of a toy vision tower: it learns where objects are, and nothing else changes."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from learner.cli import app
from learner.data.jsonl import read_samples
from learner.data.toy import make_data
from learner.models import toy_vision
from learner.models.toy import make_model
from learner.models.toy_vision import Losses, pretrain_vision
from learner.types import Sample
from shared_contracts.errors import ContractError

pytestmark = pytest.mark.req("WORLD-01")


def silent(step: int, losses: Losses) -> None:
    """Show nothing."""


def scenes(folder: Path, world: str = "plain") -> list[Sample]:
    data = make_data(folder, 16, 1, seed=0, world=world)  # type: ignore[arg-type]
    return read_samples(data.train_jsonl, allow_poly=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    make_model(folder, seed=0)
    return folder


@pytest.mark.slow
def test_the_losses_fall_and_the_tower_alone_changes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy_vision, "REPORT_EVERY", 20)
    told: list[tuple[int, Losses]] = []
    out = tmp_path / "out"
    samples = scenes(tmp_path / "data")
    pretrain_vision(model, samples, out, 70, 0, lambda *both: told.append(both))
    assert [step for step, _ in told] == [20, 40, 60, 70]
    (_, early), *_, (_, late) = told
    assert late.kind < 0.7 * early.kind
    assert late.box < early.box - 0.5
    before = load_file(model / "model.safetensors")
    after = load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(".visual." in name for name in changed)
    files = {path.name for path in model.iterdir()}
    assert {path.name for path in out.iterdir()} == files


def test_the_command(model: Path, tmp_path: Path) -> None:
    data = make_data(tmp_path / "data", 4, 1, seed=0)
    command = ["toy", "pretrain-vision", "--model", str(model), "--data", str(data.train_jsonl)]
    out = tmp_path / "out"
    done = CliRunner().invoke(app, [*command, "--out", str(out), "--steps", "2"])
    assert done.exit_code == 0, done.output
    assert "step 2/2, loss of kinds" in done.output
    again = CliRunner().invoke(app, [*command, "--out", str(out), "--steps", "2"])
    assert isinstance(again.exception, ContractError)
    assert str(out) in str(again.exception)


def test_scenes_and_models_that_it_cannot_use_are_refused_and_nothing_is_left(
    model: Path, tmp_path: Path
) -> None:
    plain, crowded = scenes(tmp_path / "plain"), scenes(tmp_path / "crowded", "crowded")
    other = tmp_path / "other"
    make_model(other, seed=0, family="qwen2_5_vl")
    two = replace(plain[0], images=plain[0].images + plain[1].images)
    for used, samples, found in (
        (model, [*plain, *crowded], "images of different sizes"),
        (model, [plain[1], two], f"{two.sample_id}: it has 2 images"),
        (other, plain, "is a qwen2_5_vl"),
    ):
        with pytest.raises(ContractError, match=re.escape(found)):
            pretrain_vision(used, samples, tmp_path / "out", 2, 0, silent)
        assert not (tmp_path / "out").exists()
