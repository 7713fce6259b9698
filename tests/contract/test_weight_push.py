"""Weight pushes over gloo into the shared server, and every way they can break."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import create_server
from typing import Any

import httpx
import pytest
import torch

from learner.rollout.server_process import free_ports
from tests.contract import reference
from tests.contract.running_server import (
    PROMPT,
    RunningServer,
    image_request,
    response_ids,
    text_request,
)
from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import (
    Posting,
    Sender,
    Weights,
    begin_transfer,
    digest,
    digests,
    finish,
    init_body,
    load,
    manifest,
    push,
    start,
    start_manifest,
    weight_group,
)


@dataclass
class Pushing:
    """A server, a port for its weight group, and weights to push.

    weights: what the server holds when a test begins and ends; others: different ones.
    """

    server: RunningServer
    port: int
    weights: Weights
    others: Weights

    def next_version(self) -> int:
        version: int = self.server.http.get("/info/").json()["weights_version"]
        return version + 1

    def answer(self) -> list[int]:
        return response_ids(self.server.infer([text_request()])[0])

    @contextmanager
    def group(self, timeout_s: float = 30.0) -> Iterator[Sender]:
        with weight_group(self.server.http, self.port, timeout_s=timeout_s) as sender:
            yield sender

    def recover(self) -> None:
        """A full push through a new group; the server must come back with its weights."""
        with self.group() as sender:
            push(self.server.http, sender, self.weights, self.next_version())

    def state(self) -> str:
        answer = self.server.http.get("/health/")
        return "POISONED" if answer.status_code == 503 else answer.json()["state"]


@pytest.fixture
def pushing(server: RunningServer, tied: Path, other_tied: Path) -> Iterator[Pushing]:
    """Ends with the weights the server began with."""
    (port,) = free_ports(1)
    pushing = Pushing(server, port, read_weights(tied), read_weights(other_tied))
    before = pushing.answer()
    yield pushing
    if pushing.state() != "READY" or pushing.answer() != before:
        pushing.recover()
    assert pushing.answer() == before


@pytest.mark.req("SYNC-03", "SYNC-02", "SYNC-06", "SYNC-10")
def test_after_a_push_text_and_image_answers_are_those_of_the_new_weights(
    pushing: Pushing, other_tied: Path, scene: Path
) -> None:
    """The same requests before and after, so that anything stale would show."""
    server = pushing.server
    requests = [text_request(), image_request(str(scene))]
    before = [response_ids(e) for e in server.infer(requests, max_tokens=24)]
    with pushing.group() as sender:
        report = push(server.http, sender, pushing.others, pushing.next_version())
        after = [response_ids(e) for e in server.infer(requests, max_tokens=24)]
        assert after[0] == reference.greedy_ids(other_tied, PROMPT, [], 24)
        assert after[1] == reference.greedy_ids(other_tied, PROMPT, [scene], 24)
        assert after[0] != before[0]
        assert after[1] != before[1]
        push(server.http, sender, pushing.weights, pushing.next_version())
    assert [response_ids(e) for e in server.infer(requests, max_tokens=24)] == before
    assert report["bytes"] == sum(w.numel() * w.element_size() for w in pushing.others.values())
    assert report["verified"] == len(pushing.others)
    assert set(report["seconds"]) == {"pause", "transfer", "load", "verify", "caches"}


@pytest.mark.req("ROLL-03", "SYNC-10")
def test_a_server_that_slept_answers_by_its_weights_and_after_a_push_by_the_new_ones(
    pushing: Pushing, other_tied: Path, scene: Path
) -> None:
    """vLLM's sleep, without its allocator: a CPU keeps the memory."""
    server, requests = pushing.server, [text_request(), image_request(str(scene))]
    before = [response_ids(e) for e in server.infer(requests, max_tokens=24)]
    for _ in range(2):  # the second time changes nothing
        assert server.http.post("/sleep/", json={}).json()["state"] == "READY"
    assert server.http.get("/health/").json()["asleep"]
    refused = server.post_infer(requests)
    assert refused.status_code == 503
    assert "/wake_up/ or a push comes first" in refused.json()["detail"]
    assert server.http.post("/wake_up/", json={}).status_code == 200
    assert not server.http.get("/health/").json()["asleep"]
    assert [response_ids(e) for e in server.infer(requests, max_tokens=24)] == before
    with pushing.group() as sender:
        for weights in (pushing.others, pushing.weights):
            server.http.post("/sleep/", json={}).raise_for_status()
            push(server.http, sender, weights, pushing.next_version())
            after = [response_ids(e) for e in server.infer(requests, max_tokens=24)]
            assert (after == before) == (weights is pushing.weights)
            if weights is pushing.others:
                assert after[1] == reference.greedy_ids(other_tied, PROMPT, [scene], 24)


@pytest.mark.req("WIRE-03")
def test_the_version_changes_only_at_the_end(pushing: Pushing) -> None:
    server = pushing.server
    old = server.http.get("/health/").json()["weights_version"]
    with pushing.group() as sender:
        assert start(server.http, old + 7, pushing.weights).json()["weights_version"] == old
        transfer = begin_transfer(server.http, old + 7)
        sender.send(pushing.weights)
        assert transfer.answer().json() == {
            "state": "UPDATING",
            "weights_version": old,
            "server_epoch": server.http.get("/live/").json()["server_epoch"],
        }
        status = finish(server.http, old + 7).json()["status"]
    assert (status["state"], status["weights_version"]) == ("READY", old + 7)
    assert server.http.get("/health/").json()["weights_version"] == old + 7
    (envelope,) = server.infer([text_request()])
    assert envelope["coordexp"]["weights_version"] == [old + 7, old + 7]


@pytest.mark.req("SYNC-03")
def test_running_sequences_finish_under_the_old_weights(pushing: Pushing) -> None:
    server = pushing.server
    old = server.http.get("/health/").json()["weights_version"]
    new = pushing.next_version()
    with pushing.group() as sender, ThreadPoolExecutor() as threads:
        running = threads.submit(
            server.infer, [text_request()] * 4, temperature=1.0, seed=5, max_tokens=200
        )
        time.sleep(0.4)
        push(server.http, sender, pushing.others, new)
        stamps = [envelope["coordexp"] for envelope in running.result()]
    assert [stamp["weights_version"] for stamp in stamps] == [[old, old]] * 4
    assert {stamp["finish"] for stamp in stamps} <= {"stop", "length"}


@pytest.mark.req("SYNC-03")
def test_a_call_during_an_update_waits_for_the_new_weights(pushing: Pushing) -> None:
    server = pushing.server
    new = pushing.next_version()
    with pushing.group() as sender, ThreadPoolExecutor() as threads:
        assert start(server.http, new, pushing.others).status_code == 200
        waiting = threads.submit(server.infer, [text_request()])
        transfer = begin_transfer(server.http, new)
        sender.send(pushing.others)
        assert transfer.answer().status_code == 200
        assert not waiting.done()
        assert server.http.get("/health/").json()["state"] == "UPDATING"
        assert finish(server.http, new).status_code == 200
        (envelope,) = waiting.result(timeout=120)
    assert envelope["coordexp"]["weights_version"] == [new, new]


# --- forming the group


@pytest.mark.req("SYNC-04")
def test_a_wrong_world_size_or_transport_is_refused(pushing: Pushing) -> None:
    http = pushing.server.http
    assert http.get("/get_world_size/").json() == {"world_size": 1}
    wrong = http.post("/init_communicator/", json=init_body(pushing.port, world_size=3))
    assert (wrong.status_code, wrong.json()["where"]) == (422, "world_size")
    assert "make 2" in wrong.json()["detail"]
    other = http.post("/init_communicator/", json=init_body(pushing.port) | {"transport": "ipc"})
    assert (other.status_code, other.json()["where"]) == (422, "transport")


@pytest.mark.req("SYNC-04")
def test_a_taken_group_port_is_named(pushing: Pushing) -> None:
    with create_server(("127.0.0.1", pushing.port)):
        answer = pushing.server.http.post("/init_communicator/", json=init_body(pushing.port))
    assert answer.status_code == 409
    problem = answer.json()
    assert problem["type"] == "urn:rollmatch:group-port-taken"
    assert f"127.0.0.1:{pushing.port}" in problem["detail"]
    assert problem["detail"].startswith("server:")


@pytest.mark.req("SYNC-04")
@pytest.mark.parametrize(
    "body",
    [{"host": "nowhere.invalid"}, {"host": "192.0.2.1"}, {"host": ""}, {"timeout_s": 1e300}],
)
def test_an_address_that_is_none_of_the_servers_is_refused(
    pushing: Pushing, body: dict[str, Any]
) -> None:
    answer = pushing.server.http.post("/init_communicator/", json=init_body(pushing.port) | body)
    assert (answer.status_code, answer.json()["where"]) == (422, next(iter(body)))


@pytest.mark.req("SYNC-04")
def test_a_learner_that_never_joins_is_named_in_time(pushing: Pushing) -> None:
    began = time.monotonic()
    answer = pushing.server.http.post(
        "/init_communicator/", json=init_body(pushing.port, timeout_s=2.0)
    )
    assert time.monotonic() - began < 60
    assert answer.status_code == 504
    problem = answer.json()
    assert problem["where"] == f"rendezvous at 127.0.0.1:{pushing.port}"
    assert problem["detail"].startswith("learner (rank 0)")
    assert pushing.state() == "READY"
    pushing.recover()


@pytest.mark.req("SYNC-04")
def test_groups_can_be_formed_again_and_again_and_leave_nothing(pushing: Pushing) -> None:
    """Descriptors and threads of the server and its engine do not grow."""
    pushing.recover()
    before = _resources(pushing.server)
    for _ in range(5):
        pushing.recover()
    assert (
        pushing.server.http.post("/close_communicator/", json={"attempt": None}).status_code == 200
    )
    after = _resources(pushing.server)
    assert all(after[name] <= before[name] + 2 for name in before), (before, after)


def _resources(server: RunningServer) -> dict[str, int]:
    return {
        f"{kind} of {name}": len(list(Path(f"/proc/{pid}/{kind}").iterdir()))
        for name, pid in server.processes().items()
        for kind in ("fd", "task")
    }


# --- calls out of order


@pytest.mark.req("SYNC-03")
def test_phases_out_of_order_are_refused(pushing: Pushing) -> None:
    http = pushing.server.http
    http.post("/close_communicator/", json={"attempt": None})
    new = pushing.next_version()
    for answer in (
        start(http, new, pushing.weights),
        http.post("/update_weights/", json={"version": new, "attempt": None}),
        finish(http, new),
    ):
        assert answer.status_code == 409
        assert answer.json()["type"] == "urn:rollmatch:weight-update-order"
    with pushing.group() as sender:
        again = start(http, new - 1, pushing.weights)
        assert again.status_code == 409, "the server has that version"
        assert start(http, new, pushing.weights).status_code == 200
        assert start(http, new + 1, pushing.weights).status_code == 409
        assert finish(http, new).status_code == 409, "nothing was sent"
        assert begin_transfer(http, new + 1).answer().status_code == 409, "it was not started"
        transfer = begin_transfer(http, new)
        sender.send(pushing.weights)
        assert transfer.answer().status_code == 200
        assert finish(http, new + 1).status_code == 409, "another version was started"
        unknown = finish(http, new, [{"name": "nothing", "digest": "0" * 16}])
        assert (unknown.status_code, unknown.json()["where"]) == (422, "digests")
        assert finish(http, new).status_code == 200


# --- manifests that do not fit


def faulty_manifests(weights: Weights) -> dict[str, tuple[Weights, list[tuple[str, str]]]]:
    """What each lists, and the faults it has: (parameter, what is wrong with it)."""
    layer = "model.language_model.layers.1"
    key, down = f"{layer}.self_attn.k_proj.weight", f"{layer}.mlp.down_proj.weight"
    foreign = "model.language_model.layers.9.nothing"
    embedding = "model.language_model.embed_tokens.weight"
    return {
        "a part of a fused matrix is missing": (without(weights, key), [(key, "missing")]),
        "a whole matrix is missing": (without(weights, down), [(down, "missing")]),
        "the embedding is missing": (
            without(weights, embedding),
            [("language_model.model.embed_tokens.weight", "missing")],
        ),
        "one is unknown": (weights | {foreign: torch.zeros(4)}, [(foreign, "unexpected")]),
        "a tied head comes twice": (
            weights | {"lm_head.weight": weights[embedding]},
            [("lm_head.weight", "duplicate")],
        ),
        "shapes differ": (
            weights | {key: weights[key][:64], down: weights[down].t().contiguous()},
            [(down, "shape"), (key, "shape")],
        ),
        "a type differs": (weights | {down: weights[down].double()}, [(down, "dtype")]),
    }


def without(weights: Weights, name: str) -> Weights:
    return {each: weight for each, weight in weights.items() if each != name}


@pytest.mark.req("SYNC-05")
def test_a_manifest_that_does_not_fit_is_refused_and_the_old_weights_serve_on(
    pushing: Pushing,
) -> None:
    http, new, before = pushing.server.http, pushing.next_version(), pushing.answer()
    with pushing.group() as sender:
        for case, (listed, faults) in faulty_manifests(pushing.weights).items():
            answer = start(http, new, listed)
            _assert_mismatch(answer, faults, case)
            assert pushing.state() == "READY", case
        listed_twice = [*manifest(pushing.weights), manifest(pushing.weights)[3]]
        answer = start_manifest(http, new, listed_twice)
        _assert_mismatch(answer, [(listed_twice[3].name, "duplicate")], "twice")
        assert pushing.answer() == before
        assert pushing.next_version() == new
        push(http, sender, pushing.weights, new)


def _assert_mismatch(answer: httpx.Response, faults: list[tuple[str, str]], case: str) -> None:
    assert answer.status_code == 422, case
    problem = answer.json()
    assert problem["type"] == "urn:rollmatch:manifest-mismatch", case
    assert [(each["where"], each["fault"]) for each in problem["errors"]] == faults, case


@pytest.mark.req("SYNC-05", "WIRE-05")
def test_a_shape_beyond_all_memory_is_refused_before_the_drain(pushing: Pushing) -> None:
    http, new = pushing.server.http, pushing.next_version()
    with pushing.group():
        body = {"name": "a", "dtype": "float32", "shape": [2**64]}
        start = {"version": new, "parameters": [body], "attempt": None}
        answer = http.post("/start_weight_update/", json=start)
        assert answer.status_code == 422
        assert answer.json()["where"] == "parameters[0].shape[0]"
        assert pushing.state() == "READY"


@pytest.mark.req("SYNC-05")
def test_a_poisoned_server_refuses_a_wrong_manifest_and_stays_poisoned(pushing: Pushing) -> None:
    http, new = pushing.server.http, pushing.next_version()
    with pushing.group() as sender:
        assert start(http, new, pushing.others).status_code == 200
        transfer = begin_transfer(http, new)
        sender.send(pushing.others)
        assert transfer.answer().status_code == 200
        assert (
            http.post("/close_communicator/", json={"attempt": None}).json()["state"] == "POISONED"
        )
    with pushing.group() as sender:
        few = dict(list(pushing.weights.items())[:-1])
        assert start(http, new, few).status_code == 422
        _assert_poisoned(pushing)
        push(http, sender, pushing.weights, new)
    assert pushing.state() == "READY"


# --- weights that arrive otherwise than they were sent


LAYER = "model.language_model.layers"
EMBEDDING = "model.language_model.embed_tokens.weight"


def broken_transfers(weights: Weights, stale: Weights) -> dict[str, Weights]:
    """What arrives in place of some of `weights`."""

    def swapped(a: str, b: str) -> Weights:
        return {a: weights[b], b: weights[a]}

    down = f"{LAYER}.2.mlp.down_proj.weight"
    flipped = weights[down].clone()
    flipped[5, 7] = -flipped[5, 7]
    patches = "model.visual.patch_embed.proj.weight"
    return {
        "stale norm": {f"{LAYER}.0.input_layernorm.weight": torch.full((128,), 0.5)},
        "stale embedding": {EMBEDDING: stale[EMBEDDING]},
        "stale vision tower": {patches: stale[patches]},
        "query and key": swapped(
            f"{LAYER}.0.self_attn.q_proj.weight", f"{LAYER}.0.self_attn.k_proj.weight"
        ),
        "gate and up": swapped(f"{LAYER}.1.mlp.gate_proj.weight", f"{LAYER}.1.mlp.up_proj.weight"),
        "two layers": swapped(f"{LAYER}.1.mlp.down_proj.weight", f"{LAYER}.3.mlp.down_proj.weight"),
        "one element": {down: flipped},
        "two rows": {down: weights[down].roll(1, dims=0)},
    }


@pytest.mark.req("SYNC-06", "SYNC-05")
def test_what_is_not_held_as_it_was_sent_poisons_until_a_full_push(pushing: Pushing) -> None:
    http, new = pushing.server.http, pushing.next_version()
    with pushing.group() as sender:
        for case, wrong in broken_transfers(pushing.others, pushing.weights).items():
            load(http, sender, pushing.others | wrong, new)
            answer = finish(http, new, digests(pushing.others))
            assert answer.status_code == 502, case
            problem = answer.json()
            assert problem["type"] == "urn:rollmatch:weights-differ"
            assert problem["where"] == f"verify at 127.0.0.1:{pushing.port}"
            found = {(each["where"], each["replica"]) for each in problem["errors"]}
            assert found == {(name, 0) for name in wrong}, case
            _assert_poisoned(pushing)
        assert push(http, sender, pushing.others, new)["status"]["weights_version"] == new
        assert pushing.server.infer([text_request()])


@pytest.mark.req("SYNC-06")
def test_some_columns_can_be_compared(pushing: Pushing) -> None:
    http, new = pushing.server.http, pushing.next_version()
    value, down = f"{LAYER}.0.self_attn.v_proj.weight", f"{LAYER}.0.mlp.down_proj.weight"
    asked = {value: [0, 5, 127], down: [383], EMBEDDING: [1, 2, 3, 64]}
    brought = [
        {"name": name, "columns": columns, "digest": digest(pushing.others[name], columns)}
        for name, columns in asked.items()
    ]
    elsewhere, there = pushing.others[value].clone(), pushing.others[value].clone()
    elsewhere[3, 4] += 1
    there[3, 5] += 1
    with pushing.group() as sender:
        load(http, sender, pushing.others | {value: there}, new)
        (error,) = finish(http, new, brought).json()["errors"]
        assert error["where"] == value
        load(http, sender, pushing.others | {value: elsewhere}, new)
        assert finish(http, new, brought).json()["verified"] == 3


# --- updates that break


def _assert_poisoned(pushing: Pushing) -> None:
    http = pushing.server.http
    for answer in (http.get("/health/"), pushing.server.post_infer([text_request()])):
        assert answer.status_code == 503
        assert answer.json()["type"] == "urn:rollmatch:weights-poisoned"
    assert http.get("/live/").status_code == 200


@pytest.mark.req("SYNC-04")
def test_a_learner_killed_mid_transfer_poisons_until_a_full_push(
    pushing: Pushing, other_tied: Path
) -> None:
    http = pushing.server.http
    command = [sys.executable, "-m", "tests.contract.dying_learner"]
    learner = subprocess.Popen(
        [*command, str(pushing.port), str(other_tied), "2"], stdout=subprocess.PIPE
    )
    assert learner.stdout is not None
    assert learner.stdout.readline() == b"here\n"
    forming = Posting(http, "/init_communicator/", init_body(pushing.port))
    assert forming.answer().status_code == 200
    assert start(http, pushing.next_version(), pushing.others).status_code == 200
    transfer = begin_transfer(http, pushing.next_version())
    assert learner.stdout.readline() == b"sent\n"
    learner.kill()
    learner.wait()
    learner.stdout.close()
    answer = transfer.answer()
    assert answer.status_code == 502
    assert answer.json()["where"] == f"transfer at 127.0.0.1:{pushing.port}"
    _assert_poisoned(pushing)
    pushing.recover()
    assert pushing.state() == "READY"


@pytest.mark.req("SYNC-04")
def test_a_transfer_that_broke_ends_the_group_and_a_new_one_heals(pushing: Pushing) -> None:
    http, new = pushing.server.http, pushing.next_version()
    forming = Posting(http, "/init_communicator/", init_body(pushing.port))
    sender = Sender(pushing.port, world_size=2, timeout_s=30.0)
    assert forming.answer().status_code == 200
    assert start(http, new, pushing.others).status_code == 200
    transfer = begin_transfer(http, new)
    sender.send(pushing.others, buckets=1)
    sender.hang_up()
    answer = transfer.answer()
    assert answer.status_code == 502
    assert "did not come" in answer.json()["detail"]
    _assert_poisoned(pushing)
    again = start(http, new, pushing.weights)
    assert (again.status_code, again.json()["type"]) == (409, "urn:rollmatch:weight-update-order")
    assert "no weight group" in again.json()["detail"]
    pushing.recover()
    assert pushing.state() == "READY"


@pytest.mark.req("SYNC-04")
def test_a_learner_that_hangs_mid_transfer_is_given_up(pushing: Pushing) -> None:
    http = pushing.server.http
    with pushing.group(timeout_s=2.0) as sender:
        assert start(http, pushing.next_version(), pushing.others).status_code == 200
        transfer = begin_transfer(http, pushing.next_version())
        sender.send(pushing.others, buckets=1)
        began = time.monotonic()
        answer = transfer.answer()
        assert time.monotonic() - began < 60
    assert answer.status_code == 504
    assert answer.json()["detail"].startswith("learner (rank 0)")
    _assert_poisoned(pushing)
    pushing.recover()


@pytest.mark.req("SYNC-04")
def test_a_learner_that_falls_silent_between_phases_is_given_up(pushing: Pushing) -> None:
    http = pushing.server.http
    with pushing.group(timeout_s=2.0), ThreadPoolExecutor() as threads:
        assert start(http, pushing.next_version(), pushing.others).status_code == 200
        waiting = threads.submit(pushing.server.post_infer, [text_request()])
        assert waiting.result(timeout=120).status_code == 503
        _assert_poisoned(pushing)
    pushing.recover()


@pytest.mark.req("SYNC-04")
def test_a_new_group_ends_an_update_that_was_left_open(pushing: Pushing) -> None:
    http = pushing.server.http
    with pushing.group():
        assert start(http, pushing.next_version(), pushing.others).status_code == 200
    pushing.recover()
    assert pushing.state() == "READY"


@pytest.mark.req("SYNC-04")
def test_a_drain_that_takes_too_long_leaves_the_old_weights_serving(pushing: Pushing) -> None:
    """The deadline of the drain is the group's; what runs is not cut short."""
    server = pushing.server
    old = server.http.get("/health/").json()["weights_version"]
    with pushing.group(timeout_s=2.0), ThreadPoolExecutor() as threads:
        long = [text_request(f"{PROMPT} {i}") for i in range(64)]  # greedy rarely ends early
        running = threads.submit(server.infer, long, max_tokens=None)
        time.sleep(0.3)
        answer = start(server.http, old + 1, pushing.others)
        assert answer.status_code == 504, "the call was over too soon"
        assert answer.json()["where"].startswith("start: drain at")
        stamps = [envelope["coordexp"] for envelope in running.result()]
    assert [stamp["weights_version"] for stamp in stamps] == [[old, old]] * 64
    assert {stamp["finish"] for stamp in stamps} <= {"stop", "length"}
    assert pushing.state() == "READY"
