"""Rank 1 of a gloo group of two: receives tensors as gloo sends them, and drops them.

    python -m benchmarks.peers.gloo_receiver PORT BYTES

Receives BYTES for each line of its input, and then prints a line.
"""

import sys
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore

from benchmarks.processes import end_with_benchmark


def gloo_group(port: int, rank: int) -> Any:
    """Join the group of two whose store rank 0 opens at `port`."""
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(store, rank, 2, options)


def main() -> None:
    end_with_benchmark()
    port, size = map(int, sys.argv[1:])
    group = gloo_group(port, 1)
    for _ in sys.stdin:
        group.broadcast(torch.empty(size, dtype=torch.uint8), 0).wait()
        print("received", flush=True)


if __name__ == "__main__":
    main()
