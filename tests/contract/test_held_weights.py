"""What is read back in bfloat16, below LoRA layers, and from a tied head."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.toy_checkpoints import read_weights

pytestmark = pytest.mark.slow

HEAD = "model.language_model.embed_tokens.weight"
AVX2 = {
    "PYTHONPATH": str(Path(__file__).parents[1] / "avx2"),
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}


@pytest.mark.req("SYNC-06")
@pytest.mark.parametrize("held_down", [{}, AVX2], ids=["this processor", "avx2"])
def test_a_stale_tied_head_is_seen_and_nothing_else_is(
    tied: Path, other_tied: Path, tmp_path: Path, held_down: dict[str, str]
) -> None:
    """vLLM's own reload leaves the head's packed copy as it was, where there is one."""
    out = tmp_path / "held.json"
    arguments = [str(path) for path in (tied, other_tied, out)]
    command = [sys.executable, "-m", "tests.contract.held_weights", *arguments]
    one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    environment = os.environ | one_process | held_down
    subprocess.run(command, check=True, timeout=280, env=environment)
    found = json.loads(out.read_text())
    packs = found.pop("packs")
    assert found == {
        "faults": [],
        "compared": len(read_weights(other_tied)),
        "reloaded": [HEAD] if packs else [],
        "rebuilt": [],
        "replayed": [],
    }
    assert not (held_down and packs)
