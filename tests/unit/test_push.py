"""A push of weights over a real gloo group: the learner is rank 0, a thread plays the worker."""

import gc
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from learner.rollout.client import RolloutClient
from learner.sync.abandonable import REASON_GRACE_S, run_together
from learner.sync.push import WeightPusher, WeightSyncError
from learner.sync.source import MergedWeights
from rollout_server.group_store import open_group_store
from shared_contracts.weights import (
    GLOO_STORE_PREFIX,
    CommunicatorReady,
    InitCommunicator,
    ParameterMeta,
    SyncReport,
    UpdateWeights,
    WeightStatus,
    plan_buckets,
)
from tests.unit.scripted_server import Reply, ScriptedServer, problem, scripted_server

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


class Worker:
    """The server's half of every phase, for real: the store, rank 1 and the buckets.

    received: tensors of the last update, by name. stop_after: buckets after which it hangs up.
    """

    def __init__(self, server: ScriptedServer) -> None:
        self.received: dict[str, Tensor] = {}
        self.groups_formed = 0
        self.stop_after: int | None = None
        self._version = 0
        self._group: ProcessGroupGloo | None = None
        server.routes |= {
            "POST /init_communicator/": self.init,
            "POST /start_weight_update/": self.start,
            "POST /update_weights/": self.update,
            "POST /finish_weight_update/": self.finish,
            "POST /close_communicator/": self.close,
        }

    def init(self, body: object) -> Reply:
        asked = InitCommunicator.model_validate(body)
        self._bucket_bytes = asked.bucket_bytes
        timeout = timedelta(seconds=asked.timeout_s)
        held = open_group_store(asked.host, asked.port, asked.timeout_s)
        store = TCPStore(
            asked.host, asked.port, is_master=False, wait_for_workers=False, timeout=timeout
        )
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [ProcessGroupGloo.create_device(hostname=asked.host)]
        prefixed = PrefixStore(GLOO_STORE_PREFIX, store)
        self._group = ProcessGroupGloo(prefixed, 1, asked.world_size, options)
        self._group.barrier().wait()  # type: ignore[attr-defined]
        del held
        self.groups_formed += 1
        return CommunicatorReady(
            weights_version=0, world_size=2, transport="gloo", server_epoch="epoch-1"
        )

    def start(self, body: object) -> Reply:
        return self._status("UPDATING")

    def update(self, body: object) -> Reply:
        parameters = UpdateWeights.model_validate(body).parameters
        self.received = {}
        for number, indices in enumerate(plan_buckets(parameters, self._bucket_bytes)):
            if number == self.stop_after:
                return self._hang_up()
            self._receive([parameters[i] for i in indices])
        return self._status("UPDATING")

    def finish(self, body: dict[str, int]) -> Reply:
        self._version = body["version"]
        return SyncReport(status=self._status("READY"), seconds={"transfer": 0.1}, bytes=1)

    def close(self, body: object) -> Reply:
        self.drop_group()
        return self._status("READY")

    def drop_group(self) -> None:
        if self._group is not None:
            self._group.shutdown()
            self._group = None
            gc.collect()

    def _receive(self, parameters: list[ParameterMeta]) -> None:
        assert self._group is not None
        bucket = torch.empty(sum(p.wire_bytes for p in parameters), dtype=torch.uint8)
        self._group.broadcast(bucket, 0).wait()  # type: ignore[attr-defined]
        offset = 0
        for p in parameters:
            data = bucket[offset : offset + p.num_bytes]
            self.received[p.name] = data.view(getattr(torch, p.dtype)).view(p.shape)
            offset += p.wire_bytes

    def _hang_up(self) -> Reply:
        self.drop_group()
        time.sleep(0.3)  # the learner's broadcast breaks before the answer comes
        return problem("weight-transfer-failed", "server: the worker died", "transfer")

    def _status(self, state: str) -> WeightStatus:
        return WeightStatus.model_validate(
            {"state": state, "weights_version": self._version, "server_epoch": "epoch-1"}
        )


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def pusher_to(
    server: ScriptedServer, timeout_s: float = 30.0, model: nn.Module | None = None
) -> Iterator[WeightPusher]:
    with RolloutClient(server.base_url, timeout_s) as client:
        weights = MergedWeights(model or Weights())
        pusher = WeightPusher(client, free_port(), weights, "gloo", BUCKET_BYTES)
        yield pusher
        pusher.close()


@pytest.mark.req("SYNC-03")
def test_every_tensor_arrives_bit_for_bit_in_buckets(server: ScriptedServer) -> None:
    worker, model = Worker(server), Weights()
    with pusher_to(server, model=model) as pusher:
        report = pusher.push(version=1)
    sent = dict(model.named_parameters())
    assert worker.received.keys() == sent.keys()
    for name, parameter in sent.items():
        assert worker.received[name].dtype == parameter.dtype, name
        assert torch.equal(worker.received[name], parameter), name
    assert report.status.weights_version == 1
    assert report.seconds["total"] > 0


@pytest.mark.req("SYNC-03")
def test_a_push_is_four_calls_however_many_parameters(server: ScriptedServer) -> None:
    Worker(server)
    with pusher_to(server) as pusher:
        pusher.push(version=1)
        first = [route for route, _ in server.calls]
        pusher.push(version=2)
    assert first == [
        "GET /get_world_size/",
        "POST /init_communicator/",
        "POST /start_weight_update/",
        "POST /update_weights/",
        "POST /finish_weight_update/",
    ]
    again = [route for route, _ in server.calls[len(first) :]]
    assert again == [*first[2:], "POST /close_communicator/"]
    assert [body["version"] for body in server.bodies("POST /start_weight_update/")] == [1, 2]


@pytest.mark.req("SYNC-03")
def test_the_newest_values_travel_not_those_of_the_first_push(server: ScriptedServer) -> None:
    worker, model = Worker(server), Weights()
    with pusher_to(server, model=model) as pusher:
        pusher.push(version=1)
        with torch.no_grad():
            model.wide.add_(1.0)
        pusher.push(version=2)
    assert torch.equal(worker.received["wide"], model.wide)


@pytest.mark.req("SYNC-04")
def test_a_refused_group_names_side_address_and_phase_at_once(server: ScriptedServer) -> None:
    server.routes["POST /init_communicator/"] = lambda _: problem(
        "group-port-taken", "server: cannot listen on 127.0.0.1:51216", "port"
    )
    started = time.monotonic()
    with pusher_to(server, timeout_s=60.0) as pusher:
        with pytest.raises(WeightSyncError) as caught:
            pusher.connect()
        assert time.monotonic() - started < 10.0
    assert (caught.value.side, caught.value.phase) == ("server", "rendezvous")
    assert caught.value.address == server.base_url
    for part in ("server", server.base_url, "rendezvous", "cannot listen on 127.0.0.1:51216"):
        assert part in str(caught.value)


@pytest.mark.req("SYNC-04")
def test_after_a_refusal_the_group_can_be_formed(server: ScriptedServer) -> None:
    worker = Worker(server)
    server.routes["POST /init_communicator/"] = lambda _: problem(
        "not-ready", "the engines are starting", "replicas"
    )
    with pusher_to(server) as pusher:
        with pytest.raises(WeightSyncError):
            pusher.connect()
        server.routes["POST /init_communicator/"] = worker.init
        pusher.push(version=1)
    assert len(worker.received) == 6


@pytest.mark.req("SYNC-04")
def test_a_server_that_cannot_be_reached_is_told_as_such(server: ScriptedServer) -> None:
    server.routes["GET /get_world_size/"] = lambda _: problem("not-ready", "starting", "replicas")
    with pusher_to(server) as pusher, pytest.raises(WeightSyncError) as caught:
        pusher.connect()
    assert (caught.value.side, caught.value.phase) == ("server", "reach")


@pytest.mark.req("SYNC-04")
def test_a_server_that_never_opens_the_group_ends_by_the_deadline(server: ScriptedServer) -> None:
    released = threading.Event()
    server.routes["POST /init_communicator/"] = lambda _: released.wait(20.0) and {}
    started = time.monotonic()
    with pusher_to(server, timeout_s=1.0) as pusher:
        with pytest.raises(WeightSyncError) as caught:
            pusher.connect()
        assert time.monotonic() - started < 1.0 + REASON_GRACE_S + 3.0
    released.set()
    assert caught.value.phase == "rendezvous"


@pytest.mark.req("SYNC-04")
def test_a_worker_that_never_joins_ends_by_the_deadline(server: ScriptedServer) -> None:
    released = threading.Event()

    def store_without_worker(body: object) -> Reply:
        asked = InitCommunicator.model_validate(body)
        held = open_group_store(asked.host, asked.port, asked.timeout_s)
        released.wait(20.0)
        del held
        return {}

    server.routes["POST /init_communicator/"] = store_without_worker
    started = time.monotonic()
    with pusher_to(server, timeout_s=1.0) as pusher:
        with pytest.raises(WeightSyncError) as caught:
            pusher.connect()
        assert time.monotonic() - started < 1.0 + REASON_GRACE_S + 3.0
    released.set()
    assert caught.value.phase == "rendezvous"


@pytest.mark.req("SYNC-04")
def test_a_transfer_that_breaks_half_way_is_told_and_the_next_push_starts_afresh(
    server: ScriptedServer,
) -> None:
    worker, model = Worker(server), Weights()
    worker.stop_after = 1
    with pusher_to(server, model=model) as pusher:
        with pytest.raises(WeightSyncError, match="the worker died") as caught:
            pusher.push(version=1)
        assert (caught.value.side, caught.value.phase) == ("server", "transfer")
        assert "POST /finish_weight_update/" not in dict(server.calls)

        worker.stop_after = None
        pusher.push(version=1)
    assert worker.groups_formed == 2
    assert torch.equal(worker.received["wide"], model.wide)


@pytest.mark.req("SYNC-04")
def test_a_failing_finish_is_told_and_closes_the_group(server: ScriptedServer) -> None:
    worker = Worker(server)
    server.routes["POST /finish_weight_update/"] = lambda _: problem(
        "weight-transfer-failed", "server: no room", "finish"
    )
    with pusher_to(server) as pusher:
        with pytest.raises(WeightSyncError) as caught:
            pusher.push(version=1)
        assert (caught.value.side, caught.value.phase) == ("server", "finish")
        server.routes["POST /finish_weight_update/"] = worker.finish
        pusher.push(version=1)
    assert worker.groups_formed == 2


def test_closing_twice_or_before_connecting_is_no_error(server: ScriptedServer) -> None:
    Worker(server)
    with pusher_to(server) as pusher:
        pusher.close()
        pusher.connect()
        pusher.close()
    assert len(server.bodies("POST /close_communicator/")) == 1


def fail(message: str) -> None:
    raise RuntimeError(message)


def test_two_that_end_well_are_waited_for() -> None:
    done: list[str] = []

    def late() -> None:
        time.sleep(0.1)
        done.append("a")

    assert run_together(late, lambda: None, 5.0) is None
    assert done == ["a"]


def test_the_first_error_is_returned_without_waiting_for_a_hung_collective() -> None:
    hung = threading.Event()
    started = time.monotonic()
    error = run_together(lambda: fail("refused"), lambda: hung.wait(20.0), 10.0)
    assert str(error) == "refused"
    assert time.monotonic() - started < 2.0
    hung.set()


def test_the_calls_reason_is_preferred_to_the_broken_collective() -> None:
    broken = threading.Event()

    def call() -> None:
        broken.wait()
        time.sleep(0.1)
        fail("the worker died")

    def collective() -> None:
        broken.set()
        fail("connection closed by peer")

    assert str(run_together(call, collective, 10.0)) == "the worker died"


def test_a_broken_collective_is_returned_when_the_call_hangs_or_succeeds() -> None:
    assert str(run_together(lambda: None, lambda: fail("broken"), 10.0)) == "broken"
    hung = threading.Event()
    error = run_together(lambda: hung.wait(20.0), lambda: fail("broken"), 10.0)
    assert str(error) == "broken"
    hung.set()


def test_two_that_hang_end_with_a_timeout_at_the_deadline() -> None:
    hung = threading.Event()
    started = time.monotonic()
    error = run_together(lambda: hung.wait(20.0), lambda: hung.wait(20.0), 0.3)
    assert isinstance(error, TimeoutError)
    assert time.monotonic() - started < 2.0
    hung.set()


def test_the_deadline_bounds_both_together() -> None:
    hung = threading.Event()
    started = time.monotonic()
    error = run_together(lambda: time.sleep(0.6), lambda: hung.wait(20.0), 1.0)
    assert isinstance(error, TimeoutError)
    assert time.monotonic() - started < 1.5
    hung.set()
