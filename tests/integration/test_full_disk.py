"""The disk of a run folder fills up: the run ends with one line that says so.

The disk is a small tmpfs in a mount namespace of the run.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from learner.config import dump_mapping
from learner.data.toy import ToyData
from tests.unit.small_run import small_mapping

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# The checkpoint is larger.
DISK = "2m"
# Prints the files at the end, which are not visible outside the namespace.
RUN = """
mount -t tmpfs -o size=$1 tmpfs "$2" || exit 99
"$3" -c 'from learner.cli import main; main()' train --config "$4"
code=$?
cd "$2" && find . -type f
exit $code
"""


@pytest.mark.req("RUN-01", "MET-03")
def test_a_full_disk_ends_the_run_in_one_line_without_a_partial_checkpoint(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    disk, config = tmp_path / "disk", tmp_path / "config.yaml"
    disk.mkdir()
    training = {"max_steps": 1, "save_steps": 1}
    mapping = small_mapping(toy_checkpoint, toy_data, disk / "run", training=training)
    config.write_text(dump_mapping(mapping))
    run = subprocess.run(
        [
            *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", RUN, "sh"),
            *(DISK, str(disk), sys.executable, str(config)),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if run.returncode == 99 or run.stderr.startswith("unshare:"):
        pytest.skip(run.stderr.strip())
    assert run.returncode == 1, run.stderr
    checkpoint = disk / "run" / "checkpoint-1"
    errors = [line for line in run.stderr.splitlines() if line.startswith("error:")]
    assert errors == [
        f"error: cannot write {checkpoint}: No space left on device. Make room on that disk, or "
        "set training.output_dir to a folder on another disk, and start again"
    ]
    assert "Traceback" not in run.stderr
    files = {line for line in run.stdout.splitlines() if line.startswith("./run/")}
    assert "./run/metrics.jsonl" in files
    assert not [file for file in files if "checkpoint" in file or file.endswith(".part")]
