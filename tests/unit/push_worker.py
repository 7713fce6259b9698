"""The server's side of a push, written from the docstring of `shared_contracts.weights` alone."""

import itertools
import json
import mmap
import socket
import struct
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

from shared_contracts.weights import (
    CommunicatorReady,
    InitCommunicator,
    StartWeightUpdate,
    SyncReport,
    WeightState,
    WeightStatus,
    plan_buckets,
)
from tests.contract.weight_sender import digest, join
from tests.unit.scripted_server import Reply, ScriptedServer, problem


class Weights(nn.Module):
    """Parameters of several dtypes, one larger than a bucket, one of odd size, one empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)

        def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape).to(dtype))

        self.wide = parameter(40, 7)
        self.odd = parameter(3, dtype=torch.bfloat16)
        self.short = parameter(5, 3, dtype=torch.float16)
        self.none = parameter(0)
        self.scalar = parameter()
        self.turned = nn.Parameter(torch.randn(6, 4).T)


def open_store(asked: InitCommunicator, attempt: str | None = None) -> TCPStore:
    """The store of the rendezvous. Torch's own listener sometimes needs 5 s to answer."""
    listening = socket.create_server((asked.host, asked.port))
    store = TCPStore(
        *(asked.host, asked.port, None, True, timedelta(seconds=60), False),
        master_listen_fd=listening.detach(),
    )
    store.set(f"attempt/{attempt or asked.attempt}", "")
    return store


class Worker:
    """Rank 1 of a real group of two, behind the routes of a scripted server.

    received: tensors of the newest update, by name.
    breaks_after: so many buckets; then the call fails, while the worker stays in its group.
    """

    def __init__(self, server: ScriptedServer) -> None:
        self.received: dict[str, Tensor] = {}
        self.groups_formed = 0
        self.breaks_after: int | None = None
        self._version, self._group = 0, None
        server.routes |= {
            "POST /init_communicator/": self.init,
            "POST /start_weight_update/": self.start,
            "POST /update_weights/": self.update,
            "POST /finish_weight_update/": self.finish,
            "POST /load_adapter/": self.load_adapter,
            "POST /close_communicator/": self.leave,
        }

    def init(self, body: object) -> Reply:
        self._asked = InitCommunicator.model_validate(body)
        self.leave()
        if self._asked.world_size > 1:
            _store = open_store(self._asked)
            self._group = join(self._asked.port, 1, 2, 60.0)
            self.groups_formed += 1
        return CommunicatorReady(
            weights_version=0,
            world_size=self._asked.world_size,
            transport=self._asked.transport,
            server_epoch="epoch-1",
            dtype="bfloat16",
        )

    def start(self, body: object) -> Reply:
        self._manifest = StartWeightUpdate.model_validate(body)
        return self._status("UPDATING")

    def update(self, body: object) -> Reply:
        self.received = {}
        if not self._receive(self._group):
            return problem("weight-transfer-failed", "server: no such name", "transfer")
        return self._status("UPDATING")

    def finish(self, body: object) -> Reply:
        return self._report(self._manifest.version, sum(t.nbytes for t in self.received.values()))

    def load_adapter(self, body: tuple[str, bytes]) -> Reply:
        query, content = body
        return self._report(int(query.partition("&")[0].removeprefix("version=")), len(content))

    def leave(self, body: object = None) -> Reply:
        if self._group:
            self._group.shutdown()
            self._group = None
        return self._status("READY")

    def _receive(self, group: Any) -> bool:
        parameters, digests = self._manifest.parameters, list[int]()
        receive = mapped(group) if self._asked.transport == "ipc" else partial(broadcast, group)
        for members in plan_buckets(parameters, self._asked.bucket_bytes):
            if len(digests) == self.breaks_after:
                return False
            bucket = receive(sum(p.wire_bytes for p in members))
            digests.append(digest(bucket.numpy().tobytes()))
            for p in members:
                own, bucket = bucket[: p.wire_bytes], bucket[p.wire_bytes :]
                data, padding = own[: p.num_bytes], own[p.num_bytes :]
                self.received[p.name] = data.clone().view(getattr(torch, p.dtype)).view(p.shape)
                assert not padding.any(), p.name
        trailer = receive(8 * len(digests)).numpy().tobytes()
        assert struct.unpack(f"<{len(digests)}Q", trailer) == tuple(digests)
        return True

    def _status(self, state: WeightState) -> WeightStatus:
        return WeightStatus(state=state, weights_version=self._version, server_epoch="epoch-1")

    def _report(self, version: int, size: int) -> SyncReport:
        self._version, seconds = version, {"pause": 0.1, "transfer": 0.2, "finish": 0.3}
        return SyncReport(status=self._status("READY"), seconds=seconds, bytes=size)


def broadcast(group: Any, size: int) -> Tensor:
    """Receive so many bytes from rank 0. Raises ConnectionError if it has left."""
    data = torch.empty(size, dtype=torch.uint8)
    try:
        group.broadcast(data, 0).wait()
    except RuntimeError as error:
        raise ConnectionError("rank 0 has left") from error
    return data


def mapped(group: Any) -> Callable[[int], Tensor]:
    """Map the learner's memory; return a function that copies the next slot."""
    length = int(broadcast(group, 8).view(torch.int64))
    shared = json.loads(broadcast(group, length).numpy().tobytes())
    with Path(shared["memory"]["path"]).open("rb") as file:
        pages = mmap.mmap(file.fileno(), 2 * shared["slot_bytes"], prot=mmap.PROT_READ)
    begins = itertools.cycle([0, shared["slot_bytes"]])

    def copy(size: int) -> Tensor:
        broadcast(group, 1)
        pages.seek(next(begins))
        data = torch.tensor(list(pages.read(size)), dtype=torch.uint8)
        group.barrier().wait()
        return data

    return copy
