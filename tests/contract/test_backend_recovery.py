"""The learner's backend over the shared server, which loses its weights in between."""

from pathlib import Path

import pytest
from transformers import Qwen3VLForConditionalGeneration

from learner.data.jsonl import build_request
from learner.rollout.backend import Journal
from learner.rollout.client import RolloutClient
from learner.rollout.server import ServerBackend
from learner.rollout.server_process import free_ports
from learner.rollout.sync.push import WeightPusher
from learner.rollout.sync.weights import MergedWeights, OneSource
from learner.types import Sample
from shared_contracts.infer import RequestConfig
from tests.contract.running_server import PROMPT, RunningServer
from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import start, weight_group


@pytest.mark.req("SYNC-05", "SYNC-07", "DIST-03", "SEED-02")
def test_a_server_that_was_poisoned_gets_its_weights_again_and_gives_the_same_answers(
    server: RunningServer, tied: Path
) -> None:
    model = Qwen3VLForConditionalGeneration.from_pretrained(tied)
    (port,) = free_ports(1)
    client, journal = RolloutClient(server.process.base_url, timeout_s=60.0), Journal()
    pusher = WeightPusher(client, port, OneSource(MergedWeights(model)), "gloo", 2**20, "sample")
    backend = ServerBackend([client], [pusher], decode_batch_size=2, journal=journal)
    samples = [Sample(str(number), (), 64, 64, ()) for number in range(3)]
    requests = [build_request(sample, f"{PROMPT} {sample.sample_id}", None) for sample in samples]
    config = RequestConfig(max_tokens=8, temperature=1.0, seed=5, return_details=True)
    try:
        version = backend.connect() + 1
        backend.push_weights(version)
        before = backend.rollout(requests, config)
        poison(server, tied, version + 1)
        journal.take()
        assert backend.rollout(requests, config) == before
    finally:
        backend.close()
    assert [output.seed for output in before] == [5, 6, 7]
    assert {output.weights_version for output in before} == {(version, version)}
    record, payload = journal.take()
    metrics = payload.metrics()
    assert (metrics["sync/pushes"], metrics["sync/repushes"]) == (1, 1)
    assert "a full push" in record["lost"][0][1]


def poison(server: RunningServer, checkpoint: Path, version: int) -> None:
    """Another learner takes the weight group, begins a push and leaves."""
    (port,) = free_ports(1)
    with weight_group(server.http, port):
        assert start(server.http, version, read_weights(checkpoint)).status_code == 200
        server.http.post("/close_communicator/", json={"attempt": None})
    assert server.http.get("/health/").status_code == 503
