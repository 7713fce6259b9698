"""Weight pushes against raw broadcasts, their Python, and adapters; in one run.

    .venv/bin/python -m benchmarks.weight_sync [--only NAME ...] [--rounds N] [--out FILE.json]

gloo         a whole push of 600 MB over gloo on loopback over one raw broadcast of as many bytes
ipc          the same push in shared memory, over the same broadcast
python       a worker's processor time of a push of 8B whose tensors have no data
adapter      the push of an adapter of rank 8

Every engine is one vLLM on the CPU. A round runs each side of a comparison once, in turn; the
first round does not count. Prints the table of docs/evidence.md.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import Qwen3VLForConditionalGeneration

from benchmarks.command import Bench, run
from benchmarks.peers.gloo_receiver import gloo_group
from benchmarks.processes import Peer, PeerFailed
from benchmarks.results import Result, median_of
from benchmarks.wide_models import make_large
from benchmarks.workload import engine_settings
from learner.rollout.client import RolloutClient
from learner.rollout.server_process import ServerProcess, free_ports
from learner.rollout.sync.push import WeightPusher, WeightSyncError
from learner.rollout.sync.weights import SyncMode
from shared_contracts.errors import ContractError
from shared_contracts.weights import Transport

RAW_GOAL = 1.4
PYTHON_MS_GOAL = 150.0
ADAPTER_MS_GOAL = 100.0
BUCKET_BYTES = 16 * 2**20  # the default of a configuration
TIMEOUT_S = 60.0
START_S = 600.0
RANK = 8


class PushBench(Bench):
    @cached_property
    def checkpoint(self) -> Path:
        return make_large(self.folder)

    @contextmanager
    def pusher(
        self, source: SyncMode, transport: Transport, **settings: Any
    ) -> Iterator[Callable[[int], dict[str, float]]]:
        """Yield a function that pushes a version to a server of its own; its seconds by phase."""
        config = self.folder / f"server-{transport}-{len(settings)}.yaml"
        common = engine_settings(self.checkpoint).model_dump(mode="json", exclude_unset=True)
        config.write_text(yaml.safe_dump(common | settings), encoding="utf-8")
        with ServerProcess(["--config", str(config)], config.with_suffix(".log")) as server:
            server.wait_until_healthy(START_S)
            client, (port,) = RolloutClient(server.base_url, TIMEOUT_S), free_ports(1)
            pusher = WeightPusher(client, port, source, transport, BUCKET_BYTES)
            yield lambda version: pusher.push(version).seconds
            pusher.close()

    @contextmanager
    def raw_broadcast(self, size: int) -> Iterator[Callable[[], float]]:
        """Yield a function that broadcasts `size` bytes in one tensor over gloo; its seconds."""
        (port,) = free_ports(1)
        args, log = [str(port), str(size)], self.folder / "receiver.log"
        with Peer("benchmarks.peers.gloo_receiver", args, log, {}, piped=True) as peer:
            group, data = gloo_group(port, 0), torch.ones(size, dtype=torch.uint8)

            def broadcast() -> float:
                began = time.perf_counter()
                sent = group.broadcast(data, 0)
                peer.ask("")
                sent.wait()
                return time.perf_counter() - began

            yield broadcast


def load_model(checkpoint: Path) -> Any:
    return Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)


def push(transport: Transport, bench: PushBench) -> list[Result]:
    source = SyncMode.of(load_model(bench.checkpoint), "full", fallback_to_full=False)
    size = sum(parameter.num_bytes for parameter in source.full.metadata("float32"))
    with (
        bench.pusher(source, transport, weight_transport=transport) as ours,
        bench.raw_broadcast(size) as raw,
    ):
        rounds = [(ours(version), raw()) for version in range(1, bench.rounds + 2)][1:]
    phases = {
        name: 1000 * statistics.median(one[name] for one, _ in rounds) for name in rounds[0][0]
    }
    shown = ", ".join(f"{name} {ms:.0f} ms" for name, ms in phases.items())
    raw_ms = 1000 * statistics.median(seconds for _, seconds in rounds)
    return [
        median_of(
            f"push over {transport} over a raw broadcast over gloo",
            [one["total"] / seconds for one, seconds in rounds],
            RAW_GOAL,
            at_least=False,
            detail=f"{shown} ({size / phases['total'] / 1e6:.2f} GB/s); {raw_ms:.0f} ms",
        )
    ]


def python(bench: PushBench) -> list[Result]:
    command = [sys.executable, "-m", "tests.rehearsal.full_size_plans"]
    done = subprocess.run(
        [*command, "--rounds", str(bench.rounds), str(bench.folder / "meta"), "8b"],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    found, name = json.loads(line), "a worker's Python in a push of 8B"
    detail = f"{found['parameters']} parameters in buckets of 64 MiB"
    return [median_of(name, found["ms"], PYTHON_MS_GOAL, False, " ms", detail)]


def adapter(bench: PushBench) -> list[Result]:
    config = LoraConfig(r=RANK, target_modules="all-linear")
    mode = SyncMode.of(get_peft_model(load_model(bench.checkpoint), config), "adapter", False)
    assert mode.adapter is not None
    size = len(mode.adapter.safetensors("float32"))
    with bench.pusher(mode, "gloo", enable_lora=True) as ours:
        found = [1000 * ours(version)["total"] for version in range(1, bench.rounds + 2)][1:]
    name, detail = f"push of an adapter of rank {RANK}", f"{size / 1e6:.1f} MB"
    return [median_of(name, found, ADAPTER_MS_GOAL, at_least=False, unit=" ms", detail=detail)]


PARTS: dict[str, Callable[[PushBench], list[Result]]] = {
    "gloo": partial(push, "gloo"),
    "ipc": partial(push, "ipc"),
    "python": python,
    "adapter": adapter,
}

if __name__ == "__main__":
    errors = (ContractError, PeerFailed, WeightSyncError)
    run("weight_sync", __doc__, PARTS, rounds=7, errors=errors, make_bench=PushBench)
