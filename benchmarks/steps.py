"""What the learner's scheduling costs, with engines of a fixed latency on both sides.

    .venv/bin/python -m benchmarks.steps [--only NAME ...] [--rounds N] [--out FILE.json]

pipelined    a channel-B step whose chunks are rolled out while others are learned, over the
             longer of the two alone; a step that does one after the other is reported beside it
in_parts     a channel-B step of a shipped profile (32 samples, all decoded at once, answers of
             lognormal length) over the longer of its longest answer and its learning
servers      requests per second of 8, 4 and 2 servers over those of one, and of as many as there
             are; CPU time of the learner per request

The servers are a program of their own that answers over HTTP after a fixed time; a forward and
backward of the learner waits a fixed time, as a GPU would have it wait. Everything between is
the product's own. Prints the table of docs/evidence.md.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from accelerate import Accelerator

from benchmarks.command import Bench, run
from benchmarks.fixed_engines import (
    ANSWER_TOKENS,
    FixedA,
    FixedB,
    FixedPipeline,
    Weights,
    fixed_servers,
    samples,
)
from benchmarks.peers.fixed_servers import answer_s
from benchmarks.processes import PeerFailed
from benchmarks.results import Result, median_of
from learner.config import load_mapping, merge, parse_config
from learner.config.schema import Config
from learner.data.jsonl import build_request
from learner.rollout.backend import RolloutBackend
from learner.rollout.policy import Policy, RequestSettings
from learner.rollout.server_pool import ServerPool
from learner.training.recipes import Recipe
from learner.training.step import StepRunner
from learner.types import RolloutOutput
from shared_contracts.errors import ContractError, RunError
from shared_contracts.infer import RequestConfig, RolloutInferRequest

CONFIG = Path(__file__).parents[1] / "configs" / "demo" / "warmup.yaml"
PIPELINED_GOAL = 1.1
IN_PARTS_GOAL = 1.8
LINEAR_GOAL = 0.95
CPU_MS_GOAL = 1.0
# A step of the pipeline: so many chunks, each of them so long on either side.
CHUNKS, CHUNK_SAMPLES, CHUNK_S = 16, 8, 0.5
# A step of a shipped profile: its batch, and answers of which few are long.
BATCH, ANSWER_S, ANSWER_SIGMA = 32, 1.0, 0.5
SEQUENCES = 64
# So many slices of `SEQUENCES` for every server, each as long as 300 tokens of 20 ms.
SLICES, SLICE_S = 2, 6.0


def pipelined(bench: Bench) -> list[Result]:
    longest = CHUNKS * CHUNK_S
    overlapped, sequential = [], []
    with fixed_servers(1, CHUNK_S, CHUNK_SAMPLES, bench.folder) as backend:
        for _ in range(bench.rounds):
            overlapped.append(_step_s(backend) / longest)
            sequential.append(_step_s(AtTheEnd(backend)) / longest)
    name = "channel-B step over the longer of rollouts and learning"
    detail = f"{CHUNKS} chunks of {CHUNK_SAMPLES} samples, {CHUNK_S:g} s on each side; "
    detail += f"one after the other: {statistics.median(sequential):.2f}"
    return [median_of(name, overlapped, PIPELINED_GOAL, at_least=False, detail=detail)]


def in_parts(bench: Bench) -> list[Result]:
    """Learning takes as long as the longest answer. A step that learns at the end takes 2."""
    longest = max(answer_s(one.sample_id, ANSWER_S, ANSWER_SIGMA) for one in samples(BATCH))
    in_four, at_the_end = list[float](), list[float]()
    with fixed_servers(1, ANSWER_S, SEQUENCES, bench.folder, ANSWER_SIGMA) as backend:
        for _ in range(bench.rounds):
            for ratios, answering in ((in_four, backend), (at_the_end, AtTheEnd(backend))):
                seconds = _step_s(answering, forward_s=longest / BATCH, count=BATCH)
                ratios.append(seconds / longest)
    name = f"channel-B step of {BATCH} samples that are decoded at once, over the longer side"
    detail = f"lognormal answers, sigma {ANSWER_SIGMA:g}; learned at the end: "
    detail += f"{statistics.median(at_the_end):.2f}"
    return [median_of(name, in_four, IN_PARTS_GOAL, at_least=False, detail=detail)]


class AtTheEnd(RolloutBackend):
    """Another backend without its stream: a step learns when all answers are there."""

    def __init__(self, backend: ServerPool) -> None:
        super().__init__(backend.journal)
        self.version = backend.version
        self._backend = backend

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        return self._backend.rollout(requests, request_config)

    def push_weights(self, version: int) -> None:
        self._backend.push_weights(version)

    def close(self) -> None:
        self._backend.close()


def _step_s(
    backend: RolloutBackend,
    forward_s: float = CHUNK_S / CHUNK_SAMPLES,
    count: int = CHUNKS * CHUNK_SAMPLES,
) -> float:
    """Seconds of one channel-B step of `count` samples."""
    asking = RequestSettings("", None, RequestConfig(max_tokens=ANSWER_TOKENS, return_details=True))
    recipe = Recipe(_config(), FixedA(forward_s), FixedB(forward_s), FixedPipeline())
    runner = StepRunner(_config(), recipe, Policy(backend, asking))
    own = samples(count)
    began = time.perf_counter()
    runner.run(Weights(), own, 0, Accelerator())
    return time.perf_counter() - began


def _config() -> Config:
    """Channel B alone, without packing."""
    every_step = {"stage2_ab": {"schedule": {"b_ratio": 1}}, "training": {"packing": False}}
    return parse_config(merge(load_mapping(CONFIG), every_step))


def servers(bench: Bench) -> list[Result]:
    rates: dict[int, list[float]] = {count: [] for count in (1, 2, 4, 8)}
    cpu_ms: dict[int, list[float]] = {count: [] for count in rates}
    for _ in range(bench.rounds):
        for count in rates:
            per_second, ms = _rollout(bench, count)
            rates[count].append(per_second)
            cpu_ms[count].append(ms)
    results = []
    for count in (2, 4, 8):
        shares = [many / (count * one) for one, many in zip(rates[1], rates[count], strict=True)]
        detail = f"{statistics.median(rates[count]):.0f} requests/s"
        name = f"{count} servers, requests per second over {count} times those of one"
        results.append(median_of(name, shares, LINEAR_GOAL, at_least=True, detail=detail))
    name = "CPU time of the learner per request, 8 servers"
    results.append(median_of(name, cpu_ms[8], CPU_MS_GOAL, at_least=False, unit=" ms"))
    return results


def _rollout(bench: Bench, count: int) -> tuple[float, float]:
    """Requests per second, and milliseconds of this process's CPU time per request."""
    with fixed_servers(count, SLICE_S, SEQUENCES, bench.folder) as backend:
        asked = [build_request(s, "Detect.", None) for s in samples(count * SEQUENCES * SLICES)]
        config = RequestConfig(max_tokens=ANSWER_TOKENS, seed=1, return_details=True)
        cpu, began = time.process_time(), time.perf_counter()
        backend.rollout(asked, config)
        seconds, spent = time.perf_counter() - began, time.process_time() - cpu
    return len(asked) / seconds, 1000 * spent / len(asked)


PARTS = {"pipelined": pipelined, "in_parts": in_parts, "servers": servers}


if __name__ == "__main__":
    run("steps", __doc__, PARTS, rounds=5, errors=(PeerFailed, RunError, ContractError))
