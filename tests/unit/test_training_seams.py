"""A new objective and a new recipe are a file and a line of the registry.

Each run is a process, which adds the line before the config types are made.
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
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def require_trained(steps: list[dict[str, Any]]) -> None:
    """The entropy is in the loss of both steps: about the logarithm of the number of bins."""
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert 5.0 < line[ENTROPY] < 7.0  # weight 0.5, entropy_weight 2, log(1000) = 6.9
        atoms = [value for key, value in line.items() if key.startswith("loss/")]
        assert line["loss"] == pytest.approx(sum(atoms), abs=1e-3)
        assert line["grad_norm"] > 0


@pytest.mark.req("CFG-08", "LOSS-05", "STEP-01")
@pytest.mark.parametrize("what", ["objective", "recipe"])
@pytest.mark.slow
def test_an_objective_or_a_recipe_is_a_file_and_a_line_of_the_registry(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path, what: str
) -> None:
    found = ran(what, toy_checkpoint, toy_data, tmp_path / "run")
    require_trained(found["steps"])
    if what == "objective":
        assert "config.entropy_weight" in found["refused"], "its config is checked"
        assert "entropy_weight" in found["schema"]
        row = f"| `{ENTROPY}` | loss | loss | entropy over the bins, last forward |"
        assert row in found["reference"]
    else:
        assert found["refused"] == ""
        assert '"sharp"' in found["schema"]
        assert all(line["step/channel_b"] == 0 for line in found["steps"])
