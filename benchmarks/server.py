"""The rollout server against its peers and its limits, in one run.

    .venv/bin/python -m benchmarks.server [--only NAME ...] [--rounds N] [--out FILE.json]

in-process   tokens/s of /infer/ over AsyncLLM in a program of its own, text and images
swift        tokens/s of four concurrent clients over ms-swift's `swift rollout`
guard        time the repeat guard adds to a decode step of 256 sequences

Every engine is one vLLM on the CPU with the same settings and the same toy checkpoint, and
answers greedily; a round is one batch of new prompts on each side in turn. Prints the table
of docs/evidence.md.
"""

from functools import cached_property
from pathlib import Path

import yaml

from benchmarks.checkpoint import make_checkpoint
from benchmarks.command import Bench, run
from benchmarks.guard import guard_results, guarded_settings
from benchmarks.processes import Peer, PeerFailed
from benchmarks.results import Result
from benchmarks.throughput import (
    UnequalWork,
    compare,
    in_process_side,
    rollout_side,
)
from benchmarks.workload import engine_settings
from learner.rollout.server_process import ServerProcess, free_ports
from rollout_server.engines.vllm import environment as engine_environment
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import ContractError

IN_PROCESS_GOAL = 0.97
SWIFT_GOAL = 2.0
SERVER_TIMEOUT_S = 600.0


class ServerBench(Bench):
    """Checkpoint and our own server: made when first needed."""

    @cached_property
    def checkpoint(self) -> Path:
        return make_checkpoint(self.folder)

    @cached_property
    def server(self) -> ServerProcess:
        config = self.folder / "server.yaml"
        settings = engine_settings(self.checkpoint).model_dump(mode="json", exclude_unset=True)
        config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        process = ServerProcess(["--config", str(config)], self.folder / "server.log")
        self.stack.enter_context(process)
        process.wait_until_healthy(SERVER_TIMEOUT_S)
        return process

    def peer(self, name: str, settings: ServerSettings, *args: str) -> Peer:
        """`benchmarks.peers.NAME`, with the environment of `settings`; piped without `args`."""
        module, log = f"benchmarks.peers.{name}", self.folder / f"{name}.log"
        environment = engine_environment(settings)
        return Peer(module, [str(self.checkpoint), *args], log, environment, piped=not args)


def in_process(bench: ServerBench) -> list[Result]:
    ours = rollout_side(bench.server.base_url)
    with bench.peer("in_process", engine_settings(bench.checkpoint)) as peer:
        peer.read_line()
        sides = ours, in_process_side(peer)
        return [
            compare(
                f"`/infer/` over in-process AsyncLLM, {kind}",
                sides,
                bench.rounds,
                IN_PROCESS_GOAL,
                with_image,
            )
            for kind, with_image in (("text", False), ("image", True))
        ]


def swift(bench: ServerBench) -> list[Result]:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with bench.peer("swift_rollout", engine_settings(bench.checkpoint), str(port)) as peer:
        peer.wait_until_healthy(f"{url}/health/")
        sides = rollout_side(bench.server.base_url, calls=4), rollout_side(url, calls=4)
        name = "four clients over `swift rollout`, text"
        return [compare(name, sides, bench.rounds, SWIFT_GOAL, False, same_template=False)]


def guard(bench: ServerBench) -> list[Result]:
    with bench.peer("guard_steps", guarded_settings(bench.checkpoint)) as peer:
        peer.read_line()
        return guard_results(peer, bench.rounds)


PARTS = {
    "in-process": in_process,
    "swift": swift,
    "guard": guard,
}


if __name__ == "__main__":
    errors = (ContractError, PeerFailed, UnequalWork)
    run("server", __doc__, PARTS, rounds=5, errors=errors, make_bench=ServerBench)
