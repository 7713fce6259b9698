"""An hour of load on two servers and a learner, and what they hold by its end.

    .venv/bin/python -m benchmarks.reliability.load [--minutes N]

One server gets all weights every minute; the other, whose repeat guard is on, gets the adapter
alone. Four clients call each of them (see `clients.py`). A quarter into the run and at its end the
clients pause, and what is held without any call is compared. In the end the first weights are
pushed again, and the answers must be those of the beginning.

Prints the tables of docs/evidence.md; ends with code 1 when an answer was not what it had to be, or
something grew.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.checkpoint import make_checkpoint
from benchmarks.processes import Peer
from benchmarks.reliability.clients import MAX_BODY_MIB, Client, Notes
from benchmarks.reliability.servers import (
    GUARD,
    START_S,
    Held,
    greedy_tokens,
    held_table,
    held_without_calls,
    start_server,
)

CLIENTS = 4
PUSH_EVERY_S = 60.0
PROBE_EVERY_S = 0.2
# The first quarter of a run warms up: caches and the kernels of every size of batch.
WARM_UP = 1 / 4
SERVERS: dict[str, dict[str, Any]] = {
    "full server": {},
    "adapter server": {"enable_lora": True, "repeat_terminate": GUARD.model_dump()},
}


class Load:
    """Servers, learner and clients of a run; `stack` ends them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        checkpoint = make_checkpoint(folder)
        servers = {
            name: stack.enter_context(
                start_server(name, checkpoint, folder, max_body_mib=MAX_BODY_MIB, **more)
            )
            for name, more in SERVERS.items()
        }
        for server in servers.values():
            server.wait_until_healthy(START_S)
        self._urls = [server.base_url for server in servers.values()]
        self._learner = stack.enter_context(
            Peer(
                "benchmarks.reliability.pusher",
                [str(checkpoint), *self._urls],
                folder / "learner.log",
                {"OMP_NUM_THREADS": "1"},
                piped=True,
            )
        )
        self._learner.read_line()
        self._pids = {name: server.pid for name, server in servers.items()}
        self._pids["learner"] = self._learner.pid
        self._gate, self._over = threading.Event(), threading.Event()
        self._notes = Notes()
        self._live_ms: list[float] = []
        self._push_s: list[float] = []
        self._clients = [
            Client(url, 1 + CLIENTS * n + m, self._notes, self._gate)
            for n, url in enumerate(self._urls)
            for m in range(CLIENTS)
        ]
        for client in self._clients:
            client.start()

    def run(self, seconds: float) -> int:
        """Print the tables; return 1 if something was wrong."""
        self._push("forget")
        answers = [greedy_tokens(url) for url in self._urls]
        began = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            beside = [pool.submit(work) for work in (self._push_on, self._probe_on)]
            self._gate.set()
            print("the load begins", flush=True)
            time.sleep(WARM_UP * seconds)
            before = self._held_in_peace()
            self._gate.set()
            time.sleep(max(0.0, began + seconds - time.monotonic()))
            self._over.set()
            errors = [work.exception() for work in beside]
        after = self._held_in_peace()
        self._push("forget")
        faults = [*self._notes.wrong, *(repr(error) for error in errors if error)]
        if [greedy_tokens(url) for url in self._urls] != answers:
            faults.append("the first weights answer otherwise than at the beginning")
        print("\n| calls | |\n|---|---|")
        for kind, number in sorted(self._notes.counts.items()):
            print(f"| {kind} | {number:,} |")
        print("\n" + held_table(before, after, faults))
        print("\n| answers | p50 | p99 | longest | number |\n|---|---|---|---|---|")
        print(_latencies("`GET /live/`", self._live_ms))
        print(_latencies("`POST /infer/`", self._notes.infer_ms))
        middle, longest = statistics.median(self._push_s), max(self._push_s)
        print(f"\n{len(self._push_s)} pushes, median {middle:.2f} s, longest {longest:.2f} s")
        print("\n".join(["", f"{len(faults)} faults", *faults]))
        return int(bool(faults))

    def _held_in_peace(self) -> dict[str, Held]:
        """Close the gate, and read what is held while no client calls."""
        self._gate.clear()
        for client in self._clients:
            client.idle.wait()
        return held_without_calls(self._pids)

    def _push(self, word: str) -> None:
        self._push_s.append(max(json.loads(self._learner.ask(word))["seconds"]))

    def _push_on(self) -> None:
        while not self._over.wait(PUSH_EVERY_S):
            self._push("train")

    def _probe_on(self) -> None:
        """`GET /live/` and `GET /health/` of one server after the other, on a kept connection."""
        with httpx.Client(timeout=30, trust_env=False) as http:
            while not self._over.wait(PROBE_EVERY_S):
                for url in self._urls:
                    began = time.perf_counter()
                    http.get(url + "/live/").raise_for_status()
                    self._live_ms.append(1000 * (time.perf_counter() - began))
                    http.get(url + "/health/").raise_for_status()


def _latencies(name: str, values: Sequence[float]) -> str:
    half, most = np.percentile(values, [50, 99])
    return f"| {name} | {half:.1f} ms | {most:.1f} ms | {max(values):.0f} ms | {len(values):,} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        code = Load(folder, stack).run(60 * options.minutes)
    sys.exit(code)


if __name__ == "__main__":
    main()
