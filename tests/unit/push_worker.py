"""The server's half of a push over a real gloo group, played by a thread; and a pusher to it."""

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from learner.rollout.client import RolloutClient
from learner.rollout.server_process import free_ports
from learner.rollout.sync.push import Join, PhaseTimeouts, WeightPusher
from learner.rollout.sync.transports import CurrentGpu, join_group
from learner.rollout.sync.weights import MergedWeights, OneSource, SourceChoice, WeightSource
from rollout_server.weights.weight_group import open_group_store
from shared_contracts.rollout_config import Verify
from shared_contracts.weights import (
    GLOO_STORE_PREFIX,
    CommunicatorReady,
    InitCommunicator,
    ParameterMeta,
    StartWeightUpdate,
    SyncReport,
    Transport,
    WeightStatus,
    plan_buckets,
)
from tests.unit.scripted_server import Reply, ScriptedServer, problem

BUCKET_BYTES = 256


class Weights(nn.Module):
    """Parameters of several dtypes, one larger than a bucket, one of odd size, one empty."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

        self.wide = parameter(40, 7)
        self.odd = parameter(3, dtype=torch.bfloat16)
        self.short = parameter(5, 3, dtype=torch.float16)
        self.none = parameter(0)
        self.scalar = parameter()
        self.turned = nn.Parameter(torch.randn(6, 4, generator=generator).T)


def other_rank(asked: InitCommunicator) -> ProcessGroupGloo:
    """Join the group as the one worker."""
    timeout = timedelta(seconds=asked.timeout_s)
    store = TCPStore(
        asked.host, asked.port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=asked.host)]
    group = ProcessGroupGloo(PrefixStore(GLOO_STORE_PREFIX, store), 1, asked.world_size, options)
    group.barrier().wait()  # type: ignore[attr-defined]
    return group


class Worker:
    """The server's half of every phase, for real: the store, rank 1 and the buckets.

    received: tensors of the last update, by name. stop_after: buckets after which it hangs up,
    or with `hang` neither receives nor answers until that is set.
    """

    def __init__(self, server: ScriptedServer) -> None:
        self.received: dict[str, Tensor] = {}
        self.groups_formed = 0
        self.stop_after: int | None = None
        self.hang: threading.Event | None = None
        self.hung_up = threading.Event()
        self._version = 0
        self._manifest: StartWeightUpdate | None = None
        self._group: ProcessGroupGloo | None = None
        server.routes |= {
            "POST /init_communicator/": self.init,
            "POST /start_weight_update/": self.start,
            "POST /update_weights/": self.update,
            "POST /finish_weight_update/": self.finish,
            "POST /keep_communicator/": lambda _: self._status("READY"),
            "POST /close_communicator/": self.close,
        }

    def init(self, body: object) -> Reply:
        asked = InitCommunicator.model_validate(body)
        self._bucket_bytes = asked.bucket_bytes
        held = open_group_store(asked.host, asked.port, asked.timeout_s, asked.attempt)
        self._group = other_rank(asked)
        del held
        self.groups_formed += 1
        return CommunicatorReady(
            weights_version=0,
            world_size=2,
            transport="gloo",
            server_epoch="epoch-1",
            dtype="bfloat16",
        )

    def start(self, body: object) -> Reply:
        self._manifest = StartWeightUpdate.model_validate(body)
        return self._status("UPDATING")

    def update(self, body: object) -> Reply:
        assert self._manifest is not None
        parameters = self._manifest.parameters
        self.received = {}
        for number, indices in enumerate(plan_buckets(parameters, self._bucket_bytes)):
            if number == self.stop_after:
                return self._stop()
            self._receive([parameters[i] for i in indices])
        return self._status("UPDATING")

    def finish(self, body: dict[str, Any]) -> Reply:
        self._version = body["version"]
        size = sum(t.nbytes for t in self.received.values())
        return SyncReport(
            status=self._status("READY"),
            seconds={"pause": 0.1, "transfer": 0.1, "load": 0.1, "verify": 0.1, "caches": 0.1},
            bytes=size,
            verified=len(body["digests"]),
        )

    def close(self, body: object) -> Reply:
        self.drop_group()
        return self._status("READY")

    def drop_group(self) -> None:
        if self._group is not None:
            self._group.shutdown()
            self._group = None

    def _receive(self, parameters: list[ParameterMeta]) -> None:
        assert self._group is not None
        bucket = torch.empty(sum(p.wire_bytes for p in parameters), dtype=torch.uint8)
        self._group.broadcast(bucket, 0).wait()  # type: ignore[attr-defined]
        offset = 0
        for p in parameters:
            data = bucket[offset : offset + p.num_bytes]
            self.received[p.name] = data.view(getattr(torch, p.dtype)).view(p.shape)
            assert not bucket[offset + p.num_bytes : offset + p.wire_bytes].any(), "padding"
            offset += p.wire_bytes

    def _stop(self) -> Reply:
        if self.hang is not None:
            self.hang.wait(60.0)
        self.drop_group()
        self.hung_up.set()
        return problem("weight-transfer-failed", "server: the worker died", "transfer")

    def _status(self, state: str) -> WeightStatus:
        return WeightStatus.model_validate(
            {"state": state, "weights_version": self._version, "server_epoch": "epoch-1"}
        )


def all_phases(seconds: float) -> PhaseTimeouts:
    return PhaseTimeouts(seconds, seconds, seconds, seconds, seconds, seconds)


@contextmanager
def pusher_to(
    server: ScriptedServer,
    timeouts: PhaseTimeouts | None = None,
    model: nn.Module | None = None,
    verify: Verify = "sample",
    choice: SourceChoice | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    transport: Transport = "gloo",
    join: Join = join_group,
    gpu: CurrentGpu | None = None,
) -> Iterator[WeightPusher]:
    with RolloutClient(server.base_url, timeout_s=30.0) as client:
        choice = choice or OneSource(MergedWeights(model or Weights()))
        pusher = WeightPusher(
            client, free_ports(1)[0], choice, transport, bucket_bytes, verify, timeouts, join, gpu
        )
        yield pusher
        pusher.close()


def sent_by(model: nn.Module) -> dict[str, Tensor]:
    """What a push of the model sends to engines of bfloat16."""
    return {name: p.detach().bfloat16() for name, p in model.named_parameters()}


def assert_arrived(worker: Worker, model: nn.Module) -> None:
    sent = sent_by(model)
    assert worker.received.keys() == sent.keys()
    for name, weight in sent.items():
        assert worker.received[name].dtype == weight.dtype, name
        assert torch.equal(worker.received[name], weight), name


class Falling:
    """A choice of two: after a failure of the first it is the second, for good."""

    def __init__(self, first: WeightSource, second: WeightSource) -> None:
        self.errors: list[Exception] = []
        self._sources = [first, second]

    def current(self) -> WeightSource:
        return self._sources[0]

    def failed(self, source: WeightSource, error: Exception) -> bool:
        self.errors.append(error)
        if len(self._sources) == 1:
            return False
        self._sources.pop(0)
        return True


def resources() -> Counter[str]:
    """Numbers of open files and threads of this process."""
    gc.collect()
    return Counter({kind: len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")})


def wait_until(holds: Callable[[], bool], limit_s: float = 120.0) -> None:
    """limit_s: only a test that fails waits so long."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, resources()
        time.sleep(0.02)
