"""A call of one request beside a large one, on a real engine."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.contract.running_server import (
    PROMPT,
    response_ids,
    running_server,
    text_request,
)

pytestmark = pytest.mark.slow

LARGE = 256


def answered_at(envelope: dict[str, Any]) -> int:
    """In whole seconds."""
    second: int = envelope["response"]["created"]
    return second


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
        envelopes = large.result()
        before = [a for a in envelopes if answered_at(a) < answered_at(one)]
        assert len(before) < 0.1 * LARGE
        answers = [response_ids(envelope) for envelope in envelopes]
        (alone,) = server.infer([text_request()], max_tokens=8)
        assert response_ids(one) == response_ids(alone)
        few = server.infer(many[::64], max_tokens=64)
        assert [response_ids(envelope) for envelope in few] == answers[::64]
