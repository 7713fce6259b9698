"""Pushes into the shared server, by a plain sender and by the real learner, and faults in them."""

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from learner.data.toy import ToyData
from learner.models.load import LoadedModel
from learner.rollout.client import RolloutClient
from learner.rollout.sync.probe import ProofOfEffect, WeightsDiffer, probe_call
from learner.rollout.sync.push import WeightPusher, WeightSyncError
from learner.rollout.sync.weights import MergedWeights, SyncMode
from shared_contracts.errors import ContractError, ProblemError
from shared_contracts.weights import DtypeName, ParameterMeta
from tests.contract import reference
from tests.contract.running_server import (
    PROMPT,
    RunningServer,
    image_request,
    response_ids,
    running_server,
    text_request,
)
from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import (
    Weights,
    begin_transfer,
    finish,
    manifest,
    pack,
    push,
    start,
    trailer,
    weight_group,
)
from tests.unit.loaded_models import load_small


@dataclass
class Pushing:
    """A server, and other weights than those it has before and after a test."""

    server: RunningServer
    others: Weights

    def held(self) -> tuple[str, int]:
        """State and version of the weights."""
        info = self.server.info()
        return info["weights_state"], info["weights_version"]

    def next_version(self) -> int:
        return self.held()[1] + 1

    def pusher(self, source: MergedWeights) -> closing[WeightPusher]:
        return self.server.pusher(SyncMode(source, None, fallback_to_full=False))

    def answers(self, *requests: dict[str, Any]) -> list[list[int]]:
        envelopes = self.server.infer(list(requests) or [text_request()], max_tokens=24)
        return [response_ids(envelope) for envelope in envelopes]


@pytest.fixture
def pushing(server: RunningServer, tied: Path, other_tied: Path) -> Iterator[Pushing]:
    """Ends with the weights of the beginning."""
    pushing = Pushing(server, read_weights(other_tied))
    before = pushing.answers()
    yield pushing
    if pushing.held()[0] != "READY" or pushing.answers() != before:
        server.push(tied)
    assert pushing.answers() == before


@pytest.mark.req("SYNC-03", "SYNC-05", "SYNC-09", "WIRE-03")
def test_calls_see_the_old_version_before_an_update_and_then_the_new_one(pushing: Pushing) -> None:
    """No sequence has weights of two versions; a call during the update waits for the end."""
    server = pushing.server
    old = server.version
    new = old + 7
    with weight_group(server.http) as sender, ThreadPoolExecutor() as threads:
        running = threads.submit(
            server.infer, [text_request()] * 4, temperature=1.0, seed=5, max_tokens=200
        )
        server.wait_for_sequences(lambda number: number > 0)
        assert start(server.http, new, pushing.others).json()["weights_version"] == old
        waiting = threads.submit(server.infer, [text_request()])
        transfer = begin_transfer(server.http)
        sender.send(pushing.others)
        assert transfer.result(120).json() == {
            "state": "UPDATING",
            "weights_version": old,
            "server_epoch": server.http.get("/live/").json()["server_epoch"],
        }
        assert not waiting.done()
        status = finish(server.http).json()["status"]
        stamps = [
            [envelope["coordexp"]["weights_version"] for envelope in call.result()]
            for call in (running, waiting)
        ]
    assert (status["state"], status["weights_version"]) == ("READY", new)
    assert server.http.get("/health/").json()["weights_version"] == new
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
    with weight_group(server.http) as sender:
        push(server.http, sender, pushing.others, pushing.next_version())
    assert pushing.answers(*requests)[1] == reference.greedy_ids(other_tied, PROMPT, [scene], 24)


# --- the learner's pushes, and what its faults are seen by

LAYER = "model.language_model.layers.1"
K_PROJ, V_PROJ, O_PROJ = (f"{LAYER}.self_attn.{name}_proj.weight" for name in "kvo")
NORM = f"{LAYER}.input_layernorm.weight"
EMBEDDING = "model.language_model.embed_tokens.weight"
HEAD = "lm_head.weight"

Change = Callable[[Weights], Weights]


@pytest.fixture(scope="module")
def learner(other_tied: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Other weights than those of the shared server, and a LoRA adapter."""
    folder = tmp_path_factory.mktemp("learner")
    tuner = {"train_type": "lora", "lora_rank": 4, "lora_alpha": 8}
    return load_small(other_tied, ToyData.under(folder), folder / "run", tuner=tuner)


@pytest.fixture
def client(pushing: Pushing) -> RolloutClient:
    return RolloutClient(pushing.server.process.base_url, timeout_s=60.0)


class Changed(MergedWeights):
    """The merged weights of a model, changed."""

    def __init__(self, loaded: LoadedModel, change: Change) -> None:
        super().__init__(loaded.model)
        self.change = change

    def metadata(self, dtype: DtypeName) -> list[ParameterMeta]:
        return manifest(self._weights(dtype))

    def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        yield from self._weights(dtype).items()

    def _weights(self, dtype: DtypeName) -> Weights:
        return self.change(dict(super().tensors(dtype)))


@pytest.mark.req("SYNC-02", "SYNC-05", "SYNC-06", "SYNC-10", "WIRE-03")
def test_after_a_push_log_probabilities_are_those_of_the_learner(
    pushing: Pushing, client: RolloutClient, learner: LoadedModel
) -> None:
    """Merged, from an adapter; and asked before, where caches would be stale."""
    proof, version = ProofOfEffect(learner, "full"), client.info().weights_version + 1
    with pytest.raises(WeightsDiffer, match=r"differ from the trainer's by (0\.[1-9]|[1-9])"):
        proof.check("here", client.infer(probe_call(version - 1)), "float32")
    with pushing.pusher(MergedWeights(learner.model)) as pushes:
        report = pushes.push(version)
    assert report.status.weights_version == version
    assert set(report.seconds) == {"pause", "transfer", "finish", "total"}
    assert proof.check("here", client.infer(probe_call(version)), "float32") < 1e-4
    assert learner.model.training, "the proof leaves the model as it was"
    with pytest.raises(ProblemError, match="other weights"):
        client.infer(probe_call(version + 1))


@pytest.mark.req("SYNC-06")
@pytest.mark.parametrize(
    "change",
    [
        lambda new, base: new | {K_PROJ: new[V_PROJ], V_PROJ: new[K_PROJ]},
        lambda new, base: new | {O_PROJ: new[O_PROJ].T.contiguous()},
        lambda new, base: {name: weight.bfloat16().float() for name, weight in new.items()},
        lambda new, base: {name: base[name] for name in new},
    ],
    ids=["swapped names", "transposed", "rounded to bfloat16", "adapter not merged"],
)
def test_the_proof_of_effect_sees_weights_that_are_not_the_trainers(
    pushing: Pushing,
    client: RolloutClient,
    learner: LoadedModel,
    change: Callable[[Weights, Weights], Weights],
) -> None:
    """Digests and manifest are right: the push itself succeeds."""
    wrong = Changed(learner, lambda weights: change(weights, pushing.others))
    with pushing.pusher(wrong) as pushes:
        pushes.push(pushing.next_version())
    with pytest.raises(WeightsDiffer, match="does not compute with the weights"):
        ProofOfEffect(learner, "full").check("here", client.infer(probe_call()), "float32")


@pytest.mark.req("SYNC-05", "SYNC-06", "WIRE-05")
def test_a_manifest_that_does_not_fit_is_refused_and_the_old_weights_serve_on(
    pushing: Pushing, learner: LoadedModel
) -> None:
    """Left out, tied twice, another shape and another type."""

    def change(new: Weights) -> Weights:
        left = {name: weight for name, weight in new.items() if name != NORM}
        other = {K_PROJ: new[K_PROJ][:64], V_PROJ: new[V_PROJ].half()}
        return left | other | {HEAD: new[EMBEDDING]}

    before = pushing.answers(), pushing.held()
    with (
        pushing.pusher(Changed(learner, change)) as pushes,
        pytest.raises(WeightSyncError) as caught,
    ):
        pushes.push(pushing.next_version())
    cause = caught.value.__cause__
    assert (caught.value.side, caught.value.phase) == ("server", "start")
    assert isinstance(cause, ProblemError)
    assert (cause.problem.status, cause.problem.kind) == (422, "manifest-mismatch")
    assert "4 parameter(s) do not fit the model" in cause.problem.detail
    assert (pushing.answers(), pushing.held()) == before


@pytest.mark.slow
@pytest.mark.req("SYNC-05", "SYNC-06", "SYNC-07")
def test_a_bit_that_flips_on_the_wire_breaks_the_push_until_the_next_one(pushing: Pushing) -> None:
    server, http, version = pushing.server, pushing.server.http, pushing.next_version()
    buckets = pack(pushing.others)
    flipped = bytearray(buckets[1])
    flipped[4242] ^= 1
    with weight_group(http) as sender:
        assert start(http, version, pushing.others).status_code == 200
        transfer = begin_transfer(http)
        for data in (buckets[0], bytes(flipped), *buckets[2:], trailer(buckets)):
            sender.broadcast(data)
        problem = transfer.result(120).json()
        assert problem["type"] == "urn:rollmatch:weight-transfer-failed"
        assert f"1 of {len(buckets)} buckets are not as they were sent" in problem["detail"]
        assert finish(http).status_code == 409
    assert server.post_infer([text_request()]).json()["type"] == "urn:rollmatch:push-needed"
    server.wait_for_replicas(lambda replicas: replicas[0]["state"] == "needs-push")
    for answer in (http.get("/health/"), server.post_infer([text_request()])):
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:rollmatch:push-needed")
    assert http.get("/live/").status_code == 200
    assert pushing.held() == ("PUSH_NEEDED", version - 1)


@pytest.mark.req("SYNC-04", "SYNC-07")
def test_a_newer_learner_takes_the_server_over_and_the_older_one_ends(
    pushing: Pushing, client: RolloutClient, learner: LoadedModel
) -> None:
    source = MergedWeights(learner.model)
    newer = rf"the learner on {socket.gethostname()} \(process {os.getpid()}\)"
    with pushing.pusher(source) as first, pushing.pusher(source) as second:
        first.push(pushing.next_version())
        second.connect()
        for _ in range(2):  # also with a new group
            with pytest.raises(ContractError, match=f"{newer} has taken this server over"):
                first.push(pushing.next_version())
        second.push(pushing.next_version())
    assert client.info().owner is None


# --- an engine that answers from what its old weights cached


STALE_ENGINE = """
from rollout_server.engines import vllm

def build(settings, index):
    from rollout_server.engines.vllm.engine import VllmEngine

    class StaleEngine(VllmEngine):
        async def pause(self):
            await self._llm.pause_generation(mode="wait", clear_cache=False)

        async def finish_weight_update(self, version):
            await self._llm.finish_weight_update()
            await self._llm.update_weight_version(str(version))
            self.weights_version = version

    return StaleEngine.build(settings, index)

vllm.build = build
"""


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.req("SYNC-06")
def test_the_proof_of_effect_sees_caches_of_the_old_weights(
    tied: Path, other_tied: Path, toy_data: ToyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(STALE_ENGINE)  # Python imports it when it starts
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    learner = load_small(other_tied, toy_data, tmp_path / "run")
    with running_server(tied, tmp_path / "server") as server:
        client = RolloutClient(server.process.base_url, timeout_s=60.0)
        client.infer(probe_call())  # caches the prompts
        source = SyncMode(MergedWeights(learner.model), None, fallback_to_full=False)
        server.push_by_learner(source)
        with pytest.raises(WeightsDiffer, match="does not compute with the weights"):
            ProofOfEffect(learner, "full").check("here", client.infer(probe_call(1)), "float32")
