"""Two learner processes that shard a model (FSDP2) and push it to a server, by torchrun."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from learner.config import dump_mapping
from learner.data.toy import make_data
from shared_contracts.weights import Transport
from tests.contract.running_server import RunningServer
from tests.integration.shared_server import address_of
from tests.unit.small_run import metric_lines, small_mapping

LEARNER = Path(sys.executable).parent / "learner"
STEPS = 2
RUN_S = 280.0


def pushed_from_shards(
    folder: Path, server: RunningServer, transport: Transport, **environment: str
) -> list[dict[str, Any]]:
    """The logged steps of a run of channel B; every push has the effect of the trained weights.

    environment: of the learner, over this one's.
    """
    data = make_data(server.media / "sharded", train=16, val=2, seed=0)
    config = small_mapping(
        server.checkpoint,
        data,
        folder / "run",
        training={
            "effective_batch_size": 4,
            "max_steps": STEPS,
            "save_steps": STEPS,
            "data_parallel": "fsdp2",
        },
        stage2_ab={"schedule": {"b_ratio": 1.0}},
        rollout_matching={
            "vllm": {
                "server": {"servers": [address_of(server.process.base_url)]},
                "sync": {"transport": transport, "verify": "full"},
            }
        },
    )
    (folder / "run.yaml").write_text(dump_mapping(config))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=2", "--no-python", str(LEARNER), "train"),
            *("--config", str(folder / "run.yaml")),
        ],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return metric_lines(folder / "run", "loss")


def check_pushes(steps: Sequence[dict[str, Any]]) -> None:
    """Before each step, whole weights; the server computes with them."""
    assert [step["sync/pushes"] for step in steps] == [1] * STEPS
    assert all(step["sync/probe_s"] > 0 for step in steps)
    assert steps[-1]["sync/weights_version"] == steps[0]["sync/weights_version"] + STEPS - 1
