"""A call of one request beside a large one, on a real engine."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.contract.running_server import (
    PROMPT,
    RunningServer,
    response_ids,
    running_server,
    text_request,
)

pytestmark = pytest.mark.slow

LARGE = 256


def outstanding(server: RunningServer) -> float:
    """Sequences that are not answered yet."""
    return sum(
        float(line.split()[-1])
        for line in server.http.get("/metrics/").text.splitlines()
        if line.startswith(("rollout_running_sequences{", "rollout_waiting_sequences{"))
    )


@pytest.mark.req("SRV-02", "SEED-02")
def test_a_call_of_one_is_answered_before_a_tenth_of_a_large_one(
    tied: Path, tmp_path: Path
) -> None:
    """And both greedily as they are alone."""
    many = [text_request(f"{PROMPT} {number}") for number in range(LARGE)]
    with (
        running_server(tied, tmp_path, "--max-num-seqs", "4") as server,
        ThreadPoolExecutor(1) as threads,
    ):
        large = threads.submit(server.infer, many, max_tokens=64)
        server.wait_for_sequences(lambda running: running == 4)
        (one,) = server.infer([text_request()], max_tokens=8)
        assert outstanding(server) > 0.9 * LARGE
        answers = [response_ids(envelope) for envelope in large.result()]
        assert outstanding(server) == 0
        (alone,) = server.infer([text_request()], max_tokens=8)
        assert response_ids(one) == response_ids(alone)
        few = server.infer(many[::64], max_tokens=64)
        assert [response_ids(envelope) for envelope in few] == answers[::64]
