"""Two replicas behind one port: load, pushes, deaths and hangs."""

import os
import signal
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from learner.rollout.client import RolloutClient
from shared_contracts.server_info import TOKEN_VARIABLE
from tests.contract.running_server import (
    PROMPT,
    RunningServer,
    children,
    environment_of,
    response_ids,
    running_server,
    text_request,
    wait_until_gone,
)
from tests.contract.test_openai import client_of, streaming
from tests.contract.toy_checkpoints import make_checkpoint

pytestmark = pytest.mark.slow

TOKEN = "a-token-that-engines-need-not-have"
MOST = 8
LARGE = 128
WORLD_SIZE = 3  # of a push: the sender and a worker of each replica


@pytest.fixture(scope="module")
def untied(checkpoints: Path) -> Path:
    return make_checkpoint(checkpoints / "untied", seed=3, tie=False)


# Its tests run in their order, because the last one stops the server.
@pytest.fixture(scope="module")
def replicas(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a token, which `http` sends, and with a folder for temporary files."""
    folder = tmp_path_factory.mktemp("replicas") / "server"
    options: tuple[str, ...] = ("--replicas", "2", "--max-num-seqs", str(MOST))
    options += ("--openai", "--grace-seconds", "0.1")
    with (
        pytest.MonkeyPatch.context() as environment,
        tempfile.TemporaryDirectory() as temporary,  # short, since sockets have a path in it
    ):
        environment.setenv(TOKEN_VARIABLE, TOKEN)
        environment.setenv("TMPDIR", temporary)
        with running_server(untied, folder, *options) as replicas:
            assert replicas.http.get("/info/").status_code == 401
            replicas.http.headers["Authorization"] = f"Bearer {TOKEN}"
            yield replicas


@pytest.mark.req("SRV-01", "WIRE-06")
def test_load_is_spread_and_order_and_seeds_stay(replicas: RunningServer) -> None:
    assert replicas.http.get("/get_world_size/").json() == {"world_size": 2}
    assert len(replicas.http.get("/health/").json()["replicas"]) == 2
    sampled: dict[str, Any] = {"temperature": 1.0, "max_tokens": 200}
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(replicas.infer, [text_request()] * 16, seed=60, **sampled)
        replicas.wait_for_sequences(lambda running: running == 8)
        together = call.result()
    for i in (0, 1, 7, 15):
        (alone,) = replicas.infer([text_request()], seed=60 + i, **sampled)
        assert response_ids(alone) == response_ids(together[i])


@pytest.mark.req("SRV-02", "SEED-02")
def test_a_short_call_takes_the_next_free_place_beside_a_large_one(replicas: RunningServer) -> None:
    """Answers are those of calls alone."""
    many = [text_request(f"{PROMPT} {number}") for number in range(LARGE)]
    with ThreadPoolExecutor(1) as threads:
        large = threads.submit(replicas.infer, many, max_tokens=64)
        replicas.wait_for_sequences(lambda running: running == MOST)
        (one,) = replicas.infer([text_request()], max_tokens=8)
        assert not large.done()
        envelopes = large.result()
    created = [envelope["response"]["created"] for envelope in envelopes]
    assert sum(second < one["response"]["created"] for second in created) < 0.5 * LARGE
    (alone,) = replicas.infer([text_request()], max_tokens=8)
    assert response_ids(one) == response_ids(alone)
    few = [response_ids(envelope) for envelope in replicas.infer(many[::32], max_tokens=64)]
    assert few == [response_ids(envelope) for envelope in envelopes[::32]]


@pytest.mark.req("SRV-06", "SRV-08")
def test_engines_have_no_token_and_a_private_folder_for_temporary_files(
    replicas: RunningServer,
) -> None:
    environment = environment_of(replicas.processes()["engine 0"])
    assert TOKEN_VARIABLE not in environment
    assert TOKEN not in environment.values()
    scratch = Path(environment["TMPDIR"])
    assert scratch.is_relative_to(environment_of(replicas.process.pid)["TMPDIR"])
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
    assert list(scratch.iterdir())


@pytest.mark.req("SRV-05", "SYNC-07")
def test_killed_engine_is_named_built_again_and_serves_after_a_push(
    replicas: RunningServer, untied: Path
) -> None:
    replicas.push(untied, WORLD_SIZE)
    before = replicas.info()
    with ThreadPoolExecutor() as threads:
        call = threads.submit(
            replicas.post_infer, [text_request()] * 64, temperature=1.0, max_tokens=480
        )
        assert len(replicas.running_sequences()) == 2
        replicas.wait_for_sequences(lambda sequences: sequences > 0)
        os.kill(replicas.processes()["engine 1"], signal.SIGKILL)
        answer = call.result(timeout=120)
    assert answer.status_code == 503
    lost = answer.json()["where"]
    assert lost in ("replicas[0]", "replicas[1]")
    health = replicas.http.get("/health/")
    assert (health.status_code, health.json()["where"]) == (503, lost)
    assert replicas.http.get("/live/").status_code == 200
    _others_answer(replicas, before["weights_version"])
    assert replicas.info()["server_epoch"] != before["server_epoch"]

    replicas.wait_for_replicas(lambda each: {r["state"] for r in each} == {"serving", "needs-push"})
    health = replicas.http.get("/health/")
    assert (health.status_code, health.json()["where"]) == (503, lost)
    assert "needs-push" in health.json()["detail"]
    assert health.json()["type"] == "urn:rollmatch:push-needed"
    client = RolloutClient(replicas.process.base_url, timeout_s=60, token=TOKEN)
    client.wait_until_pushable()
    _others_answer(replicas, before["weights_version"])
    replicas.push(untied, WORLD_SIZE)
    assert replicas.http.get("/health/").status_code == 200
    together = replicas.infer([text_request()] * 8)
    assert len({tuple(response_ids(envelope)) for envelope in together}) == 1


@pytest.mark.req("SRV-05", "OAI-01")
def test_stopping_server_ends_streams_and_calls_with_an_error_and_leaves_no_process(
    replicas: RunningServer,
) -> None:
    everything = [replicas.process.pid, *children(replicas.process.pid)]
    with ThreadPoolExecutor() as threads, client_of(replicas, TOKEN) as client:
        options = {"temperature": 1.0, "max_tokens": 480}
        whole = threads.submit(replicas.post_infer, [text_request()] * 32, **options)
        replicas.wait_for_sequences(lambda sequences: sequences > 0)
        with streaming(client, replicas, max_tokens=480) as stream:
            os.kill(replicas.process.pid, signal.SIGTERM)
            with pytest.raises(openai.APIError) as stopped:
                list(stream)
        ended = whole.result(timeout=60)
    assert "the server is stopping" in stopped.value.message
    assert (ended.status_code, ended.json()["detail"]) == (503, "the server is stopping")
    assert wait_until_gone(everything, timeout_s=60) == []


def _others_answer(server: RunningServer, version: int) -> None:
    for envelope in server.infer([text_request()] * 4):
        assert envelope["coordexp"]["weights_version"] == [version, version]
