"""A worker that receives a push as a server's does, and takes a fixed time to load each byte.

    python -m benchmarks.peers.fixed_load INIT GB_PER_S

INIT is a JSON object of `GlooInitInfo`. Loading waits and computes nothing, as a GPU's engine
does nothing on the host. Reads a manifest as a line of JSON per push and answers `{}`.
"""

import json
import os
import sys
import time
from collections.abc import Iterable

import torch

from benchmarks.peers.gloo_receiver import Receiver
from benchmarks.processes import end_with_benchmark
from rollout_server.engines.vllm.weight_engines import GlooInitInfo


class Waits:
    """A model that loads at a fixed rate.

    gb_per_s: of all bytes.
    """

    def __init__(self, gb_per_s: float) -> None:
        self._bytes_per_s = 1e9 * gb_per_s

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        time.sleep(sum(tensor.nbytes for _, tensor in weights) / self._bytes_per_s)


def main() -> None:
    end_with_benchmark()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    init, gb_per_s = sys.argv[1:]
    receiver = Receiver(GlooInitInfo(**json.loads(init)), Waits(float(gb_per_s)))
    print("ready", file=answers, flush=True)
    while line := sys.stdin.readline():
        receiver.receive(json.loads(line))
        print("{}", file=answers, flush=True)


if __name__ == "__main__":
    main()
