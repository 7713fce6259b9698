"""`learner watch` beside a run that is killed and goes on."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_mapping
from learner.data.toy import make_data
from learner.models.toy import make_model
from tests.unit.small_run import small_mapping
from tests.unit.watch_terminal import watching

pytestmark = pytest.mark.slow

LONG, SHORT = 4000, 4


@contextmanager
def training(mapping: dict[str, Any], **steps: int) -> Iterator[subprocess.Popen[bytes]]:
    """`learner train`, killed with the block."""
    mapping["training"] |= steps
    file = Path(mapping["training"]["output_dir"]).with_suffix(".yaml")
    file.write_text(dump_mapping(mapping))
    main = [sys.executable, "-c", "from learner.cli import main; main()"]
    with (
        file.with_suffix(".log").open("ab") as log,
        subprocess.Popen(
            [*main, "train", "--config", str(file)],
            stdout=log,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def said(*words: str) -> Any:
    return lambda terminal: all(word in terminal.last for word in words)


@pytest.mark.req("MET-03", "RUN-01")
def test_a_run_is_watched_through_its_kill_and_its_second_start(tmp_path: Path) -> None:
    make_model(tmp_path / "model", seed=0)
    data = make_data(tmp_path / "data", train=24, val=4, seed=0)
    folder = tmp_path / "run"
    mapping = small_mapping(tmp_path / "model", data, folder)
    mapping["training"] |= {"resume": "auto", "lr_scheduler_type": "constant", "warmup_ratio": 0.0}
    with training(mapping, max_steps=LONG, save_steps=SHORT) as first:
        wait_for_run(folder, first)
        with watching(folder, (100, 30), "--follow") as terminal:
            terminal.until(said(f"/{LONG}", "running", "checkpoint-", f"pid {first.pid}"))
            terminal.until(said("loss, A"))
            first.send_signal(signal.SIGKILL)
            first.wait()
            terminal.until(said("process gone", "no step for"))
            steps = logged(folder)
            with training(mapping, max_steps=steps + 2, save_steps=LONG) as second:
                terminal.until(said(f"pid {second.pid}"))
                terminal.until(said("finished", f"step {steps + 2}/{steps + 2}"))
                assert second.wait() == 0
            terminal.type("\x03")
            assert terminal.exit_code() == 130
            assert "Traceback" not in terminal.output
    with watching(folder, (100, 30)) as again:
        assert again.exit_code() == 0, "it has finished"
    assert logged(folder) == steps + 2


def wait_for_run(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Until there is a folder to watch, which is before the model is loaded."""
    while not (folder / "run.json").is_file():
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)


def logged(folder: Path) -> int:
    """The last step of metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return max(int(json.loads(line)["step"]) for line in lines)
