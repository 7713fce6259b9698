"""The rollout server against its peers and its limits, in one run.

    .venv/bin/python -m benchmarks.server [--only NAME ...] [--rounds N] [--out FILE.json]

in-process   tokens/s of /infer/ over AsyncLLM in a program of its own, text and images
swift        tokens/s of four concurrent clients over ms-swift's `swift rollout`
openai       tokens/s of /infer/ over vLLM's own OpenAI server, text and images
chat         tokens/s of chat completions of both, text, images and streams
guard        time the repeat guard adds to a decode step of 256 sequences
live         how long /live/ takes while 64 sequences decode
calls        memory, open files and threads after 1,000 calls

Every engine is one vLLM on the CPU with the same settings and the same toy checkpoint, and
answers greedily; a round is one batch of new prompts on each side in turn. Prints the table
of docs/benchmarks.md.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path

import yaml

from benchmarks.checkpoint import make_checkpoint
from benchmarks.command import run
from benchmarks.guard import guard_results, guarded_settings
from benchmarks.http_client import HttpClient
from benchmarks.processes import Peer, PeerFailed
from benchmarks.results import Result
from benchmarks.steadiness import hold_nothing_back, probe_under_load
from benchmarks.throughput import (
    UnequalWork,
    compare,
    in_process_side,
    openai_side,
    rollout_side,
)
from benchmarks.workload import engine_settings
from learner.rollout.server_process import ServerProcess, free_ports
from rollout_server.engines.vllm import environment as engine_environment
from rollout_server.settings.options import ServerSettings
from shared_contracts.errors import ContractError

IN_PROCESS_GOAL = 0.97
SWIFT_GOAL = 2.0
OPENAI_GOAL = 1.1
CHAT_GOAL = 0.97
SERVER_TIMEOUT_S = 600.0
KINDS = (("text", False), ("image", True))


class Bench:
    """Checkpoint, our own server and the HTTP client: made when first needed.

    stack: where what has been started is ended.
    """

    def __init__(self, folder: Path, rounds: int, stack: ExitStack) -> None:
        self.rounds = rounds
        self._folder = folder
        self._stack = stack

    @cached_property
    def checkpoint(self) -> Path:
        return make_checkpoint(self._folder)

    @cached_property
    def client(self) -> HttpClient:
        return self._stack.enter_context(HttpClient())

    @cached_property
    def server(self) -> ServerProcess:
        config = self._folder / "server.yaml"
        served = engine_settings(self.checkpoint).model_copy(update={"openai": True})
        settings = served.model_dump(mode="json", exclude_unset=True)
        config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        process = ServerProcess(["--config", str(config)], self._folder / "server.log")
        self._stack.enter_context(process)
        process.wait_until_healthy(SERVER_TIMEOUT_S)
        return process

    @contextmanager
    def peer(self, name: str, health: str) -> Iterator[str]:
        """Base URL of the HTTP server `benchmarks.peers.NAME` while the block runs."""
        (port,) = free_ports(1)
        settings = engine_settings(self.checkpoint)
        with self._start(name, settings, [str(port)], piped=False) as peer:
            peer.wait_until_healthy(f"http://127.0.0.1:{port}{health}")
            yield f"http://127.0.0.1:{port}"

    @contextmanager
    def piped_peer(self, name: str, settings: ServerSettings) -> Iterator[Peer]:
        """`benchmarks.peers.NAME`, which has said that it is ready, while the block runs.

        settings: whose environment it gets.
        """
        with self._start(name, settings, [], piped=True) as peer:
            peer.hear()
            yield peer

    def _start(self, name: str, settings: ServerSettings, args: list[str], piped: bool) -> Peer:
        return Peer(
            f"benchmarks.peers.{name}",
            [str(self.checkpoint), *args],
            self._folder / f"{name}.log",
            engine_environment(settings),
            piped,
        )


def in_process(bench: Bench) -> list[Result]:
    ours = rollout_side(bench.client, bench.server.base_url)
    with bench.piped_peer("in_process", engine_settings(bench.checkpoint)) as peer:
        theirs = in_process_side(peer)
        return [
            compare(
                f"`/infer/` over in-process AsyncLLM, {kind}",
                (ours, theirs),
                bench.rounds,
                IN_PROCESS_GOAL,
                with_image,
            )
            for kind, with_image in KINDS
        ]


def swift(bench: Bench) -> list[Result]:
    with bench.peer("swift_rollout", "/health/") as url:
        sides = [rollout_side(bench.client, u, calls=4) for u in (bench.server.base_url, url)]
        name = "four clients over `swift rollout`, text"
        result = compare(
            name, (sides[0], sides[1]), bench.rounds, SWIFT_GOAL, False, same_template=False
        )
        return [result]


def openai(bench: Bench) -> list[Result]:
    ours = rollout_side(bench.client, bench.server.base_url)
    with bench.peer("openai_server", "/health") as url:
        theirs = openai_side(bench.client, url, str(bench.checkpoint))
        return [
            compare(
                f"`/infer/` over vLLM's OpenAI server, {kind}",
                (ours, theirs),
                bench.rounds,
                OPENAI_GOAL,
                with_image,
            )
            for kind, with_image in KINDS
        ]


def chat(bench: Bench) -> list[Result]:
    model = str(bench.checkpoint)
    with bench.peer("openai_server", "/health") as url:
        kinds = [("text", False, False), ("image", True, False), ("text, streamed", False, True)]
        return [
            compare(
                f"chat completions over vLLM's OpenAI server, {kind}",
                (
                    openai_side(bench.client, bench.server.base_url, model, stream),
                    openai_side(bench.client, url, model, stream),
                ),
                bench.rounds,
                CHAT_GOAL,
                with_image,
            )
            for kind, with_image, stream in kinds
        ]


def guard(bench: Bench) -> list[Result]:
    settings = guarded_settings(bench.checkpoint)
    with bench.piped_peer("guard_steps", settings) as peer:
        return guard_results(peer, bench.rounds)


def live(bench: Bench) -> list[Result]:
    return [probe_under_load(bench.server.base_url, bench.rounds)]


def calls(bench: Bench) -> list[Result]:
    return hold_nothing_back(bench.server.base_url, bench.server.pid)


PARTS = {
    "in-process": in_process,
    "swift": swift,
    "openai": openai,
    "chat": chat,
    "guard": guard,
    "live": live,
    "calls": calls,
}


def main() -> None:
    assert __doc__ is not None
    errors = (ContractError, PeerFailed, UnequalWork)
    run("server", __doc__, PARTS, Bench, rounds=5, errors=errors)


if __name__ == "__main__":
    main()
