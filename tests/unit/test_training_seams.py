"""A new objective and a new recipe: a file of the test's own, and a line of the registry.

Each run is a process of its own, which adds the line before the config's types are made.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from learner.data.toy import ToyData

ROOT = Path(__file__).parents[2]
ENTROPY = "loss/A2_coord/sharp_entropy"


def ran(what: str, model: Path, data: ToyData, out: Path) -> dict[str, Any]:
    folder = data.train_jsonl.parent
    command = [sys.executable, "-m", "tests.unit.seams.registered_run", what]
    done = subprocess.run(
        [*command, str(model), str(folder), str(out)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def require_trained(steps: list[dict[str, Any]]) -> None:
    """Both steps had the entropy in their loss: near the logarithm of the number of bins."""
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert 5.0 < line[ENTROPY] < 7.0  # weight 0.5, entropy_weight 2, log(1000) = 6.9
        atoms = [value for key, value in line.items() if key.startswith("loss/")]
        assert line["loss"] == pytest.approx(sum(atoms), abs=1e-3)
        assert line["grad_norm"] > 0


@pytest.mark.req("CFG-08", "LOSS-05")
def test_an_objective_is_a_file_and_a_line_of_the_registry(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    said = ran("objective", toy_checkpoint, toy_data, tmp_path / "run")
    require_trained(said["steps"])
    assert "config.entropy_weight" in said["refused"], "its config is checked"
    assert "entropy_weight" in said["schema"]
    assert (
        f"| `{ENTROPY}` | loss | loss | entropy over the bins, last forward |"
        in (said["reference"])
    )


@pytest.mark.req("CFG-08", "LOSS-05", "STEP-01")
def test_a_recipe_is_a_file_and_a_line_of_the_registry(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    said = ran("recipe", toy_checkpoint, toy_data, tmp_path / "run")
    require_trained(said["steps"])
    assert said["refused"] == ""
    assert '"sharp"' in said["schema"]
    assert all(line["step/channel_b"] == 0 for line in said["steps"])
