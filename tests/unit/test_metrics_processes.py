"""Two real processes combine their metrics over gloo."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.runs.metrics import over_processes
from tests.unit.plain_metrics import KINDS, Atom, payload_of, plain_metrics

ROOT = Path(__file__).parents[2]
Case = tuple[list[Atom], list[Atom]]

MATCHED = "stage2_ab/channel_b/matched"
BY_HAND: Case = (
    [
        Atom(MATCHED, 2, 0),
        Atom("rollout/gen_new_tokens_p99", 30, 0),
        Atom("rollout/parse_truncated_rate", 1, 2),
        Atom("sync/total_s", 4.5, 0),
        Atom("rollout/repeat_terminate_active", 1, 0),
    ],
    [
        Atom(MATCHED, 5, 0),
        Atom("rollout/gen_new_tokens_p99", 80, 0),
        Atom("rollout/parse_truncated_rate", 0, 8),
        Atom("rollout/repeat_terminate_active", 1, 0),
        Atom("loss/B_coord/coord_w1", 0.25, 0),
    ],
)
COMBINED = {
    MATCHED: 7,
    "rollout/gen_new_tokens_p99": 80,
    "rollout/parse_truncated_rate": 0.1,
    "sync/total_s": 4.5,
    "rollout/repeat_terminate_active": 1,
    "loss/B_coord/coord_w1": 0.25,
}


def drawn_cases(count: int) -> list[Case]:
    """Parts of both processes, mostly of keys that only one of them has."""
    draw = random.Random(7)
    keys = list(KINDS)

    def atoms() -> list[Atom]:
        chosen = draw.choices(keys, k=draw.randrange(40))
        return [Atom(key, draw.randrange(10**9), draw.randrange(9)) for key in chosen]

    return [(atoms(), atoms()) for _ in range(count)]


CASES: list[Case] = [BY_HAND, ([], []), ([Atom(MATCHED, 1, 0)], []), *drawn_cases(60)]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process knows once both have combined everything."""
    shared = [str(tmp_path_factory.mktemp("gloo") / "store"), json.dumps(CASES)]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.unit.metrics_process", str(rank), *shared],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.mark.req("MET-01")
def test_counts_add_up_and_the_rest_is_the_highest_whoever_has_the_key(
    told: list[dict[str, Any]],
) -> None:
    for process in told:
        assert process["combined"][0] == pytest.approx(COMBINED)
        assert process["combined"][1] == {}
        assert process["combined"][2] == {MATCHED: 1}


@pytest.mark.req("MET-01")
def test_both_processes_know_what_their_parts_make_together(told: list[dict[str, Any]]) -> None:
    wanted = [plain_metrics(case) for case in CASES]
    assert len(told) == 2
    for process in told:
        assert process["combined"] == [pytest.approx(metrics) for metrics in wanted]


@pytest.mark.req("MET-01")
def test_a_step_reports_the_metrics_of_all_processes(told: list[dict[str, Any]]) -> None:
    """No two processes need the same time, to the last bit, for each phase of a step."""
    first, second = (process["step"] for process in told)
    assert first["time/wait_s"] > 0
    assert first == second


@pytest.mark.req("MET-01")
def test_a_single_process_keeps_its_payload() -> None:
    payload = payload_of(BY_HAND[0])
    assert over_processes(payload, torch.device("cpu")) is payload
