"""What is read back in bfloat16, below LoRA layers, and from a tied head."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.toy_checkpoints import read_weights


@pytest.mark.req("SYNC-06")
def test_a_stale_tied_head_is_seen_and_nothing_else_is(
    tied: Path, other_tied: Path, tmp_path: Path
) -> None:
    """vLLM's own reload leaves the head's packed copy as it was."""
    out = tmp_path / "held.json"
    arguments = [str(path) for path in (tied, other_tied, out)]
    command = [sys.executable, "-m", "tests.contract.held_weights", *arguments]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=280, env=environment)
    assert json.loads(out.read_text()) == {
        "faults": [],
        "compared": len(read_weights(other_tied)),
        "reloaded": ["model.language_model.embed_tokens.weight"],
        "rebuilt": [],
    }
