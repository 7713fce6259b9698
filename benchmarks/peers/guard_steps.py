"""The repeat guard's logits processors on the CPU, one decode step of 256 sequences at a time.

    python -m benchmarks.peers.guard_steps CHECKPOINT

Builds a batch for each case of `benchmarks.guard.CASES`, then answers every line it reads
with the mean milliseconds that `update_state` and `apply` take in a step, by case.
"""

import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor.interface import AddedRequest, BatchUpdate

from benchmarks.guard import BATCH, CASES, Case, guarded_settings
from benchmarks.processes import end_with_benchmark
from rollout_server.engines.vllm.engine import engine_args, sampling_params
from rollout_server.engines.vllm.repeat_processor import RepeatProcessor
from shared_contracts.infer import RequestConfig

STEPS = 100

# The toy model's weights: as the model of a real step does, reading them turns out what the
# caches held of the step before. Without it a step looks three times cheaper than it is.
MODEL = torch.ones(2_000_000)

# Ids below are random text of the toy vocabulary: no rule is ever reached.
IDS = 1000


class Batch:
    """256 guarded sequences that have generated `case.generated` tokens."""

    def __init__(self, config: VllmConfig, case: Case) -> None:
        cpu = torch.device("cpu")
        self._processor = RepeatProcessor(config, cpu, False)
        self._logits = torch.randn(BATCH, case.width)
        self._sequences = [random.choices(range(IDS), k=case.generated) for _ in range(BATCH)]
        sampling = sampling_params(RequestConfig(), None, 1, self._processor.sentinel)
        added: list[AddedRequest] = [
            (row, sampling, [], ids) for row, ids in enumerate(self._sequences)
        ]
        self._processor.update_state(BatchUpdate(BATCH, removed=[], added=added, moved=[]))
        self._processor.apply(self._logits)

    def step(self) -> float:
        """Milliseconds of one step, without the model and the new tokens before it."""
        for ids in self._sequences:
            ids.append(random.randrange(IDS))
        MODEL.sum()
        began = time.perf_counter()
        self._processor.update_state(None)
        self._processor.apply(self._logits)
        return 1000 * (time.perf_counter() - began)


def main() -> None:
    end_with_benchmark()
    random.seed(0)
    settings = guarded_settings(Path(sys.argv[1]))
    config = engine_args(settings, 0).create_engine_config()
    batches = {case.name: Batch(config, case) for case in CASES}
    print("ready", flush=True)
    for _ in sys.stdin:
        means = {
            name: statistics.fmean(batch.step() for _ in range(STEPS))
            for name, batch in batches.items()
        }
        print(json.dumps(means), flush=True)


if __name__ == "__main__":
    main()
