"""A push to one server over a real group: what it sends, how it breaks, how it ends."""

import gc
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed import HashStore, ProcessGroupGloo, TCPStore

from learner.rollout.client import RolloutClient
from learner.rollout.server_process import free_ports
from learner.rollout.sync import push
from learner.rollout.sync.group import Sender, join_group
from learner.rollout.sync.push import WeightPusher, WeightSyncError
from learner.rollout.sync.weights import AdapterWeights, MergedWeights, SyncMode
from shared_contracts.errors import ContractError, RunError
from shared_contracts.weights import DtypeName, InitCommunicator, ParameterMeta
from tests.contract.weight_sender import join
from tests.unit.fleets import wait_until
from tests.unit.push_worker import Weights, Worker, open_store
from tests.unit.refusals import refused
from tests.unit.scripted_server import HangUp, Reply, ScriptedServer, problem, scripted_server

ROUTES = {
    "reach": "GET /get_world_size/",
    "rendezvous": "POST /init_communicator/",
    "start": "POST /start_weight_update/",
    "transfer": "POST /update_weights/",
    "finish": "POST /finish_weight_update/",
}
REACH, INIT, START, UPDATE, FINISH = ROUTES.values()
ADAPTER, CLOSE = "POST /load_adapter/", "POST /close_communicator/"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # `ipc` would use it
    with scripted_server() as running:
        yield running


@contextmanager
def pusher_to(
    server: ScriptedServer,
    model: nn.Module | None = None,
    mode: SyncMode | None = None,
    transport: Any = "gloo",
    bucket_bytes: int = 256,
    **options: Any,
) -> Iterator[WeightPusher]:
    client = RolloutClient(server.base_url, timeout_s=60.0)
    mode = mode or SyncMode(MergedWeights(model or Weights()), None, False)
    (port,) = free_ports(1)
    pusher = WeightPusher(client, port, mode, transport, bucket_bytes, **options)
    yield pusher
    pusher.close()


def sent_by(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that a push of the model sends to engines of bfloat16."""
    return {name: p.detach().bfloat16() for name, p in model.named_parameters()}


def assert_arrived(worker: Worker, sent: Mapping[str, Tensor]) -> None:
    assert worker.received.keys() == sent.keys()
    for name, weight in sent.items():
        assert worker.received[name].dtype == weight.dtype, name
        assert torch.equal(worker.received[name], weight), name


@pytest.mark.req("SYNC-03", "SYNC-04", "SYNC-05", "SYNC-06", "SYNC-07", "SYNC-10", "ROLL-03")
@pytest.mark.parametrize("transport", ["gloo", "ipc"])
@pytest.mark.parametrize("bucket_bytes", [1, 256, 2**20])
def test_every_tensor_arrives_bit_for_bit_in_buckets_of_any_size(
    server: ScriptedServer, transport: Any, bucket_bytes: int
) -> None:
    """The worker compares every digest. The second push sends the newest values, in its group."""
    worker, model = Worker(server), Weights()
    with pusher_to(server, model, transport=transport, bucket_bytes=bucket_bytes) as pusher:
        pusher.push(version=1)
        with torch.no_grad():
            model.wide.add_(1.0)
        report = pusher.push(version=2)
    assert_arrived(worker, sent_by(model))
    assert [route for route, _ in server.calls] == [*ROUTES.values(), START, UPDATE, FINISH, CLOSE]
    assert len({body["attempt"] for _, body in server.calls if body is not None}) == 1
    assert [body["version"] for body in server.bodies(START)] == [1, 2]
    for body in server.bodies(START):
        assert body["parameters"] == [
            {"name": name, "dtype": "bfloat16", "shape": list(weight.shape)}
            for name, weight in sent_by(model).items()
        ]
    assert report.status.weights_version == 2
    assert report.bytes == sum(t.nbytes for t in sent_by(model).values())
    assert report.seconds.keys() == {"pause", "transfer", "finish", "total"}


def adapted() -> PeftModel:
    torch.manual_seed(0)
    layers = cast(Any, nn.Sequential(nn.Linear(6, 4)))
    model = get_peft_model(layers, LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    assert isinstance(model, PeftModel)
    return model


@pytest.mark.req("SYNC-01")
def test_an_adapter_is_one_call_with_safetensors_and_its_settings(server: ScriptedServer) -> None:
    worker, model = Worker(server), adapted()
    server.base_url = server.base_url.replace("127.0.0.1", "localhost")
    mode = SyncMode.of(model, "adapter", True)
    with pusher_to(server, mode=mode) as pusher:
        report = pusher.push(version=3)
        mode.adapter_failed(RunError("at another server"))
        pusher.push(version=4)
        server.routes[CLOSE] = lambda _: problem("unauthorized", "!", "header")
    full = (REACH, INIT, START, UPDATE, FINISH)
    assert [route for route, _ in server.calls] == [INIT, ADAPTER, *full, CLOSE]
    assert_arrived(worker, dict(MergedWeights(model).tensors("bfloat16")))
    formed = server.bodies(INIT)[0]
    assert formed["world_size"] == 1, "there is no group"
    assert (formed["host"], formed["timeout_s"]) == ("127.0.0.1", 60.0)
    ((query, content),) = server.bodies(ADAPTER)
    assert query == f"version=3&attempt={formed['attempt']}"
    assert (report.bytes, report.status.weights_version) == (len(content), 3)
    assert content == AdapterWeights(model).safetensors("bfloat16")


@pytest.mark.req("SYNC-01", "SYNC-07")
@pytest.mark.parametrize(
    ("route", "reply", "falls_back"),
    [
        (INIT, problem("group-port-taken", "!", "port"), False),
        (ADAPTER, problem("weight-update-order", "no group", "attempt"), False),
        (ADAPTER, HangUp(), False),
        (ADAPTER, problem("adapter-refused", "DoRA", "adapter"), True),
        (ADAPTER, problem("push-needed", "only full weights", "state"), True),
        (ADAPTER, problem("weight-transfer-failed", "!", "adapter"), True),
    ],
)
def test_full_weights_follow_an_adapter_that_fails_unless_the_server_was_lost(
    server: ScriptedServer, route: str, reply: Reply, falls_back: bool
) -> None:
    worker, model = Worker(server), adapted()
    works, replies = server.routes[route], [reply]
    server.routes[route] = lambda body: replies.pop() if replies else works(body)
    mode = SyncMode.of(model, "adapter", True)
    with pusher_to(server, mode=mode) as pusher:
        if not falls_back:
            with pytest.raises(WeightSyncError):
                pusher.push(version=1)
        pusher.push(version=1)
    assert mode.state()[0] == ("full" if falls_back else "adapter")
    if falls_back:
        assert_arrived(worker, dict(MergedWeights(model).tensors("bfloat16")))


# --- phases that break


@pytest.mark.req("SYNC-04")
def test_a_group_that_is_not_formed_is_named_with_the_ways_without(server: ScriptedServer) -> None:
    """The engine worker is missing. The thread that has joined the store ends, too."""
    worker, held, ended = Worker(server), list[TCPStore](), threading.Event()

    def refuse(body: object) -> Reply:
        held.append(open_store(InitCommunicator.model_validate(body)))
        held[0].wait(["group/0/ready/0"])
        return problem("weight-transfer-timeout", "server: engine worker (rank 1): missing", "x")

    def noting(body: InitCommunicator, given_up: threading.Event, number: int) -> Sender:
        try:
            return join_group(body, given_up, number)
        finally:
            ended.set()

    server.routes[INIT] = refuse
    with pusher_to(server, join=noting) as pusher:
        with pytest.raises(WeightSyncError) as caught:
            pusher.connect()
        assert (caught.value.side, caught.value.phase) == ("server", "rendezvous")
        parts = ("server", server.base_url, "rendezvous", "(rank 1): missing", "colocate", "hf")
        assert all(part in str(caught.value) for part in parts)
        assert ended.wait(60.0)
        held.clear()
        server.routes[INIT] = worker.init
        pusher.push(version=1)
    assert_arrived(worker, sent_by(Weights()))


@pytest.mark.req("SYNC-04")
@pytest.mark.parametrize("phase", ROUTES)
@pytest.mark.parametrize("half_way_through_its_200", [False, True])
def test_a_server_that_dies_in_a_phase_is_named_and_the_next_push_is_whole(
    server: ScriptedServer, phase: str, half_way_through_its_200: bool
) -> None:
    """The connections of a dead process are closed, those of the group too."""
    worker, model, route = Worker(server), Weights(), ROUTES[phase]
    alive = server.routes[route]

    def die(body: object) -> Reply:
        done = alive(body) if half_way_through_its_200 else None
        worker.leave()
        return HangUp(after=done)

    server.routes[route] = die
    with pusher_to(server, model) as pusher:
        with pytest.raises(WeightSyncError) as caught:
            pusher.push(version=1)
        assert (caught.value.side, caught.value.phase) == ("server", phase)
        server.routes[route] = alive
        pusher.push(version=1)
    assert_arrived(worker, sent_by(model))


@pytest.mark.req("SYNC-04", "SYNC-05")
def test_a_transfer_that_breaks_names_the_reason_and_ends(server: ScriptedServer) -> None:
    """The worker stays in its group, where the learner's collective waits for it."""
    worker, model = Worker(server), Weights()
    with pusher_to(server, model) as pusher:
        pusher.push(version=1)  # the first one starts threads that stay
    before = resources()
    with pusher_to(server, model) as pusher:
        worker.breaks_after, finished = 1, len(server.bodies(FINISH))
        with pytest.raises(WeightSyncError, match="server: no such name") as caught:
            pusher.push(version=2)
        assert (caught.value.side, caught.value.phase) == ("server", "transfer")
        assert len(server.bodies(FINISH)) == finished
        worker.breaks_after = None
        pusher.push(version=2)
    assert_arrived(worker, sent_by(model))
    del caught  # its traceback has the old group
    wait_until(lambda: resources() <= before)


def resources() -> Counter[str]:
    gc.collect()
    return Counter({kind: len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")})


@pytest.mark.req("SYNC-04")
@pytest.mark.parametrize("error", [MemoryError("no room to merge the next one"), MemoryError()])
def test_an_error_of_the_learner_is_named_as_its_own(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, error: MemoryError
) -> None:
    monkeypatch.setattr(push, "REASON_GRACE_S", 0.1)
    worker, model = Worker(server), Weights()

    class Breaks(MergedWeights):
        def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
            yield from list(super().tensors(dtype))[:2]
            raise error

    mode = SyncMode(Breaks(model), None, False)
    with pusher_to(server, mode=mode) as pusher, pytest.raises(WeightSyncError) as caught:
        pusher.push(version=1)
    assert str(caught.value).endswith(str(error) or "MemoryError")
    assert (caught.value.side, caught.value.phase) == ("learner", "transfer")
    assert worker.groups_formed == 1


@pytest.mark.req("SYNC-04")
def test_a_learner_that_sends_on_after_the_answer_of_the_server_is_late(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    Worker(server)
    server.routes[UPDATE] = lambda _: server.routes[START](server.bodies(START)[0])
    with pusher_to(server) as pusher:
        pusher.connect()
        monkeypatch.setattr(push, "_ANSWER_MARGIN_S", 0.5 - 60.0)
        with pytest.raises(WeightSyncError, match=r"learner .* transfer: no end within 0\.5 s"):
            pusher.push(version=1)


@pytest.mark.req("SYNC-04", "SYNC-07")
@pytest.mark.parametrize("route", [INIT, START, UPDATE, FINISH, ADAPTER])
def test_a_learner_that_lost_its_server_ends(server: ScriptedServer, route: str) -> None:
    worker = Worker(server)
    mode = SyncMode.of(adapted(), "adapter" if route == ADAPTER else "full", True)
    found = "the learner on b has taken this server over"
    server.routes[route] = lambda _: problem("taken-over", found, "attempt")
    with (
        pusher_to(server, mode=mode) as pusher,
        refused(server.base_url, found, "name other servers"),
    ):
        pusher.push(version=1)
    server.routes[route] = lambda _: problem("unauthorized", "no", "header")
    with pusher_to(server, mode=mode) as pusher, pytest.raises(ContractError):
        pusher.push(version=1)
    assert (worker.groups_formed, mode.fallback) == (2 * (route not in (INIT, ADAPTER)), None)


# --- the group from its forming to its end


def body(port: int, timeout_s: float) -> InitCommunicator:
    given = {"host": "127.0.0.1", "port": port, "world_size": 2, "attempt": "a"}
    return InitCommunicator.model_validate(given | {"timeout_s": timeout_s})


@pytest.mark.req("SYNC-04", "SYNC-07")
def test_a_store_of_a_former_learner_is_not_joined() -> None:
    asked = body(free_ports(1)[0], timeout_s=0.2)
    with pytest.raises(TimeoutError, match="no rendezvous at 127"):
        join_group(asked, threading.Event())
    former = open_store(asked, "former")
    keys = former.num_keys()
    with pytest.raises(TimeoutError, match="that of an earlier call"):
        join_group(asked, threading.Event())
    assert former.num_keys() == keys


@pytest.mark.req("SYNC-04")
def test_one_deadline_bounds_all_of_a_transfer() -> None:
    """The other rank never receives."""
    store, options = HashStore(), ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(hours=1)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    with ThreadPoolExecutor(2) as pool:
        ours, _theirs = pool.map(lambda rank: ProcessGroupGloo(store, rank, 2, options), range(2))
    group = Sender(cast(Any, ours), body(1, timeout_s=0.5), torch.device("cpu"))
    meta = ParameterMeta(name="w", dtype="float32", shape=[2**22])
    with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
        group.send([meta], [("w", torch.zeros(2**22))])


@pytest.mark.req("SYNC-07")
def test_a_group_names_the_one_that_it_replaces_and_is_closed_once(server: ScriptedServer) -> None:
    """A group that is not formed keeps the name; close can fail, or come before a group."""
    worker = Worker(server)
    with pusher_to(server) as pusher:
        pusher.close()
        pusher.abandon()
    with pusher_to(server) as pusher:
        assert pusher.connect() is pusher.connect()
        pusher.abandon()
        pusher.abandon()
        server.routes[INIT] = lambda _: problem("group-port-taken", "!", "port")
        with pytest.raises(WeightSyncError, match="group is taken"):
            pusher.connect()
        server.routes[INIT] = worker.init
        pusher.push(version=2)
        server.routes[CLOSE] = lambda _: problem("internal", "!", "close")
        pusher.close()
        pusher.close()
    formed = server.bodies(INIT)
    first, _, last = attempts = [each["attempt"] for each in formed]
    assert len(set(attempts)) == 3
    assert [each["replaces"] for each in formed] == [None, first, first]
    assert [each["attempt"] for each in server.bodies(CLOSE)] == [last]


@pytest.mark.req("SYNC-01", "SYNC-04")
@pytest.mark.parametrize("route", [INIT, START, UPDATE, ADAPTER])
def test_a_pusher_that_was_closed_forms_no_other_group(server: ScriptedServer, route: str) -> None:
    """A push can still run in its thread when its pusher is closed."""
    worker = Worker(server)
    mode = SyncMode.of(adapted(), "adapter" if route == ADAPTER else "full", True)
    works = server.routes[route]
    with pusher_to(server, mode=mode) as pusher:

        def close(body: object) -> Reply:
            pusher.close()
            return works(body) if route in (INIT, START) else problem("internal", "!", "x")

        server.routes[route] = close
        with pytest.raises(WeightSyncError):
            pusher.push(version=1)
        with pytest.raises(WeightSyncError, match="has left the group"):
            pusher.push(version=1)
    assert (worker.groups_formed, mode.fallback) == (int(route != ADAPTER), None)
    assert len(server.bodies(FINISH)) == 0


@pytest.mark.slow
@pytest.mark.req("SYNC-04")
def test_a_process_ends_though_its_collective_hangs() -> None:
    """The other rank stays in the group and never receives."""
    program = """if True:
        import sys, threading, torch
        from learner.rollout.sync.group import join_group
        from shared_contracts.weights import InitCommunicator, ParameterMeta

        body = InitCommunicator.model_validate_json(sys.argv[1])
        group = join_group(body, threading.Event())
        meta = ParameterMeta(name="w", dtype="float32", shape=[2**22])
        send = lambda: group.send([meta], [("w", torch.zeros(2**22))])
        sending = threading.Thread(target=send, daemon=True)
        sending.start()
        sending.join(1.0)
        assert sending.is_alive()
        group.abandon()
    """
    asked = body(free_ports(1)[0], timeout_s=600)
    _store = open_store(asked)
    with subprocess.Popen([sys.executable, "-c", program, asked.model_dump_json()]) as ours:
        _group = join(asked.port, 1, 2, 60.0)
        assert ours.wait(120.0) == 0
