"""A run folder, a checkpoint and YAMLs that version 0.1.0 has written are read.

`tests/fixtures/run_of_0.1.0.tar.xz`, made by 0.1.0:

    old.yaml   LoRA on both channels, answers by `hf`, on a warmed-up toy model
    run/       6 steps, two evaluations, and the checkpoint of step 4; no pages, no TensorBoard
    data/      `learner toy make-data --train 12 --val 4`
    configs/   the YAMLs that it shipped

Paths in it begin with `/tmp/old010`. A toy model replaces the warmed-up one.
"""

import json
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from learner.analysis.evaluation.folder import read_answers
from learner.cli import app
from learner.config import load_config, load_mapping, merge, parse_config
from learner.runs.checkpoint import find_start, read_checkpoint
from learner.runs.run_folder import RunFolder
from shared_contracts.errors import ContractError
from tests.unit.small_run import run_quietly

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "run_of_0.1.0.tar.xz"
MADE_IN = b"/tmp/old010"  # a text to replace


@pytest.fixture
def made(toy_checkpoint: Path, tmp_path: Path) -> Path:
    """The files of 0.1.0 with paths of here, except in the checkpoint: its manifest has sizes."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    for file in tmp_path.rglob("*"):
        if file.suffix in (".json", ".jsonl", ".yaml") and "checkpoint-4" not in file.parts:
            file.write_bytes(file.read_bytes().replace(MADE_IN, bytes(tmp_path)))
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm" / "checkpoint-160").symlink_to(toy_checkpoint)
    return tmp_path


def ran(*arguments: object) -> Result:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def test_its_yamls_are_accepted_and_its_steps_replayed_bit_for_bit(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    shipped = sorted(Path("configs").rglob("*.yaml"))
    assert len(shipped) == 8
    complete = [path for path in shipped if path.name != "base.yaml"]
    ran("config", "check", "--keys-only", "old.yaml", "run/resolved_config.yaml", *complete)
    ran("config", "check", "old.yaml", "run/resolved_config.yaml")
    assert "Identical: 12 answers of 3 steps" in ran("replay", "run").output


def test_its_run_folder_has_answers_calls_and_a_page(made: Path) -> None:
    assert json.loads((made / "run/run.json").read_text())["versions"]["rollmatch"] == "0.1.0"
    run = RunFolder.open(made / "run")
    assert run.answer_steps() == [2, 4, 6]  # 0.1.0 calls them 1, 3 and 5
    assert [line["step"] for line in run.calls() if "step" in line] == [2, 4, 6]
    assert [run.from_1(step) for step in (0, 5, 6)] == [1, 6, 6]
    steps = [[answer.step for answer in run.answers(step)] for step in (2, 4, 6)]
    assert steps == [[2] * 4, [4] * 4, [6] * 4]
    ran("report", made / "run")
    page = (made / "run/report.html").read_text(encoding="utf-8")
    assert "Finished: 6 steps" in page
    assert "train.jsonl:3" in page
    with pytest.raises(ContractError, match="of this version"):
        read_answers(made / "run/evaluations/step_000006")


def test_its_run_resumes_from_its_checkpoint(made: Path) -> None:
    before = RunFolder.open(made / "run").metrics()
    assert read_checkpoint(made / "run/checkpoint-4").manifest.processes == 1
    mapping = merge(load_mapping(made / "run/resolved_config.yaml"), {"training": {"max_steps": 7}})
    config = parse_config(mapping)
    assert find_start(config, processes=1).step == 4
    folder = run_quietly(config)
    after = RunFolder.open(folder).metrics()
    assert [line["step"] for line in after if "loss" in line] == [1, 2, 3, 4, 5, 6, 7]
    assert after[:4] == before[:4]
    answers = RunFolder.open(folder)
    assert answers.answer_steps() == [2, 4, 6]
    assert {logged.name for logged in (folder / "rollouts").iterdir()} == {
        *("step_000001.jsonl", "step_000003.jsonl"),  # of 0.1.0
        "step_000006.jsonl",
    }
    assert [answer.step for answer in answers.answers(6)] == [6] * 4
    assert load_config(folder / "resolved_config.yaml").training.max_steps == 7
