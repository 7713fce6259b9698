"""A learner to be killed in the middle of a push, by the real client and pusher.

    python -m tests.contract.dying_pusher URL GROUP_PORT CHECKPOINT PHASE

Says the name of the phase when it is there, and then waits for its end:

    rendezvous   the server waits for it to join
    start        the server has paused
    transfer     half of the weights are sent
    finish       all are sent
"""

import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from torch import Tensor

from learner.rollout.client import RolloutClient
from learner.sync.groups import WeightGroup, join_group
from learner.sync.push import WeightPusher
from learner.sync.source import OneSource
from shared_contracts.weights import (
    DtypeName,
    FinishWeightUpdate,
    InitCommunicator,
    ParameterMeta,
    StartWeightUpdate,
    SyncReport,
    WeightStatus,
)
from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import BUCKET_BYTES, Weights, manifest

# What a next learner must not have to wait for.
TIMEOUT_S = 100.0


class Doomed:
    """Knows where to stop."""

    def __init__(self, phase: str) -> None:
        self._phase = phase

    def at(self, phase: str) -> None:
        if phase == self._phase:
            print(phase, flush=True)
            time.sleep(120)

    def join(self, body: InitCommunicator, given_up: threading.Event) -> WeightGroup:
        self.at("rendezvous")
        return join_group(body, given_up)


class DoomedClient(RolloutClient):
    def __init__(self, url: str, doomed: Doomed) -> None:
        super().__init__(url, TIMEOUT_S)
        self._doomed = doomed

    def start_weight_update(self, body: StartWeightUpdate) -> WeightStatus:
        status = super().start_weight_update(body)
        self._doomed.at("start")
        return status

    def finish_weight_update(self, body: FinishWeightUpdate) -> SyncReport:
        self._doomed.at("finish")
        return super().finish_weight_update(body)


class DoomedWeights:
    adapter = None
    base = None

    def __init__(self, weights: Weights, doomed: Doomed) -> None:
        self._weights = weights
        self._doomed = doomed

    def metadata(self, dtype: DtypeName) -> list[ParameterMeta]:
        return manifest(self._weights)

    def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        for number, named in enumerate(self._weights.items()):
            if number == len(self._weights) // 2:
                self._doomed.at("transfer")
            yield named


if __name__ == "__main__":
    url, port, checkpoint, phase = sys.argv[1:]
    doomed = Doomed(phase)
    source = OneSource(DoomedWeights(read_weights(Path(checkpoint)), doomed))
    make = partial(WeightPusher, transport="gloo", bucket_bytes=BUCKET_BYTES, verify="sample")
    client = DoomedClient(url, doomed)
    version = client.health().weights_version + 1
    make(client, int(port), source, join=doomed.join).push(version)
