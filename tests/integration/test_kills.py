"""SIGKILL of learner processes and servers in runs of two processes.

The remaining processes end or go on. The run is started again as often as needed. At the end every
step and every sample is logged once. Real processes over gloo, real servers; random moments in
`make nightly`.
"""

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

from learner.config import dump_mapping, load_config, merge
from learner.data.jsonl import read_samples
from learner.data.order import BatchOrder
from learner.data.toy import ToyData, make_data
from learner.rollout.server_process import ServerProcess, SupervisedServer, free_ports
from learner.runs.checkpoint import newest_checkpoint
from learner.stages.schedule import channel_for_step
from tests.contract.running_server import CPU, START_TIMEOUT_S, RunningServer, by_servers, samples
from tests.integration.ranks import RUN_S, Nursery, Ranks, wait_until
from tests.integration.runs import logged_answers
from tests.unit.small_run import metric_lines, small_mapping

STEPS = 8
BATCH = 8
RANKS = 2

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]


@dataclass(frozen=True)
class World:
    """Two servers and data they may read. kept: may be killed, and is started again."""

    spare: str
    kept: SupervisedServer
    data: ToyData
    checkpoint: Path
    folder: Path
    nursery: Nursery

    def config(self, name: str, servers: list[str], **changes: Any) -> Path:
        """changes: sections, merged over those of a run whose channels take turns."""
        sections: dict[str, Any] = {
            "training": {
                "max_steps": STEPS,
                "save_steps": 2,
                "effective_batch_size": BATCH,
                "resume": "auto",
            },
            "stage2_ab": {"schedule": {"b_ratio": 0.5}},
            "rollout_matching": {
                "decode_batch_size": 4,
                "max_new_tokens": 64,
                "vllm": by_servers(*servers),
            },
        }
        file, out = self.folder / f"{name}.yaml", self.folder / name
        mapping = small_mapping(self.checkpoint, self.data, out, **merge(sections, changes))
        file.write_text(dump_mapping(mapping))
        return file

    def start(self, config: Path) -> "Run":
        return Run(self.nursery.start(config, RANKS), self.folder / config.stem)


@dataclass(frozen=True)
class Run:
    ranks: Ranks
    folder: Path

    def steps(self) -> list[dict[str, Any]]:
        there = (self.folder / "metrics.jsonl").exists()
        return metric_lines(self.folder, "loss") if there else []

    def wait_for_steps(self, more: int) -> None:
        """Until it has made `more` steps beyond those logged now."""
        before = max((line["step"] for line in self.steps()), default=0)
        wait_until(
            lambda: max((s["step"] for s in self.steps()), default=0) >= before + more, self.ranks
        )

    def kill(self, *ranks: int) -> list[int]:
        self.ranks.kill(*ranks)
        codes = self.ranks.wait()
        for rank in range(RANKS):
            assert codes[rank] == (-9 if rank in ranks else 1), self.ranks.tails()
            if rank not in ranks:
                assert "error: " in self.ranks.log(rank)
                assert "Traceback" not in self.ranks.log(rank)
        return codes


@pytest.fixture(scope="module")
def world(
    server: RunningServer, tied: Path, started: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("kills")
    data = make_data(server.media / "kills", train=BATCH * STEPS, val=4, seed=0)
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
        server.push(tied)


def get(url: str, path: str) -> str:
    """The body of an answer; empty if there is no answer."""
    try:
        return httpx.get(url + path, timeout=10, trust_env=False).text
    except httpx.TransportError:
        return ""


def decoding(url: str, run: Run) -> Callable[[], bool]:
    """The server generates answers of the run, which has passed its start-up checks."""

    def now() -> bool:
        if not (run.folder / "run.json").exists():
            return False
        running = samples(get(url, "/metrics/"))
        return any(running[name] for name in running if name.startswith("rollout_running_seq"))

    return now


def require_every_step_and_sample_once(config_file: Path, folder: Path) -> None:
    config = load_config(config_file)
    steps = [line["step"] for line in metric_lines(folder, "loss")]
    assert steps == list(range(1, STEPS + 1))
    samples = read_samples(Path(config.data.train_jsonl), allow_poly=False)
    order = BatchOrder(len(samples), BATCH, RANKS, config.training.seed, config.data.shuffle)
    expected = Counter(
        (step + 1, rank, samples[index].sample_id)
        for step in range(STEPS)
        if channel_for_step(step, config.b_ratio) == "B"
        for rank in range(RANKS)
        for index in order.rank_batch(step, rank)
    )
    logged = logged_answers(folder)
    assert Counter((answer.step, answer.rank, answer.sample_id) for answer in logged) == expected


def pause(most_s: float, attempt: int) -> None:
    """At the first attempt none: the kill follows an event. Later ones wait a random time."""
    threading.Event().wait(random.uniform(0, most_s) if attempt else 0)


RANDOM = [pytest.param(attempt, marks=pytest.mark.nightly) for attempt in range(1, 10)]


@pytest.mark.req("DDP-01", "RUN-01", "SYNC-07", "SYNC-08", "DIST-05")
@pytest.mark.parametrize("attempt", [0, *RANDOM])
def test_a_run_that_is_killed_and_restarted_makes_every_step_once(
    world: World, attempt: int
) -> None:
    config = world.config(f"run{attempt}", [world.spare, world.kept.base_url])
    run = world.start(config)
    wait_until(decoding(world.kept.base_url, run), run.ranks)
    os.kill(world.kept.pid, signal.SIGKILL)
    run.wait_for_steps(1)
    pause(1, attempt)
    run.kill(1)
    for ranks in ((0,), (0, 1)):
        run = world.start(config)
        run.wait_for_steps(1)
        pause(1, attempt)
        run.kill(*ranks)
    run = world.start(config)
    assert run.ranks.wait(RUN_S) == [0, 0], run.ranks.tails()
    require_every_step_and_sample_once(config, run.folder)


@pytest.mark.req("ASYNC-01", "STEP-01", "STEP-02", "RES-07", "RUN-01", "SYNC-09")
def test_an_asynchronous_run_that_is_killed_trains_on_every_share_once(world: World) -> None:
    """Channel B trains on answers of earlier weights. Weights are pushed before every step."""
    window = 2
    config = world.config(
        "async",
        [world.spare],
        stage2_ab={"schedule": {"b_ratio": 0.75}},
        rollout_matching={
            "max_new_tokens": 8,
            "vllm": {"sync": {"mode": "full"}},
            "async_rollout": {"enabled": True, "version_window": window},
        },
    )
    run = world.start(config)
    run.wait_for_steps(3)
    run.kill(0, 1)
    run = world.start(config)
    assert run.ranks.wait(RUN_S) == [0, 0], run.ranks.tails()

    steps = run.steps()
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert all(line["sync/pushes"] == 1 for line in steps)
    trained = [line for line in steps if line["step/channel_b"]]
    assert trained
    for line in trained:
        assert line["stage2_ab/async/version_lag"] <= window
        assert line["packing/post_rollout_segments"] == BATCH
    checkpoint = newest_checkpoint(run.folder)
    assert checkpoint is not None
    assert checkpoint.manifest.states == [{"next": STEPS, "left": []}] * RANKS
    answers = logged_answers(run.folder)
    assert len({answer.sample_id for answer in answers}) == len(answers) == len(trained) * BATCH
    assert all(len(set(answer.weights_version)) == 1 for answer in answers)
