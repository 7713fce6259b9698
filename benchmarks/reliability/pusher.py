"""The learner's side of the hour: a LoRA model in training, pushed to two servers.

    python -m benchmarks.reliability.pusher CHECKPOINT FULL_URL ADAPTER_URL

Reads a line per push and answers a line of JSON when both servers have the weights:

    train      change the adapter a little, as a step of training would, and push
    forget     make the adapter nothing, so that the weights are the checkpoint's again, and push

FULL_URL is given all weights, the adapter merged; ADAPTER_URL is given the adapter alone.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from benchmarks.processes import end_with_benchmark
from benchmarks.weight_sync import load_model
from learner.rollout.client import RolloutClient
from learner.rollout.parallel_calls import in_parallel
from learner.rollout.server_process import free_ports
from learner.rollout.sync.push import WeightPusher
from learner.rollout.sync.weights import SyncMode

RANK = 4
BUCKET_BYTES = 2**20
TIMEOUT_S = 120.0
STEP = 0.02  # the deviation of what one step adds to the adapter


class Learner:
    def __init__(self, checkpoint: Path, *urls: str) -> None:
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
        model = get_peft_model(load_model(checkpoint), config)
        self._halves = [p for name, p in model.named_parameters() if "lora_B" in name]
        self._random = torch.Generator().manual_seed(0)
        modes = [SyncMode.of(model, "full", False), SyncMode.of(model, "adapter", False)]
        self._pushers = [
            WeightPusher(RolloutClient(url, TIMEOUT_S), port, mode, "gloo", BUCKET_BYTES)
            for url, port, mode in zip(urls, free_ports(2), modes, strict=True)
        ]
        self._version = 0

    @torch.no_grad()
    def train(self) -> None:
        for half in self._halves:
            half.add_(STEP * torch.randn(half.shape, generator=self._random))

    @torch.no_grad()
    def forget(self) -> None:
        for half in self._halves:
            half.zero_()

    def push(self) -> dict[str, list[float]]:
        """Seconds of the push to each server."""
        self._version += 1
        pushes = [partial(pusher.push, self._version) for pusher in self._pushers]
        return {"seconds": [report.seconds["total"] for report in in_parallel(pushes)]}

    def close(self) -> None:
        for pusher in self._pushers:
            pusher.close()


def main() -> None:
    end_with_benchmark()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    learner = Learner(Path(sys.argv[1]), *sys.argv[2:])
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        {"train": learner.train, "forget": learner.forget}[line.strip()]()
        print(json.dumps(learner.push()), file=answers, flush=True)
    learner.close()


if __name__ == "__main__":
    main()
