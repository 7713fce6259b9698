"""An hour of load on two servers and a learner, and what they hold by its end.

    .venv/bin/python -m benchmarks.reliability.load [--minutes N] [--samples FILE.jsonl]
        [--image FILE.png]
    .venv/bin/python -m benchmarks.reliability.load --read FILE.jsonl [--image FILE.png]

One server gets all weights every minute; the other, whose repeat guard is on, gets the adapter
alone. Four clients call each of them (see `clients.py`). Every ten seconds memory, files and
threads of all processes are read, and the latencies since the last look. A quarter into the run and
at its end the clients pause, and what is held without any call is compared. In the end the first
weights are pushed again, and the answers must be those of the beginning.

--read draws and tells again what an earlier run has left. Prints the tables of docs/reliability.md;
ends with code 1 when an answer was not what it had to be, or something grew.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks.checkpoint import make_checkpoint
from benchmarks.processes import Peer
from benchmarks.reliability.clients import MAX_BODY_MIB, Client, Notes
from benchmarks.reliability.picture import picture
from benchmarks.reliability.samples import WARM_UP, Held, Sample, held_by
from benchmarks.reliability.servers import (
    GUARD,
    SETTLE_S,
    START_S,
    greedy_tokens,
    start_server,
)
from benchmarks.reliability.tables import Outcome, tell

CLIENTS = 4
EVERY_S = 10.0
PUSH_EVERY_S = 60.0
PROBE_EVERY_S = 0.2
SERVERS: dict[str, dict[str, Any]] = {
    "full": {},
    "adapter": {"enable_lora": True, "repeat_terminate": GUARD.model_dump()},
}


class Load:
    """Servers, learner and clients of a run; `stack` ends them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        checkpoint = make_checkpoint(folder)
        self._servers = {
            name: stack.enter_context(
                start_server(name, checkpoint, folder, max_body_mib=MAX_BODY_MIB, **more)
            )
            for name, more in SERVERS.items()
        }
        for server in self._servers.values():
            server.wait_until_healthy(START_S)
        self._urls = {name: server.base_url for name, server in self._servers.items()}
        self._learner = stack.enter_context(
            Peer(
                "benchmarks.reliability.pusher",
                [str(checkpoint), *self._urls.values()],
                folder / "learner.log",
                {"OMP_NUM_THREADS": "1"},
                piped=True,
            )
        )
        self._learner.hear()
        self._gate, self._over = threading.Event(), threading.Event()
        self._notes = Notes()
        self._live_ms: list[float] = []
        self._live_lock = threading.Lock()
        self._push_s: list[float] = []
        self._http = stack.enter_context(httpx.Client(timeout=30, trust_env=False))
        self._clients = [
            Client(url, seed, self._notes, self._gate)
            for n, url in enumerate(self._urls.values())
            for seed in range(CLIENTS * n + 1, CLIENTS * n + CLIENTS + 1)
        ]
        for client in self._clients:
            client.start()

    def run(self, seconds: float, samples: Path) -> Outcome:
        self._push("forget")
        answers = self._answers()
        quiet: list[dict[str, Held]] = []
        began = time.monotonic()
        with samples.open("w", encoding="utf-8") as out, ThreadPoolExecutor(2) as pool:
            beside = [pool.submit(work) for work in (self._push_on, self._probe_on)]
            self._gate.set()
            print("the load begins", flush=True)
            while (now := time.monotonic() - began) < seconds:
                if not quiet and now >= WARM_UP * seconds:
                    quiet.append(self._look_in_peace())
                sample = self._look(time.monotonic() - began)
                print(json.dumps(sample.json()), file=out, flush=True)
                time.sleep(max(0.0, EVERY_S - (time.monotonic() - began) % EVERY_S))
            self._over.set()
            for work in beside:
                if error := work.exception():
                    self._notes.count("beside the clients", repr(error))
            quiet.append(self._look_in_peace(for_good=True))
            self._push("forget")
            outcome = Outcome(
                counts=dict(self._notes.counts),
                wrong=self._notes.wrong,
                push_seconds=self._push_s,
                quiet=(quiet[0], quiet[1]),
                health={name: self._health(name) for name in self._urls},
                same_answers=self._answers() == answers,
            )
            print(json.dumps({"outcome": outcome.json()}), file=out)
        return outcome

    # --- looks

    def _look(self, seconds: float) -> Sample:
        with self._live_lock:
            live_ms, self._live_ms = self._live_ms, []
        return Sample(
            seconds=seconds,
            held=self._held(),
            health={name: self._health(name) for name in self._urls},
            live_ms=tuple(live_ms),
            infer_ms=tuple(self._notes.take_infer_ms()),
            counts=dict(self._notes.counts),
            pushes=len(self._push_s),
        )

    def _held(self) -> dict[str, Held]:
        held: dict[str, Held] = {}
        for name, server in self._servers.items():
            held |= held_by(server.pid, f"{name} server")
        return held | held_by(self._learner.pid, "learner")

    def _look_in_peace(self, for_good: bool = False) -> dict[str, Held]:
        """What is held while no client calls."""
        self._gate.clear()
        for client in self._clients:
            client.idle.wait()
        time.sleep(SETTLE_S)
        held = self._held()
        if not for_good:
            self._gate.set()
        return held

    def _health(self, name: str) -> int:
        return self._http.get(self._urls[name] + "/health/").status_code

    def _answers(self) -> list[list[list[int]]]:
        return [greedy_tokens(url) for url in self._urls.values()]

    # --- what goes on beside the clients

    def _push(self, word: str) -> None:
        self._learner.say(word)
        self._push_s.append(max(json.loads(self._learner.hear())["seconds"]))

    def _push_on(self) -> None:
        while not self._over.wait(PUSH_EVERY_S):
            self._push("train")

    def _probe_on(self) -> None:
        """`GET /live/` of one server after the other, each on a kept connection."""
        with httpx.Client(timeout=30, trust_env=False) as http:
            while not self._over.wait(PROBE_EVERY_S):
                for url in self._urls.values():
                    began = time.perf_counter()
                    http.get(url + "/live/").raise_for_status()
                    milliseconds = 1000 * (time.perf_counter() - began)
                    with self._live_lock:
                        self._live_ms.append(milliseconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--samples", type=Path, default=Path("runs/load.jsonl"))
    parser.add_argument("--read", type=Path, help="samples of an earlier run")
    parser.add_argument("--image", type=Path)
    options = parser.parse_args()
    file: Path = options.read or options.samples
    if not options.read:
        file.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            Load(folder, stack).run(60 * options.minutes, file)
    *lines, last = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    samples, outcome = [Sample.read(line) for line in lines], Outcome.read(last["outcome"])
    if options.image:
        options.image.write_bytes(picture(samples))
    sys.exit(tell(samples, outcome))


if __name__ == "__main__":
    main()
