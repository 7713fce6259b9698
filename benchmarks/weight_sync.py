"""Weight pushes: against raw broadcasts and an older checkout, their faults, adapters; in one run.

    .venv/bin/python -m benchmarks.weight_sync [--only NAME ...] [--rounds N] [--out FILE.json]
        [--old CHECKOUT]

gloo         a whole push of 600 MB over gloo on loopback over one raw broadcast of as many bytes,
             and over the push of CHECKOUT
ipc          the same push in shared memory, over the push of CHECKOUT
python       a worker's processor time of a push of 8B whose tensors have no data
killed       from SIGKILL of a learner in a push until its server has given the push up
adapter      the push of an adapter of rank 8

Every engine is one vLLM on the CPU. A round runs each side of a comparison once, in turn; the
first round does not count. Prints the table of docs/benchmarks.md.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import Qwen3VLForConditionalGeneration

from benchmarks.command import run
from benchmarks.peers.gloo_receiver import gloo_group
from benchmarks.peers.pusher import BUCKET_BYTES
from benchmarks.processes import Peer, PeerFailed
from benchmarks.results import Result, median_of
from benchmarks.wide_models import make_large
from benchmarks.workload import engine_settings
from learner.rollout.client import RolloutClient
from learner.rollout.server_process import ServerProcess, free_ports
from learner.rollout.sync.push import WeightPusher, WeightSyncError
from learner.rollout.sync.weights import MergedWeights, SyncMode
from shared_contracts.errors import ContractError
from shared_contracts.weights import Transport

RAW_GOAL = 1.4
OLD_GOAL = 1.15
PYTHON_MS_GOAL = 150.0
KILLED_MS_GOAL = 100.0
ADAPTER_MS_GOAL = 100.0
TIMEOUT_S = 60.0
START_S = 600.0
# Of the rounds of `killed`, each with a new start of the engine.
MOST_KILLED = 5
RANK = 8
ROOT = Path(__file__).parents[1]
PLUG_INS = "vllm.general_plugins"


class Bench:
    """What several parts need, made when first needed, and ended with `stack`.

    old: a checkout to compare with, or None.
    """

    def __init__(self, old: Path | None, folder: Path, rounds: int, stack: ExitStack) -> None:
        self.old = old
        self.rounds = rounds
        self.folder = folder
        self._stack = stack

    @cached_property
    def checkpoint(self) -> Path:
        return make_large(self.folder)

    @cached_property
    def size(self) -> int:
        """Bytes of a push."""
        weights = MergedWeights(load_model(self.checkpoint))
        return sum(parameter.num_bytes for parameter in weights.metadata("float32"))

    @contextmanager
    def server(self, **settings: Any) -> Iterator[ServerProcess]:
        config = self._config(**settings)
        with ServerProcess(["--config", str(config)], config.with_suffix(".log")) as server:
            server.wait_until_healthy(START_S)
            yield server

    @contextmanager
    def pusher(self, checkout: Path, transport: Transport) -> Iterator[Callable[[], Any]]:
        """Yield a function that pushes, by the code of a checkout, and returns its seconds."""
        config = self._config(weight_transport=transport)
        log = config.with_suffix(".log")
        path = [str(checkout), str(self._plug_in(checkout))]
        with Peer(
            str(ROOT / "benchmarks/peers/pusher.py"),
            [str(self.checkpoint), str(config), str(log), transport],
            log.with_suffix(".learner"),
            {"PYTHONPATH": os.pathsep.join(path)},
            piped=True,
            folder=checkout,
        ) as peer:
            peer.hear()
            yield lambda: json.loads(peer.ask("push"))

    def _config(self, **settings: Any) -> Path:
        config = self.folder / f"server-{len(list(self.folder.glob('*.yaml')))}.yaml"
        common = engine_settings(self.checkpoint).model_dump(mode="json", exclude_unset=True)
        config.write_text(yaml.safe_dump(common | settings), encoding="utf-8")
        return config

    def _plug_in(self, checkout: Path) -> Path:
        """Return a folder that names the checkout's plug-ins, which need not be installed."""
        project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
        named = project["project"]["entry-points"][PLUG_INS]
        info = self.folder / checkout.name / "compared-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        lines = [f"[{PLUG_INS}]", *(f"{name} = {place}" for name, place in named.items())]
        (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
        return info.parent


def load_model(checkpoint: Path) -> Any:
    return Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)


def raw_broadcast(bench: Bench, stack: ExitStack) -> Callable[[], float]:
    """Return a function that broadcasts the bytes of a push in one tensor; its seconds."""
    (port,) = free_ports(1)
    log = bench.folder / "receiver.log"
    args = [str(port), str(bench.size)]
    peer = stack.enter_context(Peer("benchmarks.peers.gloo_receiver", args, log, {}, piped=True))
    group, data = gloo_group(port, 0), torch.ones(bench.size, dtype=torch.uint8)

    def broadcast() -> float:
        began = time.perf_counter()
        peer.say("")
        group.broadcast(data, 0).wait()
        peer.hear()
        return time.perf_counter() - began

    return broadcast


def push(transport: Transport, bench: Bench) -> list[Result]:
    with ExitStack() as stack:
        ours = stack.enter_context(bench.pusher(ROOT, transport))
        peers = {"a raw broadcast over gloo": (raw_broadcast(bench, stack), RAW_GOAL)}
        if bench.old is not None:
            old = stack.enter_context(bench.pusher(bench.old, transport))
            peers["the old push"] = (lambda: old()["total"], OLD_GOAL)
        rounds = [
            (ours(), {name: measure() for name, (measure, _) in peers.items()})
            for _ in range(bench.rounds + 1)
        ][1:]
    phases = {name: middle_ms(one[name] for one, _ in rounds) for name in rounds[0][0]}
    rate = bench.size / phases["total"] / 1e6
    ours_told = ", ".join(f"{name} {ms:.0f} ms" for name, ms in phases.items())
    return [
        median_of(
            f"push over {transport} over {name}",
            [one["total"] / peer[name] for one, peer in rounds],
            goal,
            at_least=False,
            detail=f"{ours_told} ({rate:.2f} GB/s); {middle_ms(p[name] for _, p in rounds):.0f} ms",
        )
        for name, (_, goal) in peers.items()
    ]


def middle_ms(seconds: Iterable[float]) -> float:
    return 1000 * statistics.median(seconds)


def python(bench: Bench) -> list[Result]:
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
    milliseconds = found["ms"]
    return [median_of(name, milliseconds, PYTHON_MS_GOAL, False, " ms", detail)]


def killed(bench: Bench) -> list[Result]:
    with bench.server() as server, httpx.Client(base_url=server.base_url, trust_env=False) as http:
        found = [killed_ms(bench, server, http) for _ in range(min(bench.rounds, MOST_KILLED))]
    name = "from the learner's SIGKILL until the push is given up"
    return [median_of(name, found, KILLED_MS_GOAL, at_least=False, unit=" ms")]


def killed_ms(bench: Bench, server: ServerProcess, http: httpx.Client) -> float:
    """Return milliseconds, once the engines are built again."""
    (port,) = free_ports(1)
    args = [server.base_url, str(port), str(bench.checkpoint), "transfer", str(START_S)]
    log = bench.folder / "dying.log"
    with Peer("tests.contract.dying_pusher", args, log, {}, piped=True) as learner:
        learner.hear()
        os.kill(learner.pid, signal.SIGKILL)
        began = time.perf_counter()
        while http.get("/info/").json()["weights_state"] != "PUSH_NEEDED":
            pass
        elapsed = time.perf_counter() - began
    while http.get("/info/").json()["replicas"][0]["state"] != "needs-push":
        time.sleep(0.5)
    return 1000 * elapsed


def adapter(bench: Bench) -> list[Result]:
    config = LoraConfig(r=RANK, target_modules="all-linear")
    mode = SyncMode.of(get_peft_model(load_model(bench.checkpoint), config), "adapter", False)
    size = sum(each.num_bytes for each in mode.current().metadata("float32"))
    with bench.server(enable_lora=True) as server:
        client, (port,) = RolloutClient(server.base_url, TIMEOUT_S), free_ports(1)
        pusher = WeightPusher(client, port, mode, "gloo", BUCKET_BYTES)
        versions = range(1, bench.rounds + 2)
        seconds = [pusher.push(version).seconds["total"] for version in versions][1:]
        pusher.close()
    name, detail = f"push of an adapter of rank {RANK}", f"{size / 1e6:.1f} MB"
    found = [1000 * each for each in seconds]
    return [median_of(name, found, ADAPTER_MS_GOAL, at_least=False, unit=" ms", detail=detail)]


PARTS: dict[str, Callable[[Bench], list[Result]]] = {
    "gloo": partial(push, "gloo"),
    "ipc": partial(push, "ipc"),
    "python": python,
    "killed": killed,
    "adapter": adapter,
}


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--old", type=Path, help="the checkout of an older commit")
    old = parser.parse_known_args()[0].old
    make_bench = partial(Bench, None if old is None else old.resolve())
    errors = (ContractError, PeerFailed, WeightSyncError)
    run("weight_sync", __doc__, PARTS, make_bench, rounds=7, errors=errors, parents=[parser])


if __name__ == "__main__":
    main()
