"""SIGKILL of learner processes and servers in runs of two processes, at random moments.

Whoever is left ends within seconds or goes on; the run is started again as often as it takes, and
in the end every step is in the logs once, and every sample of it.

Real processes over gloo, real servers. The moments are the same in every run of CI, and ten times
as many in `make nightly`.
"""

import json
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import settings

from learner.config import dump_mapping, load_config
from learner.data.jsonl import read_samples
from learner.data.order import BatchOrder
from learner.data.toy import ToyData, make_data
from learner.rollout.server_process import ServerProcess, SupervisedServer, free_ports
from learner.stages.schedule import channel_for_step
from tests.contract.running_server import CPU, START_TIMEOUT_S, RunningServer
from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import push, weight_group
from tests.integration.ranks import RUN_S, Nursery, Ranks, nursery, wait_until
from tests.unit.small_run import small_mapping

NIGHTLY = settings().max_examples > 500
STEPS = 10
BATCH = 8
RANKS = 2

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery(tmp_path_factory.mktemp("nursery")) as ranks:
        yield ranks


@dataclass(frozen=True)
class World:
    """Two servers, one of which may be killed and is started again; data they may read."""

    spare: str
    kept: SupervisedServer
    data: ToyData
    checkpoint: Path
    folder: Path
    nursery: Nursery

    def config(self, name: str, servers: list[str], **training: Any) -> Path:
        ports = free_ports(len(servers))
        addresses = [
            {"base_url": url, "group_port": port} for url, port in zip(servers, ports, strict=True)
        ]
        sections: dict[str, Any] = {
            "training": {
                "max_steps": STEPS,
                "save_steps": 2,
                "effective_batch_size": BATCH,
                "resume": "auto",
                **training,
            },
            "stage2_ab": {"schedule": {"b_ratio": 0.5}},
            "rollout_matching": {
                "decode_batch_size": 4,
                "max_new_tokens": 200,
                "repeat_terminate": {"enabled": False},
                "vllm": {"mode": "server", "server": {"servers": addresses, "timeout_s": 120}},
            },
        }
        file = self.folder / f"{name}.yaml"
        out = self.folder / name
        mapping = small_mapping(self.checkpoint, self.data, out, **sections)
        file.write_text(dump_mapping(mapping))
        return file

    def start(self, config: Path) -> "Run":
        ranks = self.nursery.start(config, RANKS, config.with_suffix(""))
        return Run(ranks, self.folder / config.stem)


@dataclass(frozen=True)
class Run:
    ranks: Ranks
    folder: Path

    def steps(self) -> list[dict[str, Any]]:
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in map(json.loads, lines) if "loss" in line]

    def wait_for_steps(self, more: int) -> None:
        """Until it has done so many steps since it was started."""
        before = max((line["step"] for line in self.steps()), default=0)
        wait_until(
            lambda: max((s["step"] for s in self.steps()), default=0) >= before + more, self.ranks
        )

    def kill(self, *ranks: int) -> list[int]:
        self.ranks.kill(*ranks)
        codes = self.ranks.wait()
        for rank in range(RANKS):
            assert codes[rank] == (-9 if rank in ranks else 1), self.ranks.said()
            if rank not in ranks:
                assert "error: " in self.ranks.log(rank)
                assert "Traceback" not in self.ranks.log(rank)
        return codes


@pytest.fixture(scope="module")
def world(
    server: RunningServer,
    tied: Path,
    started: Nursery,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[World]:
    """The shared server has the weights it began with when all is over."""
    folder = tmp_path_factory.mktemp("kills")
    data = make_data(server.media / "kills", train=64, val=4, seed=0)
    (port,) = free_ports(1)
    media = ["--allowed-media-dir", str(server.media)]
    options = ["--model", str(tied), *CPU, "--max-model-len", "512", *media]
    kept = SupervisedServer(
        lambda: ServerProcess(options, folder / "server.log", port), START_TIMEOUT_S, [0.1] * 99
    )
    try:
        yield World(server.process.base_url, kept, data, tied, folder, started)
    finally:
        kept.stop()
        give_back(server, read_weights(tied))


def give_back(server: RunningServer, weights: dict[str, Any]) -> None:
    version = server.http.get("/info/").json()["weights_version"] + 1
    (port,) = free_ports(1)
    with weight_group(server.http, port, timeout_s=30.0) as sender:
        push(server.http, sender, weights, version)


def says(url: str, path: str) -> str:
    """What a server answers; nothing while it is away."""
    try:
        return httpx.get(url + path, timeout=10, trust_env=False).text
    except httpx.TransportError:
        return ""


def decoding(url: str) -> Callable[[], bool]:
    def now() -> bool:
        lines = says(url, "/metrics/").splitlines()
        counts = [line for line in lines if line.startswith("rollout_running_sequences{")]
        return any(float(line.split()[-1]) > 0 for line in counts)

    return now


def taking_weights(url: str) -> Callable[[], bool]:
    return lambda: '"weights_state":"UPDATING"' in says(url, "/info/").replace(" ", "")


def require_every_step_and_sample_once(config_file: Path, folder: Path) -> None:
    config = load_config(config_file)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == list(range(1, STEPS + 1))
    samples = read_samples(Path(config.data.train_jsonl), allow_poly=False)
    order = BatchOrder(len(samples), BATCH, RANKS, config.training.seed, config.data.shuffle)
    expected = Counter(
        (step + 1, rank, samples[index].sample_id)
        for step in range(STEPS)
        if channel_for_step(step, config.b_ratio) == "B"
        for rank in range(RANKS)
        for index in order.rank_batch(step, rank)
    )
    logged = [
        json.loads(line)
        for file in (folder / "rollouts").glob("step_*.jsonl")
        for line in file.read_text().splitlines()
    ]
    assert Counter((line["step"], line["rank"], line["sample_id"]) for line in logged) == expected


def moments(attempt: int) -> random.Random:
    return random.Random(None if NIGHTLY else attempt)


@pytest.mark.req("DDP-01", "RUN-01", "SYNC-07", "SYNC-08", "DIST-05")
@pytest.mark.parametrize("attempt", range(10 if NIGHTLY else 1))
def test_whoever_is_killed_the_run_ends_or_goes_on_and_nothing_is_lost(
    world: World, attempt: int
) -> None:
    moment, pause = moments(attempt), threading.Event().wait
    config = world.config(f"run{attempt}", [world.spare, world.kept.base_url])
    run = world.start(config)
    wait_until(decoding(world.kept.base_url), run.ranks)
    os.kill(world.kept.pid, signal.SIGKILL)
    run.wait_for_steps(1)

    pause(moment.uniform(0, 1))
    run.kill(1)

    run = world.start(config)
    wait_until(taking_weights(world.spare), run.ranks)
    run.kill(0)

    run = world.start(config)
    run.wait_for_steps(1)
    pause(moment.uniform(0, 1))
    run.kill(0, 1)

    run = world.start(config)
    assert run.ranks.wait(RUN_S) == [0, 0], run.ranks.said()
    require_every_step_and_sample_once(config, run.folder)


@pytest.mark.req("SYNC-07", "SYNC-08", "DIST-05")
@pytest.mark.parametrize("attempt", range(10 if NIGHTLY else 1))
def test_a_run_waits_for_its_only_server_which_gets_the_weights_again(
    world: World, attempt: int
) -> None:
    config = world.config(f"alone{attempt}", [world.kept.base_url])
    run = world.start(config)
    wait_until(decoding(world.kept.base_url), run.ranks)
    threading.Event().wait(moments(attempt).uniform(0, 0.2))
    os.kill(world.kept.pid, signal.SIGKILL)
    assert run.ranks.wait(RUN_S) == [0, 0], run.ranks.said()
    require_every_step_and_sample_once(config, run.folder)
