"""What a server owes besides speed: probes answered under load, nothing left behind."""

import itertools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from benchmarks.processes import Holdings, holdings, name_of, tree
from benchmarks.results import Result
from benchmarks.workload import infer_call, make_scenes

LIVE_GOAL_MS = 50.0
LIVE_TOKENS = 512
GROWTH_GOAL_PERCENT = 2.0
CALLS = 1000

# oneDNN keeps a compiled kernel for each size of batch the engine has met, up to a limit:
# the memory of an engine on the CPU grows until it has met most of them.
WARM_UP_CALLS = 2000
CLIENTS = 4
SETTLE_S = 3.0


def probe_under_load(base_url: str, rounds: int) -> Result:
    """Milliseconds a `GET /live/` takes while 64 sequences decode; p99 over all rounds."""
    samples = [_probe_once(base_url, number) for number in range(rounds)]
    pooled = list(itertools.chain.from_iterable(samples))
    return Result(
        "`/live/` while 64 sequences decode, p99",
        _p99(pooled),
        tuple(_p99(values) for values in samples),
        LIVE_GOAL_MS,
        at_least=False,
        unit=" ms",
        detail=f"max {max(pooled):.1f} ms, median {statistics.median(pooled):.1f} ms, "
        f"{len(pooled)} probes in {rounds} rounds",
    )


def _probe_once(base_url: str, number: int) -> list[float]:
    """A probe every 5 ms for as long as one call of 64 sequences runs."""
    body = infer_call(make_scenes(1000 + number, 64, with_image=False), LIVE_TOKENS)
    milliseconds = []
    with ThreadPoolExecutor(1) as pool, _client(base_url) as load, _client(base_url) as probe:
        probe.get("/live/")
        call = pool.submit(load.post, "/infer/", json=body)
        while not call.done():
            began = time.perf_counter()
            probe.get("/live/").raise_for_status()
            milliseconds.append(1000 * (time.perf_counter() - began))
            time.sleep(0.005)
        call.result().raise_for_status()
    return milliseconds


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def hold_nothing_back(base_url: str, server_pid: int) -> list[Result]:
    """What the server's processes hold after 1,000 calls, compared with before them."""
    _make_calls(base_url, WARM_UP_CALLS)
    before = _look(server_pid)
    _make_calls(base_url, CALLS)
    after = _look(server_pid)
    if before.keys() != after.keys():
        raise RuntimeError(f"the server's processes changed: {before.keys()} {after.keys()}")
    growth = {pid: 100 * (after[pid].resident_kib / before[pid].resident_kib - 1) for pid in before}
    files = sum(after[pid].files - before[pid].files for pid in before)
    threads = sum(after[pid].threads - before[pid].threads for pid in before)
    processes = ", ".join(
        f"{_role(pid)} {before[pid].resident_kib / 1024:.0f} MiB {growth[pid]:+.2f} %"
        for pid in before
    )
    return [
        Result(
            f"resident memory after {CALLS:,} calls, growth of the process that grew most",
            max(growth.values()),
            (max(growth.values()),),
            GROWTH_GOAL_PERCENT,
            at_least=False,
            unit=" %",
            detail=processes,
        ),
        _none_left("open files", files, f"{sum(h.files for h in after.values())} open"),
        _none_left("threads", threads, f"{sum(h.threads for h in after.values())} running"),
        _none_left("calls in flight", _calls_in_flight(base_url), "by `/metrics/`"),
    ]


def _none_left(what: str, count: float, detail: str) -> Result:
    name = f"{what} more than before those calls"
    return Result(name, count, (count,), 0, at_least=False, detail=detail)


def _make_calls(base_url: str, count: int) -> None:
    """Calls of four requests, half with an image, by four clients; every tenth is refused."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(_make_some, [base_url] * CLIENTS, [count // CLIENTS] * CLIENTS))


def _make_some(base_url: str, count: int) -> None:
    with _client(base_url) as client:
        for number in range(count):
            body, expected = _small_call(number)
            answer = client.post("/infer/", json=body)
            if answer.status_code != expected:
                raise RuntimeError(f"/infer/ said {answer.status_code}: {answer.text}")


def _small_call(number: int) -> tuple[dict[str, Any], int]:
    """(body, status it is answered with)."""
    scenes = make_scenes(number, 2, with_image=True) + make_scenes(number, 2, with_image=False)
    body = infer_call(scenes, tokens=8)
    if number % 10 == 9:
        body["infer_requests"][1]["images"] = ["data:image/png;base64,bm8="]
        return body, 422
    return body, 200


def _look(server_pid: int) -> dict[int, Holdings]:
    """By process, once closed connections are gone."""
    time.sleep(SETTLE_S)
    return {pid: holdings(pid) for pid in tree(server_pid)}


def _role(pid: int) -> str:
    return "engine" if "EngineCore" in name_of(pid) else "server"


def _calls_in_flight(base_url: str) -> float:
    with _client(base_url) as client:
        lines = client.get("/metrics/").raise_for_status().text.splitlines()
    (line,) = (line for line in lines if line.startswith("rollout_calls_in_flight "))
    return float(line.split()[1])


def _client(base_url: str) -> httpx.Client:
    return httpx.Client(base_url=base_url, timeout=600, trust_env=False)
