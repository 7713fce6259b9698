"""A push of weights over a real gloo group: the learner is rank 0, a thread plays the worker."""

import gc
import logging
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from learner.rollout.client import RolloutClient
from learner.sync.abandonable import REASON_GRACE_S, run_together, run_within
from learner.sync.push import PhaseTimeouts, WeightPusher, WeightSyncError
from learner.sync.source import (
    BaseWeights,
    MergedWeights,
    OneSource,
    SourceChoice,
    WeightSource,
)
from rollout_server.group_store import open_group_store
from shared_contracts.digests import sample
from shared_contracts.errors import Problem
from shared_contracts.rollout_config import Verify
from shared_contracts.weights import (
    GLOO_STORE_PREFIX,
    AdapterMeta,
    CommunicatorReady,
    DtypeName,
    InitCommunicator,
    ParameterMeta,
    StartWeightUpdate,
    SyncReport,
    WeightStatus,
    plan_buckets,
)
from tests.unit.scripted_server import HangUp, Reply, ScriptedServer, problem, scripted_server

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


def all_phases(seconds: float) -> PhaseTimeouts:
    return PhaseTimeouts(seconds, seconds, seconds, seconds, seconds, seconds)


MASK = 2**64 - 1


def mixed(position: int) -> int:
    """The multiplier of a position, in plain integers modulo 2**64."""
    x = position * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return (x ^ x >> 31) | 1


def digest_by_hand(weight: Tensor, columns: list[int] | None) -> str:
    """The digest of a bfloat16 tensor, element by element."""
    rows = weight.shape[0] if weight.ndim else 1
    bits = weight.contiguous().view(torch.int16).reshape(rows, -1) if weight.numel() else None
    total = 0
    for r in range(rows if bits is not None else 0):
        assert bits is not None
        width = bits.shape[1]
        for c in range(width) if columns is None else columns:
            element = int(bits[r, c])
            if element & 0x7F80:
                total += element * mixed(r * width + c)
    return f"{total & MASK:016x}"


@contextmanager
def pusher_to(
    server: ScriptedServer,
    timeouts: PhaseTimeouts | None = None,
    model: nn.Module | None = None,
    verify: Verify = "sample",
    choice: SourceChoice | None = None,
) -> Iterator[WeightPusher]:
    with RolloutClient(server.base_url, timeout_s=30.0) as client:
        choice = choice or OneSource(MergedWeights(model or Weights()))
        pusher = WeightPusher(client, free_port(), choice, "gloo", BUCKET_BYTES, verify, timeouts)
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


@pytest.mark.req("SYNC-03", "SYNC-10")
@pytest.mark.parametrize("bucket_bytes", [1, 100, BUCKET_BYTES, 2**20])
def test_every_tensor_arrives_bit_for_bit_in_buckets_of_any_size(
    server: ScriptedServer, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.test_push.BUCKET_BYTES", bucket_bytes)
    worker, model = Worker(server), Weights()
    with pusher_to(server, model=model) as pusher:
        report = pusher.push(version=1)
    assert_arrived(worker, model)
    assert report.status.weights_version == 1
    assert report.bytes == sum(t.nbytes for t in sent_by(model).values())
    assert {"pause", "transfer", "load", "verify", "caches", "send", "total"} <= set(report.seconds)
    assert report.seconds["total"] > 0


@pytest.mark.req("SYNC-10")
def test_a_push_logs_its_phases_its_bytes_and_its_rate(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    Worker(server)
    with caplog.at_level(logging.INFO, "learner.sync.push"), pusher_to(server) as pusher:
        report = pusher.push(version=1)
    (line,) = [record.getMessage() for record in caplog.records]
    for part in (f"{report.bytes} bytes", "GB/s", "pause 0.100 s", "verify 0.100 s", "caches"):
        assert part in line


@pytest.mark.req("SYNC-03", "SYNC-05")
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
    for route in first[2:]:
        assert [body["version"] for body in server.bodies(route)] == [1, 2]


@pytest.mark.req("SYNC-05")
def test_the_manifest_goes_first_in_the_type_of_the_engines(server: ScriptedServer) -> None:
    Worker(server)
    model = Weights()
    with pusher_to(server, model=model) as pusher:
        pusher.push(version=1)
    (manifest,) = server.bodies("POST /start_weight_update/")
    assert manifest["adapter"] is None
    assert manifest["parameters"] == [
        {"name": name, "dtype": "bfloat16", "shape": list(p.shape)}
        for name, p in model.named_parameters()
    ]


@pytest.mark.req("SYNC-06")
def test_digests_are_of_what_verification_asks_for(server: ScriptedServer) -> None:
    Worker(server)
    model = Weights()
    with pusher_to(server, model=model, verify="off") as pusher:
        assert pusher.push(version=1).verified == 0
    with pusher_to(server, model=model, verify="sample") as pusher:
        pusher.push(version=2)
    with pusher_to(server, model=model, verify="full") as pusher:
        pusher.push(version=3)
    off, some, full = (body["digests"] for body in server.bodies("POST /finish_weight_update/"))
    assert off == []
    chosen = sample(MergedWeights(model).metadata("bfloat16"), version=2)
    assert {digest["name"]: digest["columns"] for digest in some} == chosen
    assert {digest["name"]: digest["columns"] for digest in full} == dict.fromkeys(sent_by(model))
    for digest in [*some, *full]:
        weight, columns = sent_by(model)[digest["name"]], digest["columns"]
        assert digest["digest"] == digest_by_hand(weight, columns), digest["name"]


@pytest.mark.req("SYNC-03")
def test_the_newest_values_travel_not_those_of_the_first_push(server: ScriptedServer) -> None:
    worker, model = Worker(server), Weights()
    with pusher_to(server, model=model) as pusher:
        pusher.push(version=1)
        with torch.no_grad():
            model.wide.add_(1.0)
        pusher.push(version=2)
    assert_arrived(worker, model)


@pytest.mark.req("SYNC-04")
def test_a_refused_group_names_side_address_and_phase_at_once(server: ScriptedServer) -> None:
    server.routes["POST /init_communicator/"] = lambda _: problem(
        "group-port-taken", "server: cannot listen on 127.0.0.1:51216", "port"
    )
    with pusher_to(server) as pusher, pytest.raises(WeightSyncError) as caught:
        pusher.connect()
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
    assert len(worker.received) == len(sent_by(Weights()))


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
    with pusher_to(server, all_phases(1.0)) as pusher, pytest.raises(WeightSyncError) as caught:
        pusher.connect()
    released.set()
    assert caught.value.phase == "rendezvous"


@pytest.mark.req("SYNC-04")
def test_a_worker_that_never_joins_ends_by_the_deadline(server: ScriptedServer) -> None:
    released = threading.Event()

    def store_without_worker(body: object) -> Reply:
        asked = InitCommunicator.model_validate(body)
        held = open_group_store(asked.host, asked.port, asked.timeout_s, asked.attempt)
        released.wait(20.0)
        del held
        return {}

    server.routes["POST /init_communicator/"] = store_without_worker
    with pusher_to(server, all_phases(1.0)) as pusher, pytest.raises(WeightSyncError) as caught:
        pusher.connect()
    released.set()
    assert caught.value.phase == "rendezvous"


@pytest.mark.req("SYNC-04")
@pytest.mark.parametrize(
    ("phase", "route"),
    [
        ("reach", "GET /get_world_size/"),
        ("rendezvous", "POST /init_communicator/"),
        ("start", "POST /start_weight_update/"),
        ("transfer", "POST /update_weights/"),
        ("finish", "POST /finish_weight_update/"),
    ],
)
def test_each_phase_has_a_deadline_of_its_own(
    server: ScriptedServer, phase: str, route: str
) -> None:
    """The phase alone is given little time; everything before it has enough."""
    worker, model = Worker(server), Weights()
    answer, released = server.routes[route], threading.Event()
    server.routes[route] = lambda _: released.wait(60.0) and {}
    timeouts = replace(all_phases(60.0), **{phase: 0.5})
    with pusher_to(server, timeouts, model) as pusher:
        with pytest.raises(WeightSyncError, match=r"0\.5 s") as caught:
            pusher.push(version=1)
        assert (caught.value.side, caught.value.phase) == ("server", phase)
        assert caught.value.address == server.base_url
        released.set()
        server.routes[route] = answer
        worker.drop_group()
        pusher.push(version=1)
    assert_arrived(worker, model)


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
        assert set(caught.value.parameters) < set(sent_by(model))
        assert caught.value.parameters[0] in str(caught.value)
        assert "POST /finish_weight_update/" not in dict(server.calls)

        worker.stop_after = None
        pusher.push(version=1)
    assert worker.groups_formed == 2
    assert_arrived(worker, model)


@pytest.mark.req("SYNC-04")
def test_a_hung_collective_is_left_behind_and_the_next_push_forms_a_new_group(
    server: ScriptedServer,
) -> None:
    worker, model = Worker(server), Weights()
    worker.stop_after, worker.hang = 1, threading.Event()
    before = resources()
    with pusher_to(server, replace(all_phases(60.0), transfer=1.0), model) as pusher:
        with pytest.raises(WeightSyncError) as caught:
            pusher.push(version=1)
        assert caught.value.phase == "transfer"
        worker.hang.set()
        assert worker.hung_up.wait(60.0)
        worker.stop_after, worker.hang = None, None
        pusher.push(version=2)
        assert_arrived(worker, model)
    wait_until(lambda: resources() <= before)


@pytest.mark.req("SYNC-04")
def test_what_breaks_on_our_side_is_told_as_ours(server: ScriptedServer) -> None:
    """The server hears of it by the end of the group."""
    worker = Worker(server)

    class Breaks(MergedWeights):
        def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
            yield from list(super().tensors(dtype))[:2]
            raise MemoryError("no room to merge the next one")

    model = Weights()
    with (
        pusher_to(server, choice=OneSource(Breaks(model))) as pusher,
        pytest.raises(WeightSyncError, match="no room to merge") as caught,
    ):
        pusher.push(version=1)
    assert (caught.value.side, caught.value.phase) == ("learner", "transfer")
    assert caught.value.parameters == (list(sent_by(model))[1],)
    assert worker.groups_formed == 1


@pytest.mark.req("SYNC-06")
def test_parameters_that_differ_at_the_server_are_named(server: ScriptedServer) -> None:
    worker = Worker(server)
    refused = Problem.of(
        "weights-differ",
        "server: replica 0 does not hold wide as it was sent",
        "finish: verify",
        [{"where": "wide", "replica": 0, "detail": "..."}, {"where": "odd", "replica": 0}],
    )
    server.routes["POST /finish_weight_update/"] = lambda _: (refused.status, refused)
    with pusher_to(server) as pusher:
        with pytest.raises(WeightSyncError, match=r"at wide, odd: .*does not hold") as caught:
            pusher.push(version=1)
        assert (caught.value.side, caught.value.phase) == ("server", "verify")
        assert caught.value.parameters == ("wide", "odd")
        server.routes["POST /finish_weight_update/"] = worker.finish
        pusher.push(version=1)
    assert worker.groups_formed == 2


@pytest.mark.req("SYNC-06")
def test_a_server_that_compares_less_than_it_was_told_to_is_not_believed(
    server: ScriptedServer,
) -> None:
    worker = Worker(server)
    server.routes["POST /finish_weight_update/"] = lambda body: worker.finish(
        body | {"digests": body["digests"][1:]}
    )
    with pusher_to(server, verify="full") as pusher:
        with pytest.raises(WeightSyncError, match="compared 5 of 6 parameters") as caught:
            pusher.push(version=1)
        assert (caught.value.side, caught.value.phase) == ("server", "verify")


class OverBase(BaseWeights):
    """What passes for an adapter, and the model it is over."""

    adapter = AdapterMeta(r=1, lora_alpha=1, target_modules=["wide"])

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 3))
        self.model = Weights()
        self.base = BaseWeights(self.model)


@pytest.mark.req("SYNC-01", "SYNC-06")
def test_the_base_of_an_adapter_is_told_once_in_each_group(server: ScriptedServer) -> None:
    worker, source = Worker(server), OverBase()
    with pusher_to(server, choice=OneSource(source)) as pusher:
        pusher.push(version=1)
        pusher.push(version=2)
        pusher.abandon()
        worker.drop_group()
        pusher.push(version=3)
        server.routes["POST /start_weight_update/"] = lambda _: problem("adapter-refused", "!", "a")
        with pytest.raises(WeightSyncError):
            pusher.push(version=4)
        server.routes["POST /start_weight_update/"] = worker.start
        pusher.push(version=4)
        pusher.push(version=5)
    bodies = server.bodies("POST /start_weight_update/")
    told = [body["version"] for body in bodies if body["base"] is not None]
    assert told == [1, 3, 4]
    first, again = bodies[0]["base"], bodies[2]["base"]
    assert first["parameters"] == again["parameters"]
    assert [p["name"] for p in first["parameters"]] == list(sent_by(source.model))
    chosen = sample(source.base.metadata("bfloat16"), version=1)
    assert {digest["name"]: digest["columns"] for digest in first["digests"]} == chosen
    for digest in first["digests"]:
        weight = sent_by(source.model)[digest["name"]]
        assert digest["digest"] == digest_by_hand(weight, digest["columns"]), digest["name"]


@pytest.mark.req("SYNC-06")
def test_no_base_is_told_where_nothing_is_verified_and_beside_full_weights(
    server: ScriptedServer,
) -> None:
    Worker(server)
    with pusher_to(server, verify="off", choice=OneSource(OverBase())) as pusher:
        pusher.push(version=1)
    with pusher_to(server, verify="full") as pusher:
        pusher.push(version=2)
    assert [b["base"] for b in server.bodies("POST /start_weight_update/")] == [None, None]


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


@pytest.mark.req("SYNC-01")
def test_a_push_that_failed_is_made_with_what_is_chosen_then(server: ScriptedServer) -> None:
    worker = Worker(server)
    model = Weights()

    class Unwilling(MergedWeights):
        def metadata(self, dtype: DtypeName) -> list[ParameterMeta]:
            raise LookupError("layers differ in rank")

    choice = Falling(Unwilling(model), MergedWeights(model))
    with pusher_to(server, choice=choice) as pusher:
        assert pusher.push(version=1).status.weights_version == 1
        assert [type(error) for error in choice.errors] == [LookupError]
        assert_arrived(worker, model)
        server.routes["POST /start_weight_update/"] = lambda _: problem("internal", "!", "start")
        with pytest.raises(WeightSyncError):
            pusher.push(version=2)
    assert [type(error) for error in choice.errors] == [LookupError, WeightSyncError]


LOST = {
    "reach": ("GET /get_world_size/", problem("not-ready", "starting", "replicas")),
    "rendezvous": ("POST /init_communicator/", problem("group-port-taken", "!", "port")),
    "no group": ("POST /start_weight_update/", problem("weight-update-order", "no group", "x")),
    "gone": ("POST /start_weight_update/", HangUp()),
}
FAILED = {
    "refused": ("POST /start_weight_update/", problem("adapter-refused", "DoRA", "adapter")),
    "broken": ("POST /start_weight_update/", problem("internal", "!", "start")),
    "gone in the transfer": ("POST /update_weights/", HangUp()),
    "order in the transfer": ("POST /update_weights/", problem("weight-update-order", "!", "x")),
    "gone in the end": ("POST /finish_weight_update/", HangUp()),
}


@pytest.mark.req("SYNC-01", "SYNC-07")
@pytest.mark.parametrize(
    ("route", "reply", "failures"),
    [(*lost, 0) for lost in LOST.values()] + [(*failed, 1) for failed in FAILED.values()],
    ids=[*LOST, *FAILED],
)
def test_a_server_that_is_lost_before_the_transfer_says_nothing_about_what_is_pushed(
    server: ScriptedServer, route: str, reply: Reply, failures: int
) -> None:
    Worker(server)
    choice = Falling(MergedWeights(Weights()), MergedWeights(Weights()))
    works = server.routes[route]
    replies = [reply]
    server.routes[route] = lambda body: replies.pop() if replies else works(body)
    with pusher_to(server, choice=choice) as pusher:
        if failures:
            pusher.push(version=1)
        else:
            with pytest.raises(WeightSyncError):
                pusher.push(version=1)
            pusher.push(version=1)
    assert len(choice.errors) == failures


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


def test_closing_and_letting_go_again_or_before_connecting_is_no_error(
    server: ScriptedServer,
) -> None:
    worker = Worker(server)
    with pusher_to(server) as pusher:
        pusher.close()
        pusher.abandon()
        pusher.close()
    with pusher_to(server) as pusher:
        pusher.abandon()
        assert pusher.connect() is pusher.connect()
        pusher.abandon()
        pusher.abandon()
        worker.drop_group()
        pusher.push(version=2)
        pusher.close()
        pusher.close()
    assert worker.groups_formed == 2
    (farewell,) = server.bodies("POST /close_communicator/")  # of the group that it is in
    assert farewell["attempt"] == server.bodies("POST /init_communicator/")[-1]["attempt"]


@pytest.mark.req("SYNC-01", "SYNC-04")
def test_a_pusher_that_was_closed_in_the_middle_of_a_push_forms_no_other_group(
    server: ScriptedServer,
) -> None:
    """As a push is that was left behind in its thread."""
    worker = Worker(server)
    choice = Falling(MergedWeights(Weights()), MergedWeights(Weights()))
    with pusher_to(server, choice=choice) as pusher:

        def close(_: object) -> Reply:
            pusher.close()
            return problem("internal", "!", "transfer")

        server.routes["POST /update_weights/"] = close
        with pytest.raises(WeightSyncError):
            pusher.push(version=1)
        for call in (pusher.connect, lambda: pusher.push(version=1)):
            with pytest.raises(WeightSyncError, match="has left this server"):
                call()
    assert worker.groups_formed == 1
    assert choice.errors == []


@pytest.mark.req("SYNC-04")
def test_a_pusher_that_was_closed_while_it_formed_its_group_lets_go_of_it(
    server: ScriptedServer,
) -> None:
    worker = Worker(server)
    with pusher_to(server) as pusher:

        def form(body: object) -> Reply:
            pusher.close()
            return worker.init(body)

        server.routes["POST /init_communicator/"] = form
        with pytest.raises(WeightSyncError, match="has left this server"):
            pusher.push(version=1)
    assert server.bodies("POST /start_weight_update/") == []


def test_closing_does_not_wait_for_a_server_that_is_gone(server: ScriptedServer) -> None:
    Worker(server)
    with pusher_to(server) as pusher:
        pusher.connect()
        server.routes["POST /close_communicator/"] = lambda _: problem("internal", "!", "close")
        pusher.close()
    assert len(server.bodies("POST /close_communicator/")) == 1


@pytest.mark.req("SYNC-07")
def test_a_learner_that_comes_back_twenty_times_leaves_nothing_behind(
    server: ScriptedServer,
) -> None:
    worker = Worker(server)
    with pusher_to(server) as pusher:
        pusher.push(version=1)
    before = resources()
    for turn in range(20):
        with pusher_to(server) as pusher:
            pusher.push(version=2 + turn)
            if turn % 2:
                pusher.abandon()
                worker.drop_group()
    wait_until(lambda: resources() <= before)
    assert worker.groups_formed == 21


@dataclass(frozen=True)
class Resources:
    """What this process has open and running."""

    files: int
    threads: int

    def __le__(self, other: "Resources") -> bool:
        return self.files <= other.files and self.threads <= other.threads


def resources() -> Resources:
    gc.collect()
    return Resources(*(len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")))


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < deadline, resources()
        time.sleep(0.02)


@pytest.mark.req("SYNC-04")
def test_a_process_ends_though_a_collective_of_it_hangs() -> None:
    """The other rank stays in the group and never receives."""
    program = """
        import sys, threading, torch
        from learner.sync.gloo import GlooGroup
        from shared_contracts.weights import InitCommunicator, ParameterMeta

        group = GlooGroup(InitCommunicator.model_validate_json(sys.argv[1]))
        meta = ParameterMeta(name="w", dtype="float32", shape=[2**22])
        send = lambda: group.send([meta], [("w", torch.zeros(2**22))])
        sending = threading.Thread(target=send, daemon=True)
        sending.start()
        sending.join(1.0)
        assert sending.is_alive()
        group.abandon()
        print("left", flush=True)
    """
    body = InitCommunicator(host="127.0.0.1", port=free_port(), world_size=2, timeout_s=600)
    held = open_group_store(body.host, body.port, body.timeout_s)
    command = [sys.executable, "-c", textwrap.dedent(program), body.model_dump_json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as ours:
        group = other_rank(body)
        said, _ = ours.communicate(timeout=120)
    assert (said, ours.returncode) == ("left\n", 0)
    del group, held


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
    broken = run_together(lambda: fail("refused"), lambda: hung.wait(20.0), 600.0)
    assert not hung.is_set()
    assert broken is not None
    assert (broken.part, str(broken.error)) == ("call", "refused")
    hung.set()


def test_the_calls_reason_is_preferred_to_the_broken_collective() -> None:
    over = threading.Event()

    def call() -> None:
        over.wait()
        time.sleep(0.1)
        fail("the worker died")

    def collective() -> None:
        over.set()
        fail("connection closed by peer")

    broken = run_together(call, collective, 10.0)
    assert broken is not None
    assert (broken.part, str(broken.error)) == ("call", "the worker died")


def test_a_broken_collective_is_returned_when_the_call_hangs_or_succeeds() -> None:
    hung = threading.Event()
    for call in (lambda: None, lambda: hung.wait(REASON_GRACE_S + 20.0)):
        broken = run_together(call, lambda: fail("broken"), 600.0)
        assert broken is not None
        assert (broken.part, str(broken.error)) == ("collective", "broken")
    hung.set()


def test_what_has_not_ended_at_the_deadline_is_named_the_call_first() -> None:
    hung = threading.Event()
    parts = []
    for call in (lambda: None, lambda: hung.wait(20.0)):
        broken = run_together(call, lambda: hung.wait(20.0), 0.3)
        assert broken is not None
        assert isinstance(broken.error, TimeoutError)
        parts.append(broken.part)
    hung.set()
    assert parts == ["collective", "call"]


def test_one_call_has_its_answer_its_error_or_its_deadline() -> None:
    assert run_within(lambda: 7, 5.0) == 7
    with pytest.raises(RuntimeError, match="refused"):
        run_within(lambda: fail("refused"), 5.0)
    hung = threading.Event()
    with pytest.raises(TimeoutError, match=r"0\.2 s"):
        run_within(lambda: hung.wait(20.0), 0.2)
    hung.set()
