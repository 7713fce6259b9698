"""A learner to be killed in the middle of a push, by the real client and pusher.

    python -m tests.contract.dying_pusher URL GROUP_PORT CHECKPOINT PHASE [TRANSPORT]

TRANSPORT is gloo, or nccl with the weights in bfloat16 on the current GPU.

Prints the name of the phase when it is there, and then waits to be killed:

    rendezvous   the server waits for it to join
    start        the server has paused
    transfer     half of the weights are sent
    finish       all are sent
"""

import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from learner.rollout.client import RolloutClient
from learner.rollout.sync.push import WeightPusher
from learner.rollout.sync.transports import WeightGroup, join_group
from learner.rollout.sync.weights import OneSource
from shared_contracts.weights import (
    DtypeName,
    FinishWeightUpdate,
    InitCommunicator,
    ParameterMeta,
    StartWeightUpdate,
    SyncReport,
    Transport,
    WeightStatus,
)
from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import BUCKET_BYTES, Weights, manifest

# A next learner must not wait so long.
TIMEOUT_S = 100.0


class Doomed:
    """Stops in one phase."""

    def __init__(self, phase: str) -> None:
        self._phase = phase

    def at(self, phase: str) -> None:
        if phase == self._phase:
            print(phase, flush=True)
            threading.Event().wait(120)

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


def push(url: str, port: str, checkpoint: str, phase: str, transport: Transport = "gloo") -> None:
    doomed, weights = Doomed(phase), read_weights(Path(checkpoint))
    if transport == "nccl":
        weights = {name: weight.to("cuda", torch.bfloat16) for name, weight in weights.items()}
    source = OneSource(DoomedWeights(weights, doomed))
    make = partial(WeightPusher, transport=transport, bucket_bytes=BUCKET_BYTES, verify="sample")
    client = DoomedClient(url, doomed)
    version = client.health().weights_version + 1
    make(client, int(port), source, join=doomed.join).push(version)


if __name__ == "__main__":
    push(*sys.argv[1:])  # type: ignore[arg-type]  # the transport is one
