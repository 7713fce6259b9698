"""A server under attack: how it answers others meanwhile, and what it is afterwards.

    .venv/bin/python -m benchmarks.reliability.attack [--seconds N] [--only NAME]

One server with two replicas of the toy model and the repeat guard; its own process may have
ROOM_GIB more of addresses than it has at the start. Each of the attacks of `attacks.py` runs for 60
seconds, in a process of its own; then the server is stopped and continued (SIGSTOP) for 75.
Meanwhile `/live/` is asked five times a second, and an innocent call for a short text is made again
and again. Prints the table of docs/reliability.md; ends with code 1 where an engine was lost, the
weights are in doubt, an answer is another than before, or something was left.
"""

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.checkpoint import make_checkpoint
from benchmarks.processes import holdings
from benchmarks.reliability.attacks import ATTACKS, JSON, infer
from benchmarks.reliability.samples import Held, held_by, percentile
from benchmarks.reliability.servers import (
    ANSWER_S,
    GUARD,
    SETTLE_S,
    START_S,
    greedy_tokens,
    start_server,
)
from learner.rollout.server_process import ServerProcess

ROOM_GIB = 8
STOPPED_S = 75.0
MOST_GROWTH_PERCENT = 2.0
# Files and threads that come and go: a connection that is being closed, a pool's next thread.
SLACK = 4


@dataclass
class Seen:
    """What others saw of a server for a while: milliseconds of answers, its largest memory."""

    live_ms: list[float] = field(default_factory=list)
    call_ms: list[float] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    peak_mib: float = 0.0


def watch(server: ServerProcess, seconds: float) -> Seen:
    """Ask as an innocent does, until the time is over."""
    seen, over = Seen(), threading.Event()

    def ask(method: str, path: str, body: bytes | None, into: list[float], pause_s: float) -> None:
        with httpx.Client(base_url=server.base_url, timeout=ANSWER_S, trust_env=False) as http:
            while not over.is_set():
                began = time.monotonic()
                try:
                    answer = http.request(method, path, content=body, headers=JSON)
                    seen.statuses.append(answer.status_code)
                except httpx.TransportError:
                    seen.statuses.append(0)
                into.append(1000 * (time.monotonic() - began))
                over.wait(pause_s)

    def weigh() -> None:
        while not over.wait(0.5):
            seen.peak_mib = max(seen.peak_mib, holdings(server.pid).resident_kib / 1024)

    threads = [
        threading.Thread(target=ask, args=("GET", "/live/", None, seen.live_ms, 0.2)),
        threading.Thread(target=ask, args=("POST", "/infer/", infer("hi"), seen.call_ms, 0.1)),
        threading.Thread(target=weigh),
    ]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    over.set()
    for thread in threads:
        thread.join()
    return seen


def under(name: str, server: ServerProcess, seconds: float) -> tuple[Seen, dict[str, int]]:
    """What others saw while an attack ran, and what came of the attack."""
    address = server.base_url.removeprefix("http://").split(":")
    command = [sys.executable, "-m", "benchmarks.reliability.attacks", name, *address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attacker:
        try:
            seen = watch(server, seconds)
        finally:
            attacker.terminate()
        told, _ = attacker.communicate(timeout=60)
    return seen, json.loads(told)


def quiet(server: ServerProcess) -> dict[str, Held]:
    time.sleep(SETTLE_S)
    return held_by(server.pid, "server")


def left_by(before: dict[str, Held], after: dict[str, Held]) -> list[str]:
    """What is held after an attack and was not before, by process."""
    faults = [] if before.keys() == after.keys() else [f"processes: {sorted(after)}"]
    for name in before.keys() & after.keys():
        was, has = before[name], after[name]
        if has.rss_mib > was.rss_mib * (1 + MOST_GROWTH_PERCENT / 100):
            faults.append(f"{name} {100 * (has.rss_mib / was.rss_mib - 1):+.1f} % memory")
        for kind in ("threads", "sockets", "other_files"):
            if getattr(has, kind) > getattr(was, kind) + SLACK:
                faults.append(f"{name} {getattr(was, kind)} -> {getattr(has, kind)} {kind}")
    return faults


def state_of(server: ServerProcess) -> tuple[str, str]:
    """Whether the server is ready, and its epoch, which changes where an engine is lost."""
    with httpx.Client(base_url=server.base_url, timeout=ANSWER_S, trust_env=False) as http:
        return str(http.get("/health/").status_code), http.get("/live/").json()["server_epoch"]


def row(name: str, seen: Seen, alone: Seen, answers: dict[str, int], faults: list[str]) -> str:
    slower = statistics.median(seen.call_ms) / statistics.median(alone.call_ms)
    cells = [
        name,
        ", ".join(f"{told} x {number:,}" for told, number in sorted(answers.items())) or "-",
        f"{percentile(seen.live_ms, 50):.0f} / {percentile(seen.live_ms, 99):.0f}",
        f"{percentile(seen.call_ms, 50):.0f} / {percentile(seen.call_ms, 99):.0f} ({slower:.1f} x)",
        f"{seen.peak_mib - alone.peak_mib:+.0f}",
        ", ".join(faults) or "nothing",
    ]
    return f"| {' | '.join(cells)} |"


def stopped(server: ServerProcess, seconds: float) -> None:
    """The server stands still, and its engines with it or not, as after a laptop's sleep."""
    os.kill(server.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(server.pid, signal.SIGCONT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", choices=ATTACKS, nargs="*", default=list(ATTACKS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder))
        more = {"replicas": 2, "repeat_terminate": GUARD.model_dump()}
        with start_server("attacked", checkpoint, Path(folder), **more) as server:
            server.wait_until_healthy(START_S)
            return attack(server, options.only, options.seconds)


def attack(server: ServerProcess, names: list[str], seconds: float) -> int:
    bound = holdings(server.pid).virtual_kib * 1024 + ROOM_GIB * 2**30
    resource.prlimit(server.pid, resource.RLIMIT_AS, (bound, bound))
    tokens, (_, epoch) = greedy_tokens(server.base_url), state_of(server)
    alone = watch(server, max(seconds / 3, 5.0))
    before, failed = quiet(server), 0
    heads = ["attack", "its answers", "`/live/` p50 / p99, ms", "an innocent call p50 / p99, ms"]
    print(f"| {' | '.join([*heads, 'memory, MiB', 'left'])} |\n|---|---|---|---|---|---|")
    print(row("none", alone, alone, {}, []), flush=True)

    def judged(name: str, seen: Seen, answers: dict[str, int]) -> None:
        nonlocal failed
        faults = left_by(before, quiet(server))
        if state_of(server) != ("200", epoch):
            faults.append(f"state {state_of(server)}")
        if greedy_tokens(server.base_url) != tokens:
            faults.append("other answers")
        if wrong := {status for status in seen.statuses if status != 200}:
            faults.append(f"innocent calls were answered {sorted(wrong)}")
        failed += bool(faults)
        print(row(name, seen, alone, answers, faults), flush=True)

    for name in names:
        judged(name, *under(name, server, seconds))
    stopped(server, min(STOPPED_S, seconds * 1.25))
    judged("stopped and continued", watch(server, 10.0), {})
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
