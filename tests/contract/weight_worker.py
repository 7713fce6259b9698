"""The other ranks of a gloo weight group in plain torch, written from the wire format alone."""

from collections.abc import Sequence
from typing import Any

import torch

from shared_contracts.weights import InitCommunicator, ParameterMeta, plan_buckets
from tests.contract.weight_sender import Weights, join, trailer


class Worker:
    """The methods of `ScriptedEngine` that have a worker's part. weights: received."""

    def __init__(self) -> None:
        self.weights: Weights = {}
        self._group: Any = None
        self._bucket_bytes = 0

    def join_group(self, init: InitCommunicator, rank: int) -> None:
        self._group = join(init.port, rank, init.world_size, init.timeout_s)
        self._bucket_bytes = init.bucket_bytes

    def leave_group(self) -> None:
        self._group = None

    def receive_weights(self, parameters: Sequence[ParameterMeta]) -> None:
        """Raises RuntimeError (torch's), or if a digest differs."""
        buckets = []
        for bucket in plan_buckets(parameters, self._bucket_bytes):
            coming = parameters[bucket.start : bucket.stop]
            data = self._broadcast(sum(p.wire_bytes for p in coming))
            buckets.append(data.numpy().tobytes())
            for p in coming:
                own, data = data[: p.num_bytes], data[p.wire_bytes :]
                self.weights[p.name] = own.view(getattr(torch, p.dtype)).view(p.shape)
        if self._broadcast(8 * len(buckets)).numpy().tobytes() != trailer(buckets):
            raise RuntimeError("a digest differs")

    def _broadcast(self, size: int) -> torch.Tensor:
        data = torch.empty(size, dtype=torch.uint8)
        self._group.broadcast(data, 0).wait()
        return data
