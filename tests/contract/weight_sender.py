"""Rank 0 of a gloo weight group in plain torch and numpy, written from the wire format alone."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import httpx
import numpy as np
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from learner.rollout.parallel_calls import in_thread
from learner.rollout.server_process import free_ports
from shared_contracts.weights import ParameterMeta, plan_buckets

BUCKET_BYTES = 2**20
CALL: dict[str, Any] = {"attempt": "sender"}

Weights = dict[str, torch.Tensor]


def join(port: int, rank: int, world_size: int, timeout_s: float) -> Any:
    """Return the gloo group of a rank, once all ranks have joined it."""
    timeout = timedelta(seconds=timeout_s)
    server = TCPStore("127.0.0.1", port, None, False, timeout, wait_for_workers=False)
    store = PrefixStore("group/0", server)
    store.set(f"ready/{rank}", "")
    store.wait([f"ready/{other}" for other in range(world_size)])
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group: Any = ProcessGroupGloo(store, rank, world_size, options)
    group.allreduce(torch.zeros(1)).wait()
    return group


class Sender:
    """Rank 0 of a group."""

    def __init__(self, port: int, world_size: int, timeout_s: float) -> None:
        self._group = join(port, 0, world_size, timeout_s)

    def send(self, weights: Weights) -> None:
        """Broadcast all buckets and the trailer."""
        packed = pack(weights)
        for data in (*packed, trailer(packed)):
            self.broadcast(data)

    def broadcast(self, data: bytes) -> None:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._group.broadcast(tensor, 0).wait()

    def abandon(self) -> None:
        """Leave the group."""
        self._group = None


def pack(weights: Weights) -> list[bytes]:
    """Return the buckets of a push."""
    parameters = manifest(weights)
    left = (w.reshape(-1).view(torch.uint8).numpy().tobytes() for w in weights.values())
    return [
        b"".join(next(left).ljust(each.wire_bytes, b"\0") for each in bucket)
        for bucket in plan_buckets(parameters, BUCKET_BYTES)
    ]


def trailer(buckets: Sequence[bytes]) -> bytes:
    return np.array([digest(bucket) for bucket in buckets], dtype=np.uint64).tobytes()


def digest(bucket: bytes) -> int:
    """Return the digest of a bucket by its definition, as an unsigned number."""
    words = np.frombuffer(bucket, dtype=np.uint64)
    odd = 2 * np.arange(len(words), dtype=np.uint64) + np.uint64(1)
    return int((words * odd).sum(dtype=np.uint64))


def manifest(weights: Weights) -> list[ParameterMeta]:
    return [
        ParameterMeta.model_validate(
            {"name": name, "dtype": str(w.dtype).removeprefix("torch."), "shape": list(w.shape)}
        )
        for name, w in weights.items()
    ]


@contextmanager
def weight_group(
    http: httpx.Client, world_size: int = 2, timeout_s: float = 30.0
) -> Iterator[Sender]:
    """Form the group with the server; leave it at the end."""
    (port,) = free_ports(1)
    body = CALL | {"host": "127.0.0.1", "port": port, "world_size": world_size}
    body |= {"bucket_bytes": BUCKET_BYTES, "timeout_s": timeout_s}
    joined = in_thread(partial(http.post, "/init_communicator/", json=body))
    sender = Sender(port, world_size, timeout_s)
    try:
        assert joined.result(120).status_code == 200, joined.result().text
        yield sender
    finally:
        sender.abandon()


def start(http: httpx.Client, version: int, weights: Weights) -> httpx.Response:
    parameters = [parameter.model_dump() for parameter in manifest(weights)]
    body = CALL | {"version": version, "parameters": parameters}
    return http.post("/start_weight_update/", json=body)


def begin_transfer(http: httpx.Client) -> Future[httpx.Response]:
    return in_thread(partial(http.post, "/update_weights/", json=CALL))


def finish(http: httpx.Client) -> httpx.Response:
    return http.post("/finish_weight_update/", json=CALL)


def push(http: httpx.Client, sender: Sender, weights: Weights, version: int) -> dict[str, Any]:
    """Make a whole push that must succeed; return the server's report."""
    answer = start(http, version, weights)
    assert answer.status_code == 200, answer.text
    transfer = begin_transfer(http)
    sender.send(weights)
    assert transfer.result(120).status_code == 200, transfer.result().text
    answer = finish(http)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())
