"""Rank 0 of a gloo weight group in plain torch, written from the wire format alone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import httpx
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from shared_contracts.weights import GLOO_STORE_PREFIX, ParameterMeta, plan_buckets

BUCKET_BYTES = 2**20

Weights = dict[str, torch.Tensor]


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

    def answered(self) -> bool:
        return bool(self._answers)


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


def start(http: httpx.Client, version: int, weights: Weights) -> httpx.Response:
    parameters = [parameter.model_dump() for parameter in manifest(weights)]
    return http.post("/start_weight_update/", json={"version": version, "parameters": parameters})


def begin_transfer(http: httpx.Client, version: int) -> Posting:
    return Posting(http, "/update_weights/", {"version": version})


def finish(http: httpx.Client, version: int) -> httpx.Response:
    return http.post("/finish_weight_update/", json={"version": version})


def push(http: httpx.Client, sender: Sender, weights: Weights, version: int) -> dict[str, Any]:
    """A whole push that must succeed; the server's report."""
    assert start(http, version, weights).status_code == 200
    transfer = begin_transfer(http, version)
    sender.send(weights)
    assert transfer.answer().status_code == 200, transfer.answer().text
    answer = finish(http, version)
    assert answer.status_code == 200, answer.text
    report: dict[str, Any] = answer.json()
    return report
