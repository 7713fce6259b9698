"""The server's side of a push, written from the docstring of `shared_contracts.weights` alone."""

import json
import mmap
import socket
import struct
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from shared_contracts.weights import (
    CommunicatorReady,
    InitCommunicator,
    ParameterMeta,
    StartWeightUpdate,
    SyncReport,
    Transport,
    WeightState,
    WeightStatus,
    plan_buckets,
)
from tests.contract.weight_sender import digest
from tests.unit.fleets import wait_until as wait_until
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
    """The store of the rendezvous, open as long as the object lives."""
    # Torch's own listener sometimes takes 5 s to answer a client that comes early.
    listening = socket.create_server((asked.host, asked.port))
    store = TCPStore(
        *(asked.host, asked.port, None, True, timedelta(seconds=60), False),
        master_listen_fd=listening.detach(),
    )
    store.set(f"attempt/{attempt or asked.attempt}", "")
    return store


def join(store: TCPStore, ranks: int) -> ProcessGroupGloo:
    """Join the group as rank 1."""
    keys = PrefixStore("group/0", store)
    keys.set("ready/1", "")
    keys.wait([f"ready/{rank}" for rank in range(ranks)])
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=60)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = ProcessGroupGloo(keys, 1, ranks, options)
    group.allreduce(torch.zeros(1)).wait()  # type: ignore[attr-defined]
    return group


class Worker:
    """Rank 1 of a real group, behind the routes of a scripted server.

    received: tensors of the newest update, by name.
    breaks_after: so many buckets; then the call fails, while the worker stays in its group.
    """

    def __init__(self, server: ScriptedServer, transport: Transport = "gloo") -> None:
        self.received: dict[str, Tensor] = {}
        self.groups_formed = 0
        self.breaks_after: int | None = None
        self._transport, self._version = transport, 0
        self._group: Any = None
        server.routes |= {
            "POST /init_communicator/": self.init,
            "POST /start_weight_update/": self.start,
            "POST /update_weights/": self.update,
            "POST /finish_weight_update/": self.finish,
            "POST /load_adapter/": self.load_adapter,
            "POST /close_communicator/": self.close,
        }

    def init(self, body: object) -> Reply:
        self._asked = InitCommunicator.model_validate(body)
        self.leave()
        self._group = join(open_store(self._asked), self._asked.world_size)
        self.groups_formed += 1
        return CommunicatorReady(
            weights_version=0,
            world_size=2,
            transport=self._transport,
            server_epoch="epoch-1",
            dtype="bfloat16",
        )

    def start(self, body: object) -> Reply:
        self._manifest = StartWeightUpdate.model_validate(body)
        return self._status("UPDATING")

    def update(self, body: object) -> Reply:
        parameters, digests = self._manifest.parameters, list[int]()
        self.received = {}
        receive = self._receive_mapped() if self._transport == "ipc" else self._broadcast
        for indices in plan_buckets(parameters, self._asked.bucket_bytes):
            if len(digests) == self.breaks_after:
                return problem("weight-transfer-failed", "server: no such name", "transfer")
            members = parameters[indices.start : indices.stop]
            bucket = receive(sum(p.wire_bytes for p in members))
            self._unpack(members, bucket)
            digests.append(digest(bucket.numpy().tobytes()))
        trailer = receive(8 * len(digests)).numpy().tobytes()
        assert struct.unpack(f"<{len(digests)}Q", trailer) == tuple(digests)
        return self._status("UPDATING")

    def finish(self, body: object) -> Reply:
        return self._report(self._manifest.version, sum(t.nbytes for t in self.received.values()))

    def load_adapter(self, body: tuple[str, bytes]) -> Reply:
        query, content = body
        return self._report(int(query.partition("&")[0].removeprefix("version=")), len(content))

    def close(self, body: object) -> Reply:
        self.leave()
        return self._status("READY")

    def leave(self) -> None:
        if self._group is not None:
            self._group.shutdown()
            self._group = None

    def _broadcast(self, size: int) -> Tensor:
        data = torch.empty(size, dtype=torch.uint8)
        self._group.broadcast(data, 0).wait()
        return data

    def _receive_mapped(self) -> Callable[[int], Tensor]:
        """Map the learner's memory; return a function that copies the next slot."""
        length = int(self._broadcast(8).view(torch.int64))
        shared = json.loads(self._broadcast(length).numpy().tobytes())
        with Path(shared["memory"]["path"]).open("rb") as file:
            pages = mmap.mmap(file.fileno(), 2 * shared["slot_bytes"], prot=mmap.PROT_READ)
        turns = iter(range(10**6))

        def copy(size: int) -> Tensor:
            self._broadcast(1)
            begin = next(turns) % 2 * shared["slot_bytes"]
            data = torch.tensor(list(pages[begin : begin + size]), dtype=torch.uint8)
            self._group.barrier().wait()
            return data

        return copy

    def _unpack(self, members: list[ParameterMeta], bucket: Tensor) -> None:
        for p in members:
            own, bucket = bucket[: p.wire_bytes], bucket[p.wire_bytes :]
            data, padding = own[: p.num_bytes], own[p.num_bytes :]
            self.received[p.name] = data.clone().view(getattr(torch, p.dtype)).view(p.shape)
            assert not padding.any(), p.name

    def _status(self, state: WeightState) -> WeightStatus:
        return WeightStatus(state=state, weights_version=self._version, server_epoch="epoch-1")

    def _report(self, version: int, size: int) -> SyncReport:
        self._version = version
        seconds = {"pause": 0.1, "transfer": 0.2, "finish": 0.3}
        return SyncReport(status=self._status("READY"), seconds=seconds, bytes=size)
