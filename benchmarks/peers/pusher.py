"""A learner that pushes full weights to a server of its own.

    python benchmarks/peers/pusher.py CHECKPOINT SERVER.yaml LOG TRANSPORT

Prints "ready", and then for each line of its input the seconds of a push by phase, as JSON. Its
packages are those on PYTHONPATH, which may be of an older checkout.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3VLForConditionalGeneration

from benchmarks.processes import end_with_benchmark
from learner.rollout.client import RolloutClient
from learner.rollout.server_process import ServerProcess, free_ports
from learner.rollout.sync import weights
from learner.rollout.sync.push import WeightPusher

BUCKET_BYTES = 8 * 2**20  # the default of a configuration
TIMEOUT_S = 60.0
START_S = 600.0


def arguments(model: torch.nn.Module, transport: str) -> tuple[Any, ...]:
    """Return the last arguments of a `WeightPusher`; of commit 7ee694e if `weights` is older."""
    if source := getattr(weights, "OneSource", None):
        return source(weights.MergedWeights(model)), transport, BUCKET_BYTES, "sample"
    return weights.SyncMode.of(model, "full", fallback_to_full=True), transport, BUCKET_BYTES


def main() -> None:
    end_with_benchmark()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    checkpoint, config, log, transport = sys.argv[1:]
    model = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    with ServerProcess(["--config", config], Path(log)) as server:
        server.wait_until_healthy(START_S)
        client = RolloutClient(server.base_url, TIMEOUT_S)
        pusher = WeightPusher(client, free_ports(1)[0], *arguments(model, transport))
        print("ready", file=answers, flush=True)
        for version, _ in enumerate(sys.stdin, start=1):
            print(json.dumps(pusher.push(version).seconds), file=answers, flush=True)
        pusher.close()


if __name__ == "__main__":
    main()
