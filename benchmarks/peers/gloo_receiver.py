"""Rank 1 of a gloo group of two: receives what the benchmark broadcasts, and drops it.

    python -m benchmarks.peers.gloo_receiver INIT

INIT is a JSON object of `GlooInitInfo`. Reads a line of JSON per broadcast and answers `{}`
when it has come:

    {"raw": BYTES}              one tensor of so many bytes, as gloo sends it
    {"parameters": [...]}       a manifest, in buckets, received as a server's worker does
"""

import json
import os
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import torch

from benchmarks.processes import end_with_benchmark
from rollout_server.engines.vllm.weight_engines import (
    GlooInitInfo,
    GlooUpdateInfo,
    GlooWeightTransferEngine,
    join_group,
)


class Dropped:
    """A model that loads nothing."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _ in weights:
            pass


class Receiver:
    """A worker's transfer engine in a group with the benchmark, which opened the store.

    model: has `load_weights`.
    """

    def __init__(self, info: GlooInitInfo, model: object) -> None:
        config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0), model_config=None)
        self._engine = GlooWeightTransferEngine(
            cast(Any, None), cast(Any, config), torch.device("cpu"), cast(torch.nn.Module, model)
        )
        self._engine.init_transfer_engine(info)

    def receive(self, parameters: list[dict[str, Any]]) -> None:
        self._engine.receive_weights(GlooUpdateInfo(parameters=parameters))


def main() -> None:
    end_with_benchmark()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    info = GlooInitInfo(**json.loads(sys.argv[1]))
    raw = join_group(info, 1)
    print("ready", file=answers, flush=True)
    info.port = int(sys.stdin.readline())
    receiver = Receiver(info, Dropped())
    print("ready", file=answers, flush=True)
    while line := sys.stdin.readline():
        asked = json.loads(line)
        if "raw" in asked:
            tensor = torch.empty(asked["raw"], dtype=torch.uint8)
            raw.broadcast(tensor, 0).wait()  # type: ignore[attr-defined]
        else:
            receiver.receive(asked["parameters"])
        print("{}", file=answers, flush=True)


if __name__ == "__main__":
    main()
