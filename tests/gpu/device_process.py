"""One learner process of a few, started by a test: which device it takes, and what a sum over all
processes is there.

    torchrun ... -m tests.gpu.device_process OUT

Writes OUT/RANK.json: `local_rank`, `device` of a model, GPU that a push is made from, `backends`
by device, `sum` of the ranks' numbers, counted from 1.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from learner.distributed.process_group import open_peers
from learner.training.input_checks import learner_processes


def main() -> None:
    (out,) = map(Path, sys.argv[1:])
    with open_peers(learner_processes(os.environ)) as peers:
        gpus = torch.cuda.is_available()
        # As learner/models/load.py names the model's device, and sync/transports.py a push's.
        held = torch.full((4,), float(peers.rank + 1), device="cuda" if gpus else "cpu")
        dist.all_reduce(held)
        found = {
            "local_rank": int(os.environ["LOCAL_RANK"]),
            "device": str(held.device),
            "pushes_from": torch.accelerator.current_device_index() if gpus else None,
            "backends": dist.get_backend_config(),
            "sum": held.tolist(),
        }
        (out / f"{peers.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
