"""What the learner's scheduling costs, with engines of a fixed latency on both sides.

    .venv/bin/python -m benchmarks.steps [--only NAME ...] [--rounds N] [--out FILE.json]

pipelined    a channel-B step whose chunks are rolled out while others are learned, over the
             longer of the two alone; a step that does one after the other is reported beside it
in_parts     a channel-B step of a shipped profile (32 samples, all decoded at once, answers of
             lognormal length) over the longer of its longest answer and its learning
real         the same in real runs of the toy, with its learner and a vLLM server on a core each
servers      requests per second of 8, 4 and 2 servers over those of one, and of as many as there
             are; CPU time of the learner per request

Except in `real`, the servers are a program of their own that answers over HTTP after a fixed time,
and a forward and backward of the learner waits a fixed time, as a GPU would have it wait.
Everything between is the product's own. Prints the table of docs/evidence.md.
"""

import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console

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
from learner.data.toy import make_data
from learner.models.toy import make_model
from learner.rollout.backend import RolloutBackend
from learner.rollout.policy import Policy, RequestSettings
from learner.rollout.server_pool import ServerPool
from learner.rollout.server_process import ServerProcess, free_ports
from learner.training.channels import Recipe
from learner.training.input_checks import check_inputs, generates
from learner.training.server_checks import reach_servers
from learner.training.step import StepRunner
from learner.training.train import train
from learner.types import RolloutOutput
from shared_contracts.errors import ContractError, RunError
from shared_contracts.infer import RequestConfig, RolloutInferRequest

CONFIG = Path(__file__).parents[1] / "configs" / "demo" / "warmup.yaml"
PIPELINED_GOAL = 1.1
IN_PARTS_GOAL = 1.8
REAL_GOAL = 1.4
LINEAR_GOAL = 0.95
CPU_MS_GOAL = 1.0
# A step of the pipeline: so many chunks, each of them so long on either side.
CHUNKS, CHUNK_SAMPLES, CHUNK_S = 16, 8, 0.5
# A step of a shipped profile: its batch, and answers of which few are long.
BATCH, ANSWER_S, ANSWER_SIGMA = 32, 1.0, 0.5
SEQUENCES = 64
# The real runs: steps of the warm-up, and of each run.
WARM_STEPS, REAL_STEPS = 120, 25
SERVER_START_S = 600.0
NOWHERE = "http://127.0.0.1:1"
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


def real(bench: Bench) -> list[Result]:
    """Channel-B steps of a model that has learned to answer; their pushes are left out."""
    torch.set_num_threads(1)
    folder = bench.folder / "real"
    data = make_data(folder / "data", train=1024, val=1, seed=0)
    make_model(folder / "toy", seed=0)

    def config(name: str, model: Path, base_url: str, **sections: Any) -> Config:
        (group_port,) = free_ports(1)
        server = {"servers": [{"base_url": base_url, "group_port": group_port}]}
        own = {
            "model": {"model": str(model)},
            "data": {"train_jsonl": str(data.train_jsonl), "val_jsonl": None},
            "training": {"output_dir": str(folder / name)},
            "rollout_matching": {"vllm": {"server": server}},
        }
        return parse_config(merge(merge(load_mapping(CONFIG), own), sections))

    def trained(run: Config) -> Path:
        clients = reach_servers(run) if generates(run) else []
        return train(run, check_inputs(run), clients, Console(quiet=True))

    steps = {"max_steps": WARM_STEPS, "save_steps": WARM_STEPS}
    warm = trained(config("warm", folder / "toy", NOWHERE, training=steps))
    model = warm / f"checkpoint-{WARM_STEPS}"
    options = ["--model", str(model), "--device", "cpu", "--dtype", "float32"]
    options += ["--allowed-media-dir", str(folder), "--max-num-seqs", str(SEQUENCES)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    results = []
    with ServerProcess(options, folder / "server.log", environment=environment) as server:
        server.wait_until_healthy(SERVER_START_S)
        for at_once, goal in ((BATCH // 4, REAL_GOAL), (SEQUENCES, IN_PARTS_GOAL)):
            run = trained(
                config(
                    f"{at_once} at once",
                    model,
                    server.base_url,
                    training={"max_steps": REAL_STEPS, "save_strategy": "no"},
                    stage2_ab={"schedule": {"b_ratio": 1.0}},
                    rollout_matching={"decode_batch_size": at_once},
                )
            )
            name = f"step of a real run, {min(at_once, BATCH)} of {BATCH} answers decoded at once"
            results.append(_overlap(f"{name}, over the longer side", run, goal))
    return results


def _overlap(name: str, run: Path, goal: float) -> Result:
    """How long the steps of a run took; its first one is left out."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    steps = [line for line in lines if "loss" in line][1:]
    overlapped, sequential = list[float](), list[float]()
    for step in steps:
        answers, learning = step["time/rollout_s"], step["time/learn_s"] + step["time/target_s"]
        overlapped.append((step["time/step_s"] - step["time/push_s"]) / max(answers, learning))
        sequential.append((answers + learning) / max(answers, learning))
    detail = f"{len(steps)} steps; one after the other: {statistics.median(sequential):.2f}"
    return median_of(name, overlapped, goal, at_least=False, detail=detail)


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


PARTS = {"pipelined": pipelined, "in_parts": in_parts, "real": real, "servers": servers}


if __name__ == "__main__":
    run("steps", __doc__, PARTS, rounds=5, errors=(PeerFailed, RunError, ContractError))
