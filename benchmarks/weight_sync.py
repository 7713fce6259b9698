"""Weight pushes against raw broadcasts, reloads and calls per parameter, in one run.

    .venv/bin/python -m benchmarks.weight_sync [--only NAME ...] [--rounds N] [--out FILE.json]

transfer     GB/s of the buckets of a 600 MB model over those of one raw broadcast of as many
             bytes; both over gloo on loopback, received and dropped
push         a whole push of that model to a server over the slower of its two parts: the raw
             broadcast, and an engine's reload of the same tensors from its own memory
verify       that push with `verify: sample` over one without verification
plans        an engine's reload of tensors from its own memory by vLLM's loaders over one by the
             copies of the load plan; Python's time of the latter for an 8B model without data
many         2,000 parameters of 4 KB: a call for each over their transfer in buckets
replicas     a push to two replicas, and to two servers at once, over a push to one
fixed        the same of the transfer alone to workers whose loading takes a fixed time

Every engine is one vLLM on the CPU. A round runs each side of a comparison once, in turn.
Prints the table of docs/benchmarks.md.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml
from torch import Tensor, nn
from transformers import Qwen3VLForConditionalGeneration

from benchmarks.command import run
from benchmarks.processes import Peer, PeerFailed
from benchmarks.results import Result, median_of
from benchmarks.wide_models import make_large, make_many
from benchmarks.workload import engine_settings
from learner.rollout.client import RolloutClient
from learner.rollout.parallel_calls import in_parallel
from learner.rollout.server_process import ServerProcess, free_ports
from learner.rollout.sync.push import WeightPusher, WeightSyncError
from learner.rollout.sync.transports import GlooGroup
from learner.rollout.sync.weights import MergedWeights, OneSource
from rollout_server.engines.vllm import environment as engine_environment
from rollout_server.settings.options import ServerSettings
from rollout_server.weights.weight_group import open_group_store
from shared_contracts.errors import ContractError
from shared_contracts.rollout_config import Verify
from shared_contracts.weights import InitCommunicator, ParameterMeta, SyncReport

TRANSFER_GOAL = 0.7
PUSH_GOAL = 1.4
OVERHEAD_GOAL_PERCENT = 20.0
VERIFY_GOAL = 1.05
PLAN_GOAL = 3.0
PLAN_MS_GOAL = 50.0
MANY_GOAL = 10.0
PARALLEL_GOAL = 1.3
# Of the loading that is fixed: about that of the slower way on this machine.
FIXED_GB_PER_S = 1.0
BUCKET_BYTES = 8 * 2**20
TIMEOUT_S = 60.0
START_S = 600.0


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Bench:
    """What several parts need, made when first asked for, and ended with `stack`."""

    def __init__(self, folder: Path, rounds: int, stack: ExitStack) -> None:
        self.rounds = rounds
        self._folder = folder
        self._stack = stack

    @cached_property
    def large(self) -> Path:
        return make_large(self._folder)

    @cached_property
    def large_model(self) -> nn.Module:
        return load_model(self.large)

    @cached_property
    def receiver(self) -> "GlooPair":
        return GlooPair(self)

    @cached_property
    def server(self) -> "PushedServer":
        return self.start_server(self.large, self.large_model, "large")

    def start_server(
        self, checkpoint: Path, model: nn.Module, name: str, replicas: int = 1
    ) -> "PushedServer":
        """A server that runs until the benchmark ends."""
        return self._stack.enter_context(self.serving(checkpoint, model, name, replicas))

    @contextmanager
    def serving(
        self, checkpoint: Path, model: nn.Module, name: str, replicas: int = 1
    ) -> Iterator["PushedServer"]:
        config = self._folder / f"{name}.yaml"
        settings = engine_settings(checkpoint).model_dump(mode="json", exclude_unset=True)
        config.write_text(yaml.safe_dump(settings | {"replicas": replicas}), encoding="utf-8")
        with ServerProcess(["--config", str(config)], self._folder / f"{name}.log") as process:
            process.wait_until_healthy(START_S)
            yield PushedServer(process.base_url, model)

    def peer(self, module: str, args: list[str], settings: ServerSettings | None = None) -> Peer:
        """`benchmarks.peers.MODULE`, talked to in lines, until the benchmark ends."""
        environment = {} if settings is None else engine_environment(settings)
        log = self._folder / f"{module}.log"
        peer = Peer(f"benchmarks.peers.{module}", args, log, environment, piped=True)
        return self._stack.enter_context(peer)

    @contextmanager
    def web_peer(self, module: str) -> Iterator[str]:
        """Base URL of the HTTP server `benchmarks.peers.MODULE` while the block runs."""
        (port,) = free_ports(1)
        log = self._folder / f"{module}.log"
        url = f"http://127.0.0.1:{port}"
        with Peer(f"benchmarks.peers.{module}", [str(port)], log, {}) as peer:
            peer.wait_until_healthy(f"{url}/health/")
            yield url


def load_model(checkpoint: Path) -> nn.Module:
    model: nn.Module = Qwen3VLForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32
    )
    return model


class PushedServer:
    """A server and our end of its weight group; every push has a version of its own."""

    def __init__(self, base_url: str, model: nn.Module) -> None:
        self._client = RolloutClient(base_url, TIMEOUT_S)
        self._source = OneSource(MergedWeights(model))
        self._version = 0
        self._verify: Verify = "off"
        self._connected: WeightPusher | None = None

    def push(self, verify: Verify = "sample") -> SyncReport:
        self._version += 1
        return self._pusher(verify).push(self._version)

    def _pusher(self, verify: Verify) -> WeightPusher:
        """The one pusher that is connected; a server has one weight group."""
        if self._connected is not None:
            if self._verify == verify:
                return self._connected
            self._connected.close()
        (port,) = free_ports(1)
        self._connected = pusher = WeightPusher(
            self._client, port, self._source, "gloo", BUCKET_BYTES, verify
        )
        self._verify = verify
        pusher.connect()
        return pusher


# Of `InitCommunicator`, what a worker's end of a gloo group wants.
_INIT_FIELDS = {"host", "port", "world_size", "bucket_bytes", "timeout_s"}


class GlooPair:
    """Two groups with a peer that receives: one for raw tensors, one as the learner's is."""

    def __init__(self, bench: Bench) -> None:
        bodies = [
            InitCommunicator(
                host="127.0.0.1",
                port=port,
                world_size=2,
                attempt="",
                bucket_bytes=BUCKET_BYTES,
                timeout_s=TIMEOUT_S,
            )
            for port in free_ports(2)
        ]
        raw = bodies[0]
        info = raw.model_dump(include=_INIT_FIELDS) | {"rank_offset": 1}
        raw_store = open_group_store(raw.host, raw.port, TIMEOUT_S)
        self._peer = bench.peer("gloo_receiver", [json.dumps(info)])
        self._raw = GlooGroup(raw)
        self._peer.hear()
        store = open_group_store(bodies[1].host, bodies[1].port, TIMEOUT_S)
        self._peer.say(str(bodies[1].port))
        self._group = GlooGroup(bodies[1])
        self._peer.hear()
        del raw_store, store

    def broadcast(self, data: Tensor) -> None:
        """One tensor, as gloo sends it."""
        self._peer.say(json.dumps({"raw": data.numel()}))
        self._raw.send([_one_tensor(data)], [("raw", data)])
        self._peer.hear()

    def send(self, parameters: list[ParameterMeta], weights: MergedWeights) -> None:
        """The buckets of a push, as the learner sends and a worker receives them."""
        self._peer.say(json.dumps({"parameters": [p.model_dump() for p in parameters]}))
        self._group.send(parameters, weights.tensors("float32"))
        self._peer.hear()


class FixedGroup:
    """A group with workers that load at a fixed rate; a push is over when all have loaded."""

    def __init__(self, bench: Bench, workers: int) -> None:
        (port,) = free_ports(1)
        body = InitCommunicator(
            host="127.0.0.1",
            port=port,
            world_size=1 + workers,
            attempt="",
            bucket_bytes=BUCKET_BYTES,
            timeout_s=TIMEOUT_S,
        )
        self._store = open_group_store(body.host, body.port, TIMEOUT_S)
        fields = body.model_dump(include=_INIT_FIELDS)
        self._workers = [
            bench.peer(
                "fixed_load", [json.dumps(fields | {"rank_offset": 1 + i}), str(FIXED_GB_PER_S)]
            )
            for i in range(workers)
        ]
        self._group = GlooGroup(body)
        for worker in self._workers:
            worker.hear()

    def push(self, parameters: list[ParameterMeta], weights: MergedWeights) -> None:
        for worker in self._workers:
            worker.say(json.dumps([p.model_dump() for p in parameters]))
        self._group.send(parameters, weights.tensors("float32"))
        for worker in self._workers:
            worker.hear()


def _one_tensor(data: Tensor) -> ParameterMeta:
    """Larger than a bucket, it is broadcast alone and as it is."""
    return ParameterMeta(name="raw", dtype="uint8", shape=[data.numel()])


def raw_tensor(parameters: list[ParameterMeta]) -> Tensor:
    """As many bytes as the parameters have, each page touched."""
    return torch.ones(sum(p.num_bytes for p in parameters), dtype=torch.uint8)


def transfer(bench: Bench) -> list[Result]:
    weights = MergedWeights(bench.large_model)
    parameters = weights.metadata("float32")
    data, pair = raw_tensor(parameters), bench.receiver
    ratios, rates = [], []
    for _ in range(bench.rounds + 1):
        raw = seconds_of(lambda: pair.broadcast(data))
        ours = seconds_of(lambda: pair.send(parameters, weights))
        ratios.append(raw / ours)
        rates.append((data.numel() / ours / 1e9, data.numel() / raw / 1e9))
    ours_rate, raw_rate = (statistics.median(side) for side in zip(*rates[1:], strict=True))
    detail = f"{ours_rate:.2f} and {raw_rate:.2f} GB/s of {data.numel() / 1e6:.0f} MB"
    name = "GB/s of the transfer alone over a raw broadcast"
    return [median_of(name, ratios[1:], TRANSFER_GOAL, at_least=True, detail=detail)]


@dataclass(frozen=True)
class PushRound:
    """Seconds of one round: a push, and its two parts by themselves."""

    push: float
    raw: float
    reload: float
    phases: dict[str, float]

    @property
    def ratio(self) -> float:
        return self.push / max(self.raw, self.reload)

    @property
    def overhead_percent(self) -> float:
        return 100 * sum(self.phases[k] for k in ("pause", "caches", "verify")) / self.push


def push(bench: Bench) -> list[Result]:
    data = raw_tensor(MergedWeights(bench.large_model).metadata("float32"))
    pair, server = bench.receiver, bench.server
    reload = bench.peer("reload", [str(bench.large)], engine_settings(bench.large))
    reload.hear()
    rounds = [_push_round(pair, server, reload, data) for _ in range(bench.rounds + 1)][1:]
    medians = {
        part: statistics.median(getattr(one, part) for one in rounds)
        for part in ("push", "raw", "reload")
    }
    detail = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in medians.items())
    phases = {k: statistics.median(one.phases[k] for one in rounds) for k in rounds[0].phases}
    return [
        median_of(
            "whole push over the slower of raw broadcast and reload",
            [one.ratio for one in rounds],
            PUSH_GOAL,
            at_least=False,
            detail=detail,
        ),
        median_of(
            "pause, cache resets and verification in it",
            [one.overhead_percent for one in rounds],
            OVERHEAD_GOAL_PERCENT,
            at_least=False,
            unit=" %",
            detail=", ".join(f"{phase} {1000 * s:.0f} ms" for phase, s in phases.items()),
        ),
    ]


def _push_round(pair: GlooPair, server: PushedServer, reload: Peer, data: Tensor) -> PushRound:
    raw = seconds_of(lambda: pair.broadcast(data))
    reports: list[SyncReport] = []
    pushed = seconds_of(lambda: reports.append(server.push()))
    reload.say("loaders")
    answer: dict[str, Any] = json.loads(reload.hear())
    print(f"push {pushed:.2f} s, raw {raw:.2f} s, reload {answer['seconds']:.2f} s", flush=True)
    return PushRound(pushed, raw, answer["seconds"], reports[0].seconds)


def verify(bench: Bench) -> list[Result]:
    times: dict[Verify, list[float]] = {"off": [], "sample": []}
    verified = 0
    for _ in range(bench.rounds + 1):
        for mode in times:
            report = bench.server.push(mode)
            times[mode].append(report.seconds["total"])
            verified = max(verified, report.verified)
    ratios = [b / a for a, b in zip(times["off"], times["sample"], strict=True)][1:]
    detail = f"{verified} parameters verified, up to four columns of each"
    name = "push with `verify: sample` over one without"
    return [median_of(name, ratios, VERIFY_GOAL, at_least=False, detail=detail)]


def plans(bench: Bench) -> list[Result]:
    many, name = make_many(bench.large.parent), "reload by vLLM's loaders over one by the plan"
    return [
        _plan_gain(bench, bench.large, f"{name}, 600 MB", 1.0),
        _plan_gain(bench, many, f"{name}, 3,200 small parameters", PLAN_GOAL),
        _plan_python(bench.rounds),
    ]


def _plan_gain(bench: Bench, checkpoint: Path, name: str, goal: float) -> Result:
    seconds: dict[str, list[float]] = {"loaders": [], "plan": []}
    reload = bench.peer("reload", [str(checkpoint)], engine_settings(checkpoint))
    reload.hear()
    for _ in range(bench.rounds + 1):
        for way, found in seconds.items():
            reload.say(way)
            found.append(json.loads(reload.hear())["seconds"])
    ratios = [a / b for a, b in zip(seconds["loaders"], seconds["plan"], strict=True)][1:]
    both = (1000 * statistics.median(found[1:]) for found in seconds.values())
    detail = "{:.0f} and {:.0f} ms".format(*both)
    return median_of(name, ratios, goal, at_least=True, detail=detail)


def _plan_python(rounds: int) -> Result:
    """Processor time of a push of 8B, of which no tensor has data."""
    command = [sys.executable, "-m", "tests.rehearsal.full_size_plans"]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "--rounds", str(rounds), folder, "8b"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    found = json.loads(line)
    loaders, plan = found["loaders_ms"], found["replay_ms"]
    detail = f"{statistics.median(loaders):.0f} ms by vLLM's loaders, buckets of 64 MiB"
    name = "Python's time of a push of 8B by the plan"
    return median_of(name, plan, PLAN_MS_GOAL, at_least=False, unit=" ms", detail=detail)


def many(bench: Bench) -> list[Result]:
    checkpoint = make_many(bench.large.parent)
    model = load_model(checkpoint)
    weights = MergedWeights(model)
    parameters = weights.metadata("float32")
    small = [p for p in parameters if p.num_bytes == 4096]
    pair = bench.receiver
    calls, sends, pushes = [], [], []
    with bench.web_peer("round_trips") as url, bench.serving(checkpoint, model, "many") as server:
        for _ in range(bench.rounds + 1):
            calls.append(seconds_of(lambda: _call_for_each(url, small)))
            sends.append(seconds_of(lambda: pair.send(parameters, weights)))
            pushes.append(server.push().seconds)
    called, sent, whole, loaded = (
        1000 * statistics.median(seconds[1:])
        for seconds in (calls, sends, [p["total"] for p in pushes], [p["load"] for p in pushes])
    )
    detail = (
        f"{called:.0f} ms for {len(small)} calls, {sent:.0f} ms for the buckets of "
        f"{len(parameters)} parameters; their whole push took {whole:.0f} ms, {loaded:.0f} of it "
        "to load them"
    )
    ratios = [a / b for a, b in zip(calls, sends, strict=True)][1:]
    name = "a call for each of 2,000 parameters of 4 KB over their transfer in buckets"
    return [median_of(name, ratios, MANY_GOAL, at_least=True, detail=detail)]


def _call_for_each(url: str, parameters: list[ParameterMeta]) -> None:
    with httpx.Client(base_url=url, trust_env=False) as http:
        for parameter in parameters:
            body = parameter.model_dump()
            http.post("/update_named_param/", json=body).raise_for_status()


def replicas(bench: Bench) -> list[Result]:
    model, one = bench.large_model, bench.server
    with bench.serving(bench.large, model, "twin", replicas=2) as twin:
        both = _over_one(bench.rounds, one.push, twin.push)
    with bench.serving(bench.large, model, "other") as other:
        two = _over_one(bench.rounds, one.push, lambda: in_parallel([one.push, other.push]))
    return [
        median_of("push to two replicas over one", both, PARALLEL_GOAL, at_least=False),
        median_of("push to two servers at once over one", two, PARALLEL_GOAL, at_least=False),
    ]


def _over_one(rounds: int, one: Callable[[], object], two: Callable[[], object]) -> list[float]:
    return [seconds_of(two) / seconds_of(one) for _ in range(rounds + 1)][1:]


def fixed(bench: Bench) -> list[Result]:
    weights = MergedWeights(bench.large_model)
    parameters = weights.metadata("float32")
    one, other, twin = FixedGroup(bench, 1), FixedGroup(bench, 1), FixedGroup(bench, 2)
    alone = partial(one.push, parameters, weights)
    both = partial(twin.push, parameters, weights)
    servers = [alone, partial(other.push, parameters, weights)]
    load = f"loading at {FIXED_GB_PER_S:g} GB/s"
    return [
        median_of(
            f"transfer to {what} over one, {load}",
            _over_one(bench.rounds, alone, pushed),
            PARALLEL_GOAL,
            at_least=False,
        )
        for what, pushed in (
            ("two replicas", both),
            ("two servers at once", lambda: in_parallel(servers)),
        )
    ]


PARTS = {
    "transfer": transfer,
    "push": push,
    "verify": verify,
    "plans": plans,
    "many": many,
    "replicas": replicas,
    "fixed": fixed,
}


def main() -> None:
    assert __doc__ is not None
    errors = (ContractError, PeerFailed, WeightSyncError)
    run("weight_sync", __doc__, PARTS, Bench, rounds=7, errors=errors)


if __name__ == "__main__":
    main()
