"""The repeat guard's logits processors on the CPU, one decode step of 256 sequences at a time.

    python -m benchmarks.peers.guard_steps CHECKPOINT

Builds a batch for each case of `benchmarks.guard.CASES`, then answers every line it reads
with the mean milliseconds that `update_state` and `apply` take in a step, by case: a guard
does its work in some steps for others, which a median would leave out. In vLLM's model runner V2
that is `apply` alone, over request states of vLLM's own.
"""

import json
import random
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor.interface import AddedRequest, BatchUpdate
from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.states import RequestState

from benchmarks.guard import BATCH, CASES, Case, guarded_settings
from benchmarks.processes import end_with_benchmark
from rollout_server.engines.vllm.arguments import engine_args
from rollout_server.engines.vllm.engine import sampling_params
from rollout_server.engines.vllm.repeat_processor import RepeatProcessor, RepeatProcessorV2
from shared_contracts.infer import RequestConfig

STEPS = 100

# The toy model's weights: as the model of a real step does, reading them turns out what the
# caches held of the step before. Without it a step looks three times cheaper than it is.
MODEL = torch.ones(2_000_000)

# Ids below are random text of the toy vocabulary: no rule is ever reached.
IDS = 1000

# Steps that a slot of model runner V2 has room for.
LONGEST = 4096


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


class BatchV2:
    """The same sequences where model runner V2 keeps them, each after a prompt of one id."""

    def __init__(self, config: VllmConfig, case: Case) -> None:
        cpu = torch.device("cpu")
        self._known = 1 + case.generated
        context = self._known + LONGEST
        states: Any = RequestState(BATCH, context, context, 0, case.width, cpu)
        self._ids = states.all_token_ids.gpu
        self._ids.copy_(torch.randint(IDS, self._ids.shape))
        states.prompt_len.np[:] = 1
        states.prefill_len.np[:] = self._known
        self._processor = RepeatProcessorV2(config, states)
        self._logits = torch.randn(BATCH, case.width)
        sampling = sampling_params(RequestConfig(), None, 1, self._processor.sentinel)
        for slot in range(BATCH):
            self._processor.add_request(slot, sampling)
        self._processor.apply_staged_writes()
        self._slots = torch.arange(BATCH, dtype=torch.int32)
        self._processor.apply(self._logits, self._context())

    def step(self) -> float:
        """Milliseconds of one step, without the model and the new tokens before it."""
        if self._known == self._ids.shape[1]:
            self._known -= LONGEST  # the place of an id that was taken takes another one
        self._known += 1
        context = self._context()
        MODEL.sum()
        began = time.perf_counter()
        self._processor.apply(self._logits, context)
        return 1000 * (time.perf_counter() - began)

    def _context(self) -> Any:
        newest = torch.full((BATCH,), self._known - 1)
        return SimpleNamespace(expanded_idx_mapping=self._slots, pos=newest)


def batch_of(config: VllmConfig, case: Case) -> Batch | BatchV2:
    return BatchV2(config, case) if case.v2 else Batch(config, case)


def use_buffers_of_the_cpu() -> None:
    """In place of vLLM's buffers in pinned memory, as its worker for CPUs does it."""
    buffers: Any = buffer_utils
    buffers.UvaBuffer = UvaBuffer
    buffers.get_accelerator_view_from_cpu_tensor = lambda cpu: cpu


def main() -> None:
    end_with_benchmark()
    random.seed(0)
    settings = guarded_settings(Path(sys.argv[1]))
    config = engine_args(settings, 0).create_engine_config()
    use_buffers_of_the_cpu()
    batches = {case.name: batch_of(config, case) for case in CASES}
    print("ready", flush=True)
    for _ in sys.stdin:
        means = {
            name: statistics.fmean(batch.step() for _ in range(STEPS))
            for name, batch in batches.items()
        }
        print(json.dumps(means), flush=True)


if __name__ == "__main__":
    main()
