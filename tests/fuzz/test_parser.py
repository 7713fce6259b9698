"""The fuzz target runs, and finds a planted fault."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("atheris", reason="atheris has no wheel for this platform")

pytestmark = pytest.mark.slow

TARGET = Path(__file__).with_name("parser.py")

# The cut keeps the whole token it falls into.
FAULT = """
import runpy, sys
sys.path[:0] = [sys.argv.pop(1)]
import learner.stages.tokens
learner.stages.tokens.spell_leading = lambda tokenizer, token_id, leading: [token_id]
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def fuzz(command: list[str], folder: Path, runs: int) -> "subprocess.CompletedProcess[str]":
    options = [f"-runs={runs}", "-seed=1", f"-artifact_prefix={folder}/"]
    return subprocess.run(
        [sys.executable, *command, *options],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.req("PARSE-07", "APPEND-02")
def test_the_fuzzer_finds_nothing(tmp_path: Path) -> None:
    done = fuzz([str(TARGET)], tmp_path, runs=500)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = re.search(r"Done (\d+) runs", done.stderr)  # some more than were asked for, at times
    assert runs is not None
    assert int(runs[1]) >= 500
    assert "INFO: Instrumenting learner.stages.formats.coord_json" in done.stderr


@pytest.mark.req("PARSE-05")
def test_the_fuzzer_finds_a_planted_fault(tmp_path: Path) -> None:
    done = fuzz(["-c", FAULT, str(TARGET.parents[2]), str(TARGET)], tmp_path, runs=2000)
    assert done.returncode != 0
    assert "AssertionError" in done.stdout + done.stderr
    assert list(tmp_path.glob("crash-*"))
