"""Real servers with the toy model, their greedy answers, and what their processes hold."""

import time
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml

from benchmarks.processes import tree
from benchmarks.workload import engine_settings, infer_call, make_scenes
from learner.rollout.server_process import ServerProcess
from shared_contracts.repeat_guard import RepeatTerminateConfig

START_S = 1200.0
# The server closes connections without a call after five seconds.
SETTLE_S = 12.0
GUARD = RepeatTerminateConfig(
    enabled=True, min_new_tokens=4, max_consecutive_token_repeats=4, ngram_size=2, ngram_repeats=5
)
MOST_GROWTH_PERCENT = 2.0


def start_server(name: str, checkpoint: Path, folder: Path, **more: Any) -> ServerProcess:
    """more: settings beside those of every benchmark. It is not healthy yet."""
    settings = engine_settings(checkpoint).model_dump(mode="json", exclude_unset=True)
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(settings | more), encoding="utf-8")
    return ServerProcess(["--config", str(config)], folder / f"{name}.log")


def greedy_tokens(base_url: str) -> list[list[int]]:
    """Answers to four prompts with an image and four without; the same with the same weights."""
    scenes = make_scenes(1, 4, with_image=True) + make_scenes(2, 4, with_image=False)
    body = infer_call(scenes, tokens=32)
    with httpx.Client(base_url=base_url, timeout=300, trust_env=False) as http:
        envelopes = http.post("/infer/", json=body).raise_for_status().json()
    return [envelope["response"]["choices"][0]["token_ids"] for envelope in envelopes]


class Held(NamedTuple):
    """Resident memory, threads, and open files (with sockets) of a process."""

    rss_mib: float
    threads: int
    files: int


def held_without_calls(roots: dict[str, int]) -> dict[str, Held]:
    """Resources by process of each tree: `NAME`, `NAME engine`, and helpers by number.

    roots: pids by name.
    """
    time.sleep(SETTLE_S)
    found = {}
    for name, root in roots.items():
        numbers = count(1)
        for process in tree(root):
            engine = "EngineCore" in " ".join(process.cmdline())
            role = "" if process.pid == root else " engine" if engine else f" {next(numbers)}"
            rss = process.memory_info().rss / 2**20
            found[name + role] = Held(rss, process.num_threads(), process.num_fds())
    return found


def held_table(before: dict[str, Held], after: dict[str, Held], faults: list[str]) -> str:
    """Both, as a table; `faults` gets each process that grew, ended or is new."""
    rows = ["| process | RSS | threads | open files |", "|---|---|---|---|"]
    faults += [f"{name} was there only once" for name in before.keys() ^ after.keys()]
    for name in (name for name in before if name in after):
        was, now = before[name], after[name]
        grown = 100 * (now.rss_mib / was.rss_mib - 1)
        rows.append(
            f"| {name} | {was.rss_mib:.1f} -> {now.rss_mib:.1f} MiB, {grown:+.2f} % "
            f"| {was.threads} -> {now.threads} | {was.files} -> {now.files} |"
        )
        if grown > MOST_GROWTH_PERCENT or now.threads > was.threads or now.files > was.files:
            faults.append(f"{name} grew: {was} -> {now}")
    return "\n".join(rows)
