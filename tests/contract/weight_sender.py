"""Rank 0 of a gloo weight group in plain torch, written from the wire format alone."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import httpx
import numpy as np
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from shared_contracts.weights import GLOO_STORE_PREFIX, ParameterMeta, plan_buckets

BUCKET_BYTES = 2**20

Weights = dict[str, torch.Tensor]

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Posting:
    """A POST under way in a thread; `answer()` waits for it."""

    def __init__(self, http: httpx.Client, path: str, body: dict[str, Any]) -> None:
        self._answers: list[httpx.Response] = []
        self._thread = threading.Thread(
            target=lambda: self._answers.append(http.post(path, json=body)), daemon=True
        )
        self._thread.start()

    def answer(self) -> httpx.Response:
        self._thread.join(timeout=120)
        return self._answers[0]


class Sender:
    """One member of a weight group: the learner's seat."""

    def __init__(self, port: int, world_size: int, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(
            "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout
        )
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._group = ProcessGroupGloo(
            PrefixStore(GLOO_STORE_PREFIX, store), 0, world_size, options
        )
        self._group.barrier().wait()  # type: ignore[attr-defined]

    def send(self, weights: Weights, buckets: int | None = None) -> None:
        """Broadcast all buckets, or only so many."""
        parameters = manifest(weights)
        tensors = list(weights.values())
        for bucket in plan_buckets(parameters, BUCKET_BYTES)[:buckets]:
            data = b"".join(
                tensors[i].numpy().tobytes().ljust(parameters[i].wire_bytes, b"\0") for i in bucket
            )
            packed = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._group.broadcast(packed, 0).wait()  # type: ignore[attr-defined]

    def leave(self) -> None:
        self._group.shutdown()


def manifest(weights: Weights) -> list[ParameterMeta]:
    return [
        ParameterMeta.model_validate(
            {"name": name, "dtype": str(w.dtype).removeprefix("torch."), "shape": list(w.shape)}
        )
        for name, w in weights.items()
    ]


def init_body(port: int, world_size: int = 2, timeout_s: float = 30.0) -> dict[str, Any]:
    return {
        "host": "127.0.0.1",
        "port": port,
        "world_size": world_size,
        "attempt": "sender",
        "bucket_bytes": BUCKET_BYTES,
        "timeout_s": timeout_s,
    }


@contextmanager
def weight_group(
    http: httpx.Client, port: int, world_size: int = 2, timeout_s: float = 30.0
) -> Iterator[Sender]:
    """Form the group with the server; leave it at the end."""
    posting = Posting(http, "/init_communicator/", init_body(port, world_size, timeout_s))
    sender = Sender(port, world_size, timeout_s)
    assert posting.answer().status_code == 200, posting.answer().text
    yield sender
    sender.leave()


def digest(weight: torch.Tensor, columns: Sequence[int] | None = None) -> str:
    """Digest of `weight` or of some of its columns, in numpy, by the definition alone."""
    if weight.numel() == 0:
        return "0" * 16
    matrix = weight.reshape(weight.shape[0] if weight.ndim else 1, -1).contiguous()
    bits = matrix.view(_SIGNED[weight.element_size()]).numpy().astype(np.int64)
    if weight.is_floating_point():
        tiny = torch.finfo(weight.dtype).tiny
        bits[(matrix.double().abs() < tiny).numpy()] = 0
    positions = np.arange(bits.size, dtype=np.uint64).reshape(bits.shape)
    terms = bits.astype(np.uint64) * _scattered(positions)
    chosen = terms if columns is None else terms[:, list(columns)]
    return f"{int(chosen.sum(dtype=np.uint64)):016x}"


def _scattered(positions: Any) -> Any:
    """SplitMix64's finalizer of the positions times its increment, made odd."""
    x = positions * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def digests(weights: Weights) -> list[dict[str, Any]]:
    """Digests of all weights, as `/finish_weight_update/` takes them."""
    return [{"name": name, "digest": digest(weight)} for name, weight in weights.items()]


def start(http: httpx.Client, version: int, weights: Weights) -> httpx.Response:
    return start_manifest(http, version, manifest(weights))


def start_manifest(
    http: httpx.Client, version: int, parameters: Sequence[ParameterMeta]
) -> httpx.Response:
    listed = [p.model_dump() for p in parameters]
    body = {"version": version, "parameters": listed, "attempt": None}
    return http.post("/start_weight_update/", json=body)


def begin_transfer(http: httpx.Client, version: int) -> Posting:
    return Posting(http, "/update_weights/", {"version": version, "attempt": None})


def finish(
    http: httpx.Client, version: int, digests: Sequence[dict[str, Any]] = ()
) -> httpx.Response:
    body = {"version": version, "digests": list(digests), "attempt": None}
    return http.post("/finish_weight_update/", json=body)


def load(http: httpx.Client, sender: Sender, weights: Weights, version: int) -> None:
    """A push up to its last call."""
    assert start(http, version, weights).status_code == 200
    transfer = begin_transfer(http, version)
    sender.send(weights)
    assert transfer.answer().status_code == 200, transfer.answer().text


def push(http: httpx.Client, sender: Sender, weights: Weights, version: int) -> dict[str, Any]:
    """A whole push that must succeed, with every parameter verified; the server's report."""
    load(http, sender, weights, version)
    answer = finish(http, version, digests(weights))
    assert answer.status_code == 200, answer.text
    report: dict[str, Any] = answer.json()
    return report
