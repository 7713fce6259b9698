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
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model

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
    def __init__(self, checkpoint: Path, full_url: str, adapter_url: str) -> None:
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
        model = get_peft_model(cast(Any, load_model(checkpoint)), config)
        assert isinstance(model, PeftModel)
        self._halves = [p for name, p in model.named_parameters() if "lora_B" in name]
        self._random = torch.Generator().manual_seed(0)
        self._pushers = [
            _pusher(full_url, SyncMode.of(model, "full", fallback_to_full=False)),
            _pusher(adapter_url, SyncMode.of(model, "adapter", fallback_to_full=False)),
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
        version = self._version
        reports = in_parallel([lambda p=p: p.push(version) for p in self._pushers])  # type: ignore[misc]
        return {"seconds": [report.seconds["total"] for report in reports]}

    def close(self) -> None:
        for pusher in self._pushers:
            pusher.close()


def _pusher(url: str, mode: SyncMode) -> WeightPusher:
    client = RolloutClient(url, TIMEOUT_S)
    (port,) = free_ports(1)
    return WeightPusher(client, port, mode, "gloo", BUCKET_BYTES)


def main() -> None:
    end_with_benchmark()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    checkpoint, full_url, adapter_url = sys.argv[1:]
    learner = Learner(Path(checkpoint), full_url, adapter_url)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        {"train": learner.train, "forget": learner.forget}[line.strip()]()
        print(json.dumps(learner.push()), file=answers, flush=True)
    learner.close()


if __name__ == "__main__":
    main()
