"""Weight pushes over gloo into the shared server, by a plain sender and by the real learner."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import create_server
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from learner.cli import app
from learner.config import dump_mapping
from learner.data.toy import ToyData
from learner.models.load import LoadedModel
from learner.rollout.client import RolloutClient
from learner.rollout.server_process import free_ports
from learner.rollout.sync.probe import Probe, ProbeResult, probe_call
from learner.rollout.sync.push import Join, WeightPusher, WeightSyncError
from learner.rollout.sync.transports import WeightGroup, join_group
from learner.rollout.sync.weights import MergedWeights, OneSource
from shared_contracts.digests import sample
from shared_contracts.errors import ProblemError
from shared_contracts.rollout_config import Verify
from shared_contracts.weights import InitCommunicator, ParameterMeta
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
    BUCKET_BYTES,
    Sender,
    Weights,
    begin_transfer,
    finish,
    init_body,
    manifest,
    push,
    start,
    start_manifest,
    weight_group,
)
from tests.unit.loaded_models import loaded_from
from tests.unit.small_run import small_mapping

Stream = Iterable[tuple[str, Tensor]]


@dataclass
class Pushing:
    """A server, a port for its weight group, and weights to push.

    weights: of the server before and after a test; others: different ones.
    """

    server: RunningServer
    port: int
    weights: Weights
    others: Weights

    def next_version(self) -> int:
        version: int = self.server.http.get("/info/").json()["weights_version"]
        return version + 1

    def answers(self, *requests: dict[str, Any]) -> list[list[int]]:
        envelopes = self.server.infer(list(requests) or [text_request()], max_tokens=24)
        return [response_ids(envelope) for envelope in envelopes]

    @contextmanager
    def group(self, timeout_s: float = 30.0) -> Iterator[Sender]:
        with weight_group(self.server.http, self.port, timeout_s=timeout_s) as sender:
            yield sender

    def recover(self) -> None:
        """A full push through a new group."""
        with self.group() as sender:
            push(self.server.http, sender, self.weights, self.next_version())

    def state(self) -> str:
        answer = self.server.http.get("/health/")
        return "POISONED" if answer.status_code == 503 else answer.json()["state"]

    def assert_poisoned(self) -> None:
        http = self.server.http
        for answer in (http.get("/health/"), self.server.post_infer([text_request()])):
            assert answer.status_code == 503
            assert answer.json()["type"] == "urn:rollmatch:weights-poisoned"
        assert http.get("/live/").status_code == 200


@pytest.fixture
def pushing(server: RunningServer, tied: Path, other_tied: Path) -> Iterator[Pushing]:
    """Ends with the weights of the beginning."""
    (port,) = free_ports(1)
    pushing = Pushing(server, port, read_weights(tied), read_weights(other_tied))
    before = pushing.answers()
    yield pushing
    if pushing.state() != "READY" or pushing.answers() != before:
        pushing.recover()
    assert pushing.answers() == before


@pytest.mark.req("SYNC-03", "SYNC-02", "SYNC-06", "SYNC-10")
def test_after_a_push_text_and_image_answers_are_those_of_the_new_weights(
    pushing: Pushing, other_tied: Path, scene: Path
) -> None:
    """The same requests before and after, so that anything stale would show."""
    server, requests = pushing.server, [text_request(), image_request(str(scene))]
    before = pushing.answers(*requests)
    with pushing.group() as sender:
        report = push(server.http, sender, pushing.others, pushing.next_version())
        after = pushing.answers(*requests)
        assert after[0] == reference.greedy_ids(other_tied, PROMPT, [], 24)
        assert after[1] == reference.greedy_ids(other_tied, PROMPT, [scene], 24)
        assert all(new != old for new, old in zip(after, before, strict=True))
        push(server.http, sender, pushing.weights, pushing.next_version())
    assert pushing.answers(*requests) == before
    assert report["bytes"] == sum(w.numel() * w.element_size() for w in pushing.others.values())
    assert report["verified"] == len(pushing.others)
    assert set(report["seconds"]) == {"pause", "transfer", "load", "verify", "caches"}


@pytest.mark.req("SYNC-03", "WIRE-03")
def test_calls_see_the_old_version_before_an_update_and_the_new_one_after_it(
    pushing: Pushing,
) -> None:
    """Running sequences end under the old weights; a call during the update waits for the end."""
    server = pushing.server
    old = server.http.get("/health/").json()["weights_version"]
    new = old + 7
    with pushing.group() as sender, ThreadPoolExecutor() as threads:
        running = threads.submit(
            server.infer, [text_request()] * 4, temperature=1.0, seed=5, max_tokens=200
        )
        server.wait_for_sequences(lambda number: number > 0)
        assert start(server.http, new, pushing.others).json()["weights_version"] == old
        waiting = threads.submit(server.infer, [text_request()])
        transfer = begin_transfer(server.http, new)
        sender.send(pushing.others)
        assert transfer.answer().json() == {
            "state": "UPDATING",
            "weights_version": old,
            "server_epoch": server.http.get("/live/").json()["server_epoch"],
        }
        assert not waiting.done()
        status = finish(server.http, new).json()["status"]
        stamps = [
            [envelope["coordexp"]["weights_version"] for envelope in call.result()]
            for call in (running, waiting)
        ]
    assert (status["state"], status["weights_version"]) == ("READY", new)
    assert server.http.get("/health/").json()["weights_version"] == new
    assert [old, old] in stamps[0]
    assert all(stamp in ([old, old], [new, new]) for stamp in stamps[0])
    assert stamps[1] == [[new, new]]


@pytest.mark.slow
@pytest.mark.req("ROLL-03", "SYNC-10")
def test_a_server_that_slept_answers_by_its_weights_and_after_a_push_by_the_new_ones(
    pushing: Pushing, other_tied: Path, scene: Path
) -> None:
    """vLLM's sleep, without its allocator: a CPU keeps the memory."""
    server, requests = pushing.server, [text_request(), image_request(str(scene))]
    before = pushing.answers(*requests)
    for _ in range(2):  # the second time changes nothing
        assert server.http.post("/sleep/", json={}).json()["state"] == "READY"
    refused = server.post_infer(requests)
    assert refused.status_code == 503
    assert "/wake_up/ or a push comes first" in refused.json()["detail"]
    assert server.http.get("/health/").json() == refused.json()
    assert server.http.post("/wake_up/", json={}).status_code == 200
    assert server.http.get("/health/").status_code == 200
    assert pushing.answers(*requests) == before
    server.http.post("/sleep/", json={}).raise_for_status()
    with pushing.group() as sender:
        push(server.http, sender, pushing.others, pushing.next_version())
    assert pushing.answers(*requests)[1] == reference.greedy_ids(other_tied, PROMPT, [scene], 24)


# --- what is refused


@pytest.mark.req("SYNC-04")
@pytest.mark.parametrize(
    ("body", "named", "detail"),
    [
        ({}, "port", "server: cannot listen on 127.0.0.1:"),
        ({"world_size": 3}, "world_size", "make 2"),
        ({"transport": "ipc"}, "transport", ""),
        ({"host": "nowhere.invalid"}, "host", ""),
        ({"host": "192.0.2.1"}, "host", ""),
        ({"host": ""}, "host", ""),
        ({"timeout_s": 1e300}, "timeout_s", ""),
    ],
)
def test_a_group_that_cannot_form_is_refused(
    pushing: Pushing, body: dict[str, Any], named: str, detail: str
) -> None:
    http = pushing.server.http
    assert http.get("/get_world_size/").json() == {"world_size": 1}
    with create_server(("127.0.0.1", pushing.port)):
        answer = http.post("/init_communicator/", json=init_body(pushing.port) | body)
    assert (answer.status_code, answer.json()["where"]) == (422 if body else 409, named)
    assert detail in answer.json()["detail"]


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
        assert start(http, new - 1, pushing.weights).status_code == 409, "the server has it"
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


LAYER = "model.language_model.layers.1"
K_PROJ, Q_PROJ = f"{LAYER}.self_attn.k_proj.weight", f"{LAYER}.self_attn.q_proj.weight"
DOWN = f"{LAYER}.mlp.down_proj.weight"
EMBEDDING = "model.language_model.embed_tokens.weight"
PATCHES = "model.visual.patch_embed.proj.weight"
FOREIGN = "model.language_model.layers.9.nothing"


def without(weights: Weights, name: str) -> Weights:
    return {each: weight for each, weight in weights.items() if each != name}


def faulty_manifests(weights: Weights) -> list[tuple[Weights, list[tuple[str, str]]]]:
    """The listed weights, and their faults: (parameter, kind)."""
    return [
        (without(weights, K_PROJ), [(K_PROJ, "missing")]),
        (without(weights, DOWN), [(DOWN, "missing")]),
        (
            without(weights, EMBEDDING),
            [("language_model.model.embed_tokens.weight", "missing")],
        ),
        (weights | {FOREIGN: torch.zeros(4)}, [(FOREIGN, "unexpected")]),
        (weights | {"lm_head.weight": weights[EMBEDDING]}, [("lm_head.weight", "duplicate")]),
        (
            weights | {K_PROJ: weights[K_PROJ][:64], DOWN: weights[DOWN].t().contiguous()},
            [(DOWN, "shape"), (K_PROJ, "shape")],
        ),
        (weights | {DOWN: weights[DOWN].double()}, [(DOWN, "dtype")]),
    ]


@pytest.mark.req("SYNC-05", "WIRE-05")
def test_a_manifest_that_does_not_fit_is_refused_and_the_old_weights_serve_on(
    pushing: Pushing,
) -> None:
    http, new, before = pushing.server.http, pushing.next_version(), pushing.answers()
    with pushing.group() as sender:
        for listed, faults in faulty_manifests(pushing.weights):
            assert_mismatch(start(http, new, listed), faults)
            assert pushing.state() == "READY", faults
        twice = [*manifest(pushing.weights), manifest(pushing.weights)[3]]
        assert_mismatch(start_manifest(http, new, twice), [(twice[3].name, "duplicate")])
        huge = {"name": "a", "dtype": "float32", "shape": [2**64]}
        body = {"version": new, "parameters": [huge], "attempt": None}
        answer = http.post("/start_weight_update/", json=body)
        assert (answer.status_code, answer.json()["where"]) == (422, "parameters[0].shape[0]")
        assert pushing.state() == "READY"
        assert (pushing.answers(), pushing.next_version()) == (before, new)
        push(http, sender, pushing.weights, new)


def assert_mismatch(answer: httpx.Response, faults: list[tuple[str, str]]) -> None:
    assert answer.status_code == 422, faults
    problem = answer.json()
    assert problem["type"] == "urn:rollmatch:manifest-mismatch", faults
    assert [(each["where"], each["fault"]) for each in problem["errors"]] == faults


# --- the learner's own pushes


@pytest.fixture(scope="module")
def learner(tied: Path) -> LoadedModel:
    """The weights of the shared server before and after a test."""
    return loaded_from(tied)


@pytest.fixture(scope="module")
def changed(other_tied: Path) -> LoadedModel:
    """The learner after an update of every weight."""
    return loaded_from(other_tied)


@pytest.fixture
def client(pushing: Pushing) -> Iterator[RolloutClient]:
    with RolloutClient(pushing.server.process.base_url, timeout_s=60.0) as client:
        yield client


@contextmanager
def pusher(
    client: RolloutClient, loaded: LoadedModel, verify: Verify = "full", join: Join = join_group
) -> Iterator[WeightPusher]:
    choice, (port,) = OneSource(MergedWeights(loaded.model)), free_ports(1)
    pusher = WeightPusher(client, port, choice, "gloo", BUCKET_BYTES, verify, join=join)
    yield pusher
    pusher.close()


def differing(client: RolloutClient, loaded: LoadedModel) -> set[str]:
    """Prompts to which the newest version and the learner give different log-probabilities."""
    results: list[ProbeResult] = Probe(loaded, "float32").ask(
        client.infer, client.info().weights_version
    )
    assert all(result.compared > 1 for result in results)
    return {result.prompt for result in results if result.difference is not None}


@pytest.mark.req("SYNC-02", "SYNC-05", "SYNC-06", "SYNC-09", "SYNC-10", "WIRE-03")
def test_after_a_push_log_probabilities_are_those_of_the_learner(
    client: RolloutClient, changed: LoadedModel
) -> None:
    """And not before, where a version without the new weights would be seen."""
    assert differing(client, changed) == {"text", "image"}
    version = client.info().weights_version + 1
    with pusher(client, changed) as pushes:
        report = pushes.push(version)
    parameters = dict(changed.model.named_parameters())
    assert report.status.weights_version == version
    assert report.verified == len(parameters)
    assert report.bytes == sum(p.nbytes for p in parameters.values())
    assert {"pause", "transfer", "load", "verify", "caches", "send", "total"} <= set(report.seconds)
    assert differing(client, changed) == set()
    assert changed.model.training, "the probe leaves the model as it was"
    with pytest.raises(ProblemError, match="other weights"):
        Probe(changed, "float32").ask(client.infer, version + 1)


class Corrupting:
    """A weight group that sends some weights otherwise than they were digested."""

    def __init__(self, group: WeightGroup, wrong: Weights) -> None:
        self._group, self._wrong = group, wrong
        self.close, self.abandon = group.close, group.abandon

    def send(self, parameters: Sequence[ParameterMeta], weights: Stream) -> None:
        self._group.send(parameters, ((n, self._wrong.get(n, weight)) for n, weight in weights))


@pytest.mark.slow
@pytest.mark.req("SYNC-05", "SYNC-06")
def test_weights_that_arrive_changed_poison_and_are_named(
    pushing: Pushing, client: RolloutClient, learner: LoadedModel, changed: LoadedModel
) -> None:
    old = {name: p.detach() for name, p in learner.model.named_parameters()}
    version = client.info().weights_version + 1
    sampled = sample(MergedWeights(changed.model).metadata("float32"), version)
    in_sample = next(name for name in sampled if name.endswith("k_proj.weight"))
    new = {name: p.detach() for name, p in changed.model.named_parameters()}
    nudged = new[Q_PROJ].clone()
    nudged[5, 7] = torch.nextafter(nudged[5, 7], torch.tensor(torch.inf))
    faults: list[tuple[Weights, Verify]] = [
        ({PATCHES: old[PATCHES]}, "full"),
        ({EMBEDDING: old[EMBEDDING]}, "full"),
        ({Q_PROJ: new[K_PROJ], K_PROJ: new[Q_PROJ]}, "full"),
        ({Q_PROJ: nudged}, "full"),
        ({in_sample: old[in_sample]}, "sample"),
    ]
    for wrong, verify in faults:

        def join(
            body: InitCommunicator, given_up: threading.Event, wrong: Weights = wrong
        ) -> WeightGroup:
            return Corrupting(join_group(body, given_up), wrong)

        with pusher(client, changed, verify, join) as pushes:
            with pytest.raises(WeightSyncError) as caught:
                pushes.push(version)
            assert (caught.value.side, caught.value.phase) == ("server", "verify")
            assert set(caught.value.parameters) == wrong.keys()
            assert all(name in str(caught.value) for name in wrong)
        pushing.assert_poisoned()
        with pytest.raises(ProblemError, match="full push"):
            client.infer(probe_call())
    with pusher(client, changed) as pushes:
        assert pushes.push(version).verified == len(list(changed.model.parameters()))
    assert differing(client, changed) == set()


@pytest.mark.slow
@pytest.mark.req("SYNC-06")
def test_the_probe_command_compares_a_server_with_a_checkpoint(
    server: RunningServer, tied: Path, tmp_path: Path
) -> None:
    address = {"base_url": server.process.base_url, "group_port": free_ports(1)[0]}
    mapping = small_mapping(
        tied,
        ToyData.under(tmp_path),
        tmp_path / "run",
        rollout_matching={"vllm": {"mode": "server", "server": {"servers": [address]}}},
    )
    config = tmp_path / "probe.yaml"
    config.write_text(dump_mapping(mapping))
    result = CliRunner().invoke(app, ["probe", "--config", str(config)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert result.output.count("as the learner") == 2
