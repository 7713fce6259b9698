"""The disk of a run's folder fills up: one line that says so, and a server that works on.

The disk is a small tmpfs in a mount namespace of the run's own.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from learner.config import dump_mapping, load_mapping, merge
from learner.rollout.server_process import free_ports
from tests.contract.running_server import RunningServer, draw_scene, response_ids, text_request

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
WARMUP = load_mapping(ROOT / "configs" / "demo" / "warmup.yaml")
# The checkpoint is larger.
DISK = "2m"
# Shows what is there in the end, which nobody sees outside.
RUN = """
mount -t tmpfs -o size=$1 tmpfs "$2" || exit 99
"$3" -c 'from learner.cli import main; main()' train --config "$4"
code=$?
cd "$2" && find . -type f
exit $code
"""
SAMPLES = 2


def write_config(server: RunningServer, model: Path, disk: Path) -> Path:
    """One step of rollouts, after which a checkpoint is written."""
    folder = server.media / "full_disk"
    folder.mkdir()
    box = {"desc": "square", "bbox_2d": [100, 100, 500, 500]}
    scenes = [draw_scene(folder / f"{number}.png", number).name for number in range(SAMPLES)]
    lines = [{"images": [s], "width": 64, "height": 64, "objects": [box]} for s in scenes]
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (group_port,) = free_ports(1)
    address = {"base_url": server.process.base_url, "group_port": group_port}
    mapping = merge(
        WARMUP,
        {
            "model": {"model": str(model)},
            "data": {"train_jsonl": str(data), "val_jsonl": None},
            "training": {
                "output_dir": str(disk / "run"),
                "max_steps": 1,
                "save_steps": 1,
                "effective_batch_size": SAMPLES,
            },
            "stage2_ab": {"schedule": {"b_ratio": 1.0}},
            "rollout_matching": {
                "max_new_tokens": 8,
                "vllm": {"mode": "server", "server": {"servers": [address]}},
            },
        },
    )
    path = folder / "config.yaml"
    path.write_text(dump_mapping(mapping))
    return path


@pytest.mark.req("SYNC-04")
def test_a_full_disk_ends_the_run_in_one_line_and_the_server_works_on(
    server: RunningServer, tied: Path, tmp_path: Path
) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    answer = response_ids(server.infer([text_request()])[0])
    version = server.http.get("/health/").json()["weights_version"]
    disk = tmp_path / "disk"
    disk.mkdir()
    arguments = [DISK, str(disk), sys.executable, str(write_config(server, tied, disk))]
    run = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", RUN, "sh", *arguments],
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
        "set training.output_dir to a folder on another one, and start again"
    ]
    assert "Traceback" not in run.stderr
    files = {line for line in run.stdout.splitlines() if line.startswith("./run/")}
    assert "./run/metrics.jsonl" in files
    assert not [file for file in files if "checkpoint" in file or file.endswith(".part")]
    health = server.http.get("/health/").json()
    assert (health["state"], health["weights_version"]) == ("READY", version + 1)
    assert response_ids(server.infer([text_request()])[0]) == answer
