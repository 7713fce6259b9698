"""Two learner processes over the shared server; threads are the processes, all else is real."""

import threading
from contextlib import closing
from pathlib import Path

import pytest
from torch.distributed import HashStore
from transformers import Qwen3VLForConditionalGeneration

from learner.data.jsonl import build_request
from learner.distributed.peers import SINGLE_PROCESS, Peers, StorePeers, Timing
from learner.rollout.backend import Journal
from learner.rollout.client import RolloutClient
from learner.rollout.parallel_calls import in_parallel
from learner.rollout.server import ServerBackend
from learner.rollout.server_process import free_ports
from learner.rollout.sync.push import WeightPusher
from learner.rollout.sync.weights import MergedWeights, OneSource
from learner.types import Sample
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from tests.contract.running_server import PROMPT, RunningServer
from tests.contract.test_backend_recovery import poison

COUNT = 4
CONFIG = RequestConfig(max_tokens=8, temperature=0.0, seed=5, return_details=True)


@pytest.mark.req("SYNC-07", "SYNC-08", "SEED-02", "RES-04")
def test_two_processes_get_the_answers_of_one_though_the_server_loses_its_weights(
    server: RunningServer, tied: Path
) -> None:
    """In their second round process 0 does not ask: it pushes again while it waits for the other.

    Greedy, so that the answers are the same whoever asks.
    """
    model = Qwen3VLForConditionalGeneration.from_pretrained(tied)
    journals = [Journal(), Journal()]
    store, poisoned = HashStore(), threading.Event()
    requests = [
        build_request(Sample(str(number), (), 64, 64, ()), f"{PROMPT} {number}", None)
        for number in range(COUNT)
    ]

    def backend_of(peers: Peers, journal: Journal) -> ServerBackend:
        client = RolloutClient(server.process.base_url, timeout_s=60.0)
        source, (port,) = OneSource(MergedWeights(model)), free_ports(1)
        pusher = WeightPusher(client, port, source, "gloo", 2**20, "sample")
        channels = [pusher] if peers.rank == 0 else []
        return ServerBackend([client], channels, 2, journal, peers=peers)

    def texts(backend: ServerBackend, asked: list[RolloutInferRequest]) -> list[list[int]]:
        return [output.response_token_ids for output in backend.rollout(asked, CONFIG)]

    def process(rank: int) -> tuple[list[list[int]], list[list[int]]]:
        timing = Timing(beat=0.2)
        peers = StorePeers(rank, 2, lambda: store, timing, end=lambda _: None)
        with peers.guarded(), closing(backend_of(peers, journals[rank])) as backend:
            version = backend.connect() + 1
            backend.push_weights(version)
            own = requests[rank::2]
            before = texts(backend, own)
            peers.all_gather(lambda: None)
            after = before
            if rank == 1:
                poison(server, tied, version + 1)
                poisoned.set()
                after = peers.all_gather(lambda: texts(backend, own), meanwhile=backend.heal)[1]
            else:
                assert poisoned.wait(60.0)
                peers.all_gather(lambda: None, meanwhile=backend.heal)
            return before, after

    with closing(backend_of(SINGLE_PROCESS, Journal())) as alone:
        alone.push_weights(alone.connect() + 1)
        expected = texts(alone, requests)
    first, second = in_parallel([lambda: process(0), lambda: process(1)])
    assert [first[0], second[0]] == [expected[0::2], expected[1::2]]
    assert second[1] == second[0]
    metrics = [journal.take()[1].metrics() for journal in journals]
    assert [(one["sync/pushes"], one["sync/repushes"]) for one in metrics] == [(2, 1), (0, 0)]
