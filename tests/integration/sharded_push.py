"""Two learner processes that shard a model (FSDP2) and push it to a server, by torchrun."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from learner.config import dump_mapping
from learner.data.toy import make_data
from learner.models.toy import make_model
from learner.rollout.server_process import free_ports
from shared_contracts.weights import Transport
from tests.contract.running_server import running_server
from tests.unit.small_run import metric_lines, small_mapping

LEARNER = Path(sys.executable).parent / "learner"
STEPS = 2
RUN_S = 280.0


def pushed_from_shards(
    folder: Path, server_device: Sequence[str], transport: Transport, **environment: str
) -> list[dict[str, Any]]:
    """The logged steps of a run of channel B; every push has the effect of the trained weights.

    environment: of the learner, over this one's.
    """
    make_model(folder / "model", seed=0)
    with running_server(folder / "model", folder / "server", device=server_device) as server:
        data = make_data(server.media / "toy", train=16, val=2, seed=0)
        (group_port,) = free_ports(1)
        address = {"base_url": server.process.base_url, "group_port": group_port}
        config = small_mapping(
            folder / "model",
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
                    "server": {"servers": [address]},
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
