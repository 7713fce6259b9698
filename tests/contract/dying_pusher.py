"""A learner that stops in the middle of a push: the real client and pusher.

    python -m tests.contract.dying_pusher URL GROUP_PORT CHECKPOINT PHASE TIMEOUT_S [TRANSPORT]

TRANSPORT is gloo, or nccl with the weights on the current GPU.

Prints PHASE when it is there, and goes on with the push after a line or the end of its input:

    rendezvous   the server waits for it to join
    start        the next call has the server drain
    transfer     half of the weights are sent
    finish       all are sent, and no call is open
"""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learner.rollout.client import RolloutClient
from learner.rollout.sync.group import Sender, join_group
from learner.rollout.sync.push import WeightPusher
from learner.rollout.sync.weights import MergedWeights, SyncMode
from shared_contracts.cli import run_program
from shared_contracts.weights import (
    DtypeName,
    GroupCall,
    InitCommunicator,
    ParameterMeta,
    StartWeightUpdate,
    SyncReport,
    Transport,
    WeightStatus,
)
from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import BUCKET_BYTES, Weights, manifest


class ClientWithPhases(RolloutClient):
    """The learner's client. at: called with the name of each phase before it, and `finished`."""

    def __init__(
        self, url: str, timeout_s: float, at: Callable[[str], None], **options: Any
    ) -> None:
        super().__init__(url, timeout_s, **options)
        self._at = at

    def start_weight_update(self, body: StartWeightUpdate) -> WeightStatus:
        self._at("start")
        return super().start_weight_update(body)

    def finish_weight_update(self, body: GroupCall) -> SyncReport:
        self._at("finish")
        report = super().finish_weight_update(body)
        self._at("finished")
        return report


class WeightsWithPhase(MergedWeights):
    """Weights of a checkpoint. at: called with `transfer` when half of them are sent."""

    def __init__(self, weights: Weights, at: Callable[[str], None] = lambda phase: None) -> None:
        self._weights = weights
        self._at = at

    def metadata(self, dtype: DtypeName) -> list[ParameterMeta]:
        return manifest({n: w.to(getattr(torch, dtype)) for n, w in self._weights.items()})

    def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        for number, (name, weight) in enumerate(self._weights.items()):
            if number == len(self._weights) // 2:
                self._at("transfer")
            yield name, weight.to(getattr(torch, dtype))


def push(
    url: str, port: str, checkpoint: str, phase: str, timeout_s: str, transport: Transport = "gloo"
) -> None:
    def at(reached: str) -> None:
        if reached == phase:
            print(phase, flush=True)
            sys.stdin.readline()

    def join(body: InitCommunicator, given_up: threading.Event, number: int) -> Sender:
        at("rendezvous")
        return join_group(body, given_up, number)

    weights = read_weights(Path(checkpoint))
    if transport == "nccl":
        weights = {name: weight.cuda() for name, weight in weights.items()}
    mode = SyncMode(WeightsWithPhase(weights, at), None, fallback_to_full=False)
    client = ClientWithPhases(url, float(timeout_s), at)
    version = client.info().weights_version + 1
    pusher = WeightPusher(client, int(port), mode, transport, BUCKET_BYTES, join=join)
    pusher.push(version)
    pusher.close()


if __name__ == "__main__":
    arguments: Any = sys.argv[1:]
    run_program(lambda: push(*arguments))
