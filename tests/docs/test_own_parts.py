"""The parts of "Your own parts" in CONTRIBUTING.md are short, and work as they are written."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from learner.data.conversion import convert
from learner.data.toy import ToyData
from tests.docs.documents import ROOT, blocks

PROGRAMS = {
    re.match(r"# \S+/(\w+)\.py", block.text)[1]: block.text  # type: ignore[index]
    for block in blocks("python")
    if block.document == "CONTRIBUTING.md"
}
ENTROPY = "loss/A2_coord/entropy"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the programs as modules."""
    for name, text in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def ran(folder: Path, *words: str | Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.own_parts", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_part_has_at_most_20_lines(name: str) -> None:
    lines = PROGRAMS[name].splitlines()
    assert sum(bool(line) and not line.startswith("#") for line in lines) <= 20


@pytest.mark.req("CFG-08", "LOSS-05", "STEP-01")
@pytest.mark.slow
def test_a_run_has_an_objective_a_recipe_a_format_and_a_family_of_its_own(
    toy_checkpoint: Path, toy_data: ToyData, folder: Path
) -> None:
    data = toy_data.train_jsonl.parent
    found = ran(folder, "run", toy_checkpoint, data, folder / "run")
    first, second = found["steps"]
    assert [first["step/channel_b"], second["step/channel_b"]] == [0, 1]
    assert 5.0 < first[ENTROPY] < 7.0  # weight 0.5, entropy_weight 2, log(1000) = 6.9
    for step in (first, second):
        atoms = [value for key, value in step.items() if key.startswith("loss/")]
        assert step["loss"] == pytest.approx(sum(atoms), abs=1e-3)
        assert step["grad_norm"] > 0
    assert found["answers"] == 4
    assert "config.entropy_weight" in found["refused"], "its config is checked"
    assert {"entropy_weight", "alternating"} <= set(re.findall(r"\w+", found["schema"]))
    assert (
        f"| `{ENTROPY}` | loss | loss | entropy over the bins, last forward |" in found["reference"]
    )


@pytest.mark.slow
def test_an_engine_of_its_own_answers(toy_checkpoint: Path, folder: Path) -> None:
    found = ran(folder, "engine", toy_checkpoint)
    assert found["counted"] == found["answered"] > 0


@pytest.mark.req("IO-01")
def test_a_reader_of_its_own_is_converted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (100, 50)).save(folder / "a.png")
    (folder / "boxes.csv").write_text("image,name,x1,y1,x2,y2\na.png,cat,10,5,50,25\n")
    monkeypatch.syspath_prepend(folder)
    source = importlib.import_module("csv_boxes").read_csv(folder / "boxes.csv", folder)
    found = convert(source, folder / "data.jsonl")
    (record,) = found.records
    assert record["objects"] == [{"desc": "cat", "bbox_2d": [100, 100, 500, 500]}]
    assert not found.account.left_out
