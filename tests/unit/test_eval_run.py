"""Evaluations whose answers come from the learner itself: in a run, and by `learner eval`."""

import io
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from learner.analysis.evaluation.folder import read_answers
from learner.analysis.evaluation.scores import ScoredAnswer
from learner.cli import app
from learner.config import dump_mapping, merge, parse_config
from learner.data.toy import ToyData
from learner.training.start_checks import check_inputs
from learner.training.train import train
from shared_contracts.errors import ContractError
from tests.unit.small_run import small_mapping

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 2
# Adapters of the first step already change what is said.
LORA = {
    "tuner": {"train_type": "lora", "lora_rank": 4, "lora_alpha": 16},
    "training": {
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0.0,
        "max_steps": 1,
    },
}
Line = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """folder: of the run. config: its file."""

    folder: Path
    config: Path

    def again(self, **training: Any) -> None:
        go(self.config, training)

    def evaluated(self) -> list[Line]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if "eval/f1" in line]

    def answers(self, step: int) -> list[ScoredAnswer]:
        return read_answers(self.folder / "evaluations" / f"step_{step:06d}")


def go(config: Path, training: dict[str, Any]) -> None:
    parsed = parse_config(merge(json.loads(config.read_text()), {"training": training}))
    train(parsed, check_inputs(parsed), [], Console(file=io.StringIO()))


def make_run(model: Path, data: ToyData, folder: Path, **sections: Any) -> Run:
    """Evaluated and saved after every step, the answers too."""
    mapping = small_mapping(model, data, folder / "run")
    mapping["rollout_matching"] = {
        "rollout_backend": "hf",
        "max_new_tokens": 12,
        "decode_batch_size": 4,
        "eval_detection": {"enabled": True, "save_answers": True},
    }
    each = {"max_steps": STEPS, "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    mapping = merge(merge(mapping, {"training": each}), sections)
    config = folder / "run.json"
    config.write_text(json.dumps(mapping, default=str))
    (folder / "run.yaml").write_text(dump_mapping(mapping))
    go(config, {})
    return Run(folder / "run", config)


@pytest.fixture(scope="module")
def run(toy_checkpoint: Path, toy_data: ToyData, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(toy_checkpoint, toy_data, tmp_path_factory.mktemp("evaluated"))


@pytest.fixture(scope="module")
def adapters(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    return make_run(toy_checkpoint, toy_data, tmp_path_factory.mktemp("adapters"), **LORA)


def evaluated(run: Run, *options: str | Path) -> Result:
    """`learner eval` of the run's config."""
    arguments = ["eval", "--config", str(run.config.with_suffix(".yaml")), *map(str, options)]
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.req("EVAL-01", "MET-03")
def test_a_run_logs_average_precision_and_keeps_its_answers(run: Run) -> None:
    lines = run.evaluated()
    assert [line["step"] for line in lines] == [1, STEPS]
    for line in lines:
        assert line["eval/ap"] == line["eval/ap50"] == line["eval/box_ap"] == 0, "it says nothing"
        assert len(run.answers(line["step"])) == 4
        folder = run.folder / "evaluations" / f"step_{line['step']:06d}"
        scores = json.loads((folder / "scores.json").read_text())
        assert scores["step"] == line["step"]
        assert scores["coco"]["bbox"]["objects"]["ap"] == 0
    versions = [{a.weights_version for a in run.answers(step)} for step in (1, STEPS)]
    assert versions[0].isdisjoint(versions[1])


@pytest.mark.req("EVAL-01", "RUN-01")
def test_a_run_that_goes_on_makes_later_evaluations_again(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    own = make_run(toy_checkpoint, toy_data, tmp_path)
    evaluations = own.folder / "evaluations"
    before = {step: own.answers(step) for step in (1, STEPS)}
    shutil.rmtree(own.folder / f"checkpoint-{STEPS}")
    (evaluations / "step_000001" / "kept").touch()
    (evaluations / "step_000002" / "stale").touch()
    (evaluations / "step_000009").mkdir()
    own.again(resume="auto")
    assert [line["step"] for line in own.evaluated()] == [1, STEPS]
    assert sorted(path.name for path in evaluations.iterdir()) == ["step_000001", "step_000002"]
    assert (evaluations / "step_000001" / "kept").exists()
    assert not (evaluations / "step_000002" / "stale").exists()
    said = {step: [a.response_token_ids for a in own.answers(step)] for step in (1, STEPS)}
    assert said == {step: [a.response_token_ids for a in before[step]] for step in before}


@pytest.mark.req("EVAL-01", "CFG-10")
def test_the_command_finds_what_the_run_found_and_says_where_to_go_on(run: Run) -> None:
    done = evaluated(run, "--checkpoint", run.folder / f"checkpoint-{STEPS}")
    assert done.exit_code == 0
    out = run.folder / "evaluations" / f"checkpoint-{STEPS}-val"
    found, own = read_answers(out), run.answers(STEPS)
    assert [a.response_token_ids for a in found] == [a.response_token_ids for a in own]
    assert [a.seed for a in found] == [a.seed for a in own]
    for name in ("coco_gt.json", "coco_preds.json"):
        kept = run.folder / "evaluations" / f"step_{STEPS:06d}" / name
        assert (out / name).read_bytes() == kept.read_bytes()
    scores = json.loads((out / "scores.json").read_text())
    assert scores["checkpoint"] == str(run.folder / f"checkpoint-{STEPS}")
    assert scores["versions"]["transformers"]
    assert scores["settings"]["rollout_matching"]["max_new_tokens"] == 12
    for said in ("objects", "boxes, descriptions ignored", own[0].sample_id, str(out)):
        assert said in done.output
    assert "Running per image evaluation" not in done.output
    assert f"Report: {run.folder}/report.html" in done.output
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert f'<dt>Held-out F1</dt><dd><a href="evaluations/{out.name}/report.html">' in page
    assert f'<a href="evaluations/step_{STEPS:06d}/report.html">' in page


@pytest.mark.req("EVAL-01")
def test_an_adapter_answers_as_it_did_in_its_run(adapters: Run, tmp_path: Path) -> None:
    checkpoint = adapters.folder / "checkpoint-1"
    assert not (checkpoint / "config.json").exists()
    evaluated(adapters, "--checkpoint", checkpoint, "--out", tmp_path / "adapter")
    evaluated(adapters, "--out", tmp_path / "base")
    said = {
        name: [answer.response_token_ids for answer in read_answers(tmp_path / name)]
        for name in ("adapter", "base")
    }
    assert said["adapter"] == [answer.response_token_ids for answer in adapters.answers(1)]
    assert said["adapter"] != said["base"]


@pytest.mark.req("EVAL-01")
def test_an_adapter_of_other_layers_is_refused_and_leaves_nothing(
    adapters: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    layers = {"tuner": {"target_modules": ["o_proj"]}}
    other = Run(adapters.folder, tmp_path / "other.json")
    mapping = merge(json.loads(adapters.config.read_text()), layers)
    other.config.with_suffix(".yaml").write_text(dump_mapping(mapping))
    with pytest.raises(ContractError, match="does not fit the model of the config"):
        evaluated(other, "--checkpoint", other.folder / "checkpoint-1", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.req("EVAL-01")
def test_bad_input_is_told_before_anything_is_written(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="has no config") as caught:
        evaluated(run, "--checkpoint", tmp_path, "--out", tmp_path / "out")
    assert caught.value.where == "--checkpoint"
    assert list(tmp_path.iterdir()) == []
