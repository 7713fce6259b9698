"""A push over a real gloo group: what it sends, what is verified, how it breaks and ends."""

import logging
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from learner.rollout.exclusive_lease import Heartbeat
from learner.rollout.server_process import free_ports
from learner.rollout.sync.push import WeightSyncError
from learner.rollout.sync.transports import CurrentGpu, WeightGroup, join_group
from learner.rollout.sync.weights import BaseWeights, MergedWeights, OneSource
from rollout_server.weights.weight_group import open_group_store
from shared_contracts.digests import sample
from shared_contracts.errors import ContractError, Problem
from shared_contracts.weights import AdapterMeta, DtypeName, InitCommunicator
from tests.contract.weight_sender import digest as digest_of
from tests.unit.push_worker import (
    BUCKET_BYTES,
    Falling,
    Weights,
    Worker,
    all_phases,
    assert_arrived,
    other_rank,
    pusher_to,
    resources,
    sent_by,
    wait_until,
)
from tests.unit.scripted_server import (
    HangUp,
    Reply,
    ScriptedServer,
    info,
    problem,
    scripted_server,
)

T = TypeVar("T")

ROUTES = {
    "reach": "GET /get_world_size/",
    "rendezvous": "POST /init_communicator/",
    "start": "POST /start_weight_update/",
    "transfer": "POST /update_weights/",
    "finish": "POST /finish_weight_update/",
}
INIT, START, UPDATE, FINISH = list(ROUTES.values())[1:]
KEEP, CLOSE = "POST /keep_communicator/", "POST /close_communicator/"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


# --- what is sent and verified


@pytest.mark.req("SYNC-03", "SYNC-10")
@pytest.mark.parametrize("bucket_bytes", [1, 100, BUCKET_BYTES, 2**20])
def test_every_tensor_arrives_bit_for_bit_in_buckets_of_any_size(
    server: ScriptedServer, bucket_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest values: the second push sends others than the first."""
    worker, model = Worker(server), Weights()
    with pusher_to(server, model=model, bucket_bytes=bucket_bytes) as pusher:
        pusher.push(version=1)
        with torch.no_grad():
            model.wide.add_(1.0)
        with caplog.at_level(logging.INFO, "learner.rollout.sync.push"):
            report = pusher.push(version=2)
    assert_arrived(worker, model)
    assert report.status.weights_version == 2
    assert report.bytes == sum(t.nbytes for t in sent_by(model).values())
    assert {"pause", "transfer", "load", "verify", "caches", "send", "total"} <= set(report.seconds)
    (line,) = [record.getMessage() for record in caplog.records]
    for part in (f"{report.bytes} bytes", "GB/s", "pause 0.100 s", "verify 0.100 s", "caches"):
        assert part in line


@pytest.mark.req("SYNC-03", "SYNC-05", "SYNC-07")
def test_a_push_is_three_calls_after_its_group_was_formed(server: ScriptedServer) -> None:
    """The manifest comes first, in the type of the engines; every start names the attempt."""
    Worker(server)
    model = Weights()
    with pusher_to(server, model=model) as pusher:
        pusher.push(version=1)
        pusher.push(version=2)
    calls = [route for route, _ in server.calls if route != KEEP]
    assert calls == [*ROUTES.values(), START, UPDATE, FINISH, CLOSE]
    for route in (START, UPDATE, FINISH):
        assert [body["version"] for body in server.bodies(route)] == [1, 2]
    (formed,) = server.bodies(INIT)
    for body in server.bodies(START):
        assert (body["adapter"], body["attempt"]) == (None, formed["attempt"])
        assert body["parameters"] == [
            {"name": name, "dtype": "bfloat16", "shape": list(p.shape)}
            for name, p in model.named_parameters()
        ]


@pytest.mark.req("SYNC-06")
def test_digests_are_of_the_parameters_that_verification_selects(server: ScriptedServer) -> None:
    Worker(server)
    model = Weights()
    for version, verify in enumerate(("off", "sample", "full"), start=1):
        with pusher_to(server, model=model, verify=verify) as pusher:  # type: ignore[arg-type]
            pusher.push(version)
    off, some, full = (body["digests"] for body in server.bodies(FINISH))
    assert off == []
    chosen = sample(MergedWeights(model).metadata("bfloat16"), version=2)
    assert {digest["name"]: digest["columns"] for digest in some} == chosen
    assert {digest["name"]: digest["columns"] for digest in full} == dict.fromkeys(sent_by(model))
    for digest in [*some, *full]:
        weight, columns = sent_by(model)[digest["name"]], digest["columns"]
        assert digest["digest"] == digest_of(weight, columns), digest["name"]


@pytest.mark.req("SYNC-06", "RES-25")
@pytest.mark.parametrize(
    ("faults", "parameters", "complaint"),
    [
        ([{"where": "wide"}, {"where": "odd"}], ("wide", "odd"), "at wide, odd: "),
        (
            [{}, {"where": 5}, {"where": "odd\x1b[2J"}],
            (),
            r"did not have to compare: 5, odd\x1b[2J",
        ),
        (
            [{"where": name} for name in ["wide", *["ghost" + "y" * 5000] * 200]],
            ("wide",),
            "did not have to compare: ghosty",
        ),
    ],
    ids=["compared", "not names", "not compared"],
)
def test_parameters_that_differ_are_named_and_the_next_push_works(
    server: ScriptedServer,
    faults: list[dict[str, Any]],
    parameters: tuple[str, ...],
    complaint: str,
) -> None:
    """The server's text is bounded; names that were not compared are told apart."""
    worker = Worker(server)
    refused = Problem.of("weights-differ", "it does not hold them", "finish: verify", faults)
    server.routes[FINISH] = lambda _: (refused.status, refused)
    with pusher_to(server, verify="full") as pusher:
        with pytest.raises(WeightSyncError, match="does not hold") as caught:
            pusher.push(version=1)
        assert (caught.value.side, caught.value.phase) == ("server", "verify")
        assert caught.value.parameters == parameters
        assert complaint in str(caught.value)
        assert len(str(caught.value)) < 2000
        server.routes[FINISH] = worker.finish
        pusher.push(version=1)
    assert worker.groups_formed == 2


@pytest.mark.req("SYNC-06")
def test_a_server_that_compares_too_few_parameters_breaks_the_push(
    server: ScriptedServer,
) -> None:
    worker = Worker(server)
    server.routes[FINISH] = lambda body: worker.finish(body | {"digests": body["digests"][1:]})
    with pusher_to(server, verify="full") as pusher:
        with pytest.raises(WeightSyncError, match="compared 5 of 6 parameters") as caught:
            pusher.push(version=1)
        assert (caught.value.side, caught.value.phase) == ("server", "verify")


# --- adapters and their fallback


class OverBase(BaseWeights):
    """Weights that pass for an adapter. model: its base."""

    adapter = AdapterMeta(r=1, lora_alpha=1, target_modules=["wide"])

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 3))
        self.model = Weights()
        self.base = BaseWeights(self.model)


@pytest.mark.req("SYNC-01", "SYNC-06")
def test_the_base_of_an_adapter_is_sent_once_in_each_group(server: ScriptedServer) -> None:
    """And never with full weights, or where nothing is verified."""
    worker, source = Worker(server), OverBase()
    with pusher_to(server, choice=OneSource(source)) as pusher:
        pusher.push(version=1)
        pusher.push(version=2)
        pusher.abandon()
        worker.drop_group()
        pusher.push(version=3)
    with pusher_to(server, verify="off", choice=OneSource(source)) as pusher:
        pusher.push(version=4)
    with pusher_to(server, verify="full") as pusher:
        pusher.push(version=5)
    bodies = server.bodies(START)
    assert [body["version"] for body in bodies if body["base"] is not None] == [1, 3]
    base = bodies[0]["base"]
    assert [p["name"] for p in base["parameters"]] == list(sent_by(source.model))
    chosen = sample(source.base.metadata("bfloat16"), version=1)
    assert {digest["name"]: digest["columns"] for digest in base["digests"]} == chosen
    for digest in base["digests"]:
        weight = sent_by(source.model)[digest["name"]]
        assert digest["digest"] == digest_of(weight, digest["columns"]), digest["name"]


# Failures that say nothing about the weights, and those that may be due to them.
LOST = {
    "reach": (ROUTES["reach"], problem("not-ready", "starting", "replicas")),
    "rendezvous": (INIT, problem("group-port-taken", "!", "port")),
    "no group": (START, problem("weight-update-order", "no group", "x")),
    "gone": (START, HangUp()),
}
FAILED = {
    "refused": (START, problem("adapter-refused", "DoRA", "adapter")),
    "gone in the transfer": (UPDATE, HangUp()),
    "gone in the end": (FINISH, HangUp()),
}


@pytest.mark.req("SYNC-01", "SYNC-07")
@pytest.mark.parametrize(
    ("route", "reply", "failures"),
    [(*lost, 0) for lost in LOST.values()] + [(*failed, 1) for failed in FAILED.values()],
    ids=[*LOST, *FAILED],
)
def test_a_failed_push_is_repeated_with_the_other_weights_unless_the_server_was_lost_before(
    server: ScriptedServer, route: str, reply: Reply, failures: int
) -> None:
    worker, model = Worker(server), Weights()
    choice = Falling(MergedWeights(model), MergedWeights(model))
    works = server.routes[route]
    replies = [reply]
    server.routes[route] = lambda body: replies.pop() if replies else works(body)
    with pusher_to(server, choice=choice) as pusher:
        if not failures:
            with pytest.raises(WeightSyncError):
                pusher.push(version=1)
        pusher.push(version=1)
    assert len(choice.errors) == failures
    assert_arrived(worker, model)


# --- phases that break


@pytest.mark.req("SYNC-04")
def test_a_refused_group_is_an_error_with_side_address_and_phase(server: ScriptedServer) -> None:
    worker = Worker(server)
    server.routes[INIT] = lambda _: problem(
        "group-port-taken", "server: cannot listen on 127.0.0.1:51216", "port"
    )
    with pusher_to(server) as pusher:
        with pytest.raises(WeightSyncError) as caught:
            pusher.connect()
        assert (caught.value.side, caught.value.phase) == ("server", "rendezvous")
        assert caught.value.address == server.base_url
        for part in ("server", server.base_url, "rendezvous", "cannot listen on 127.0.0.1:51216"):
            assert part in str(caught.value)
        server.routes[INIT] = worker.init
        pusher.push(version=1)
    assert len(worker.received) == len(sent_by(Weights()))


@pytest.mark.req("SYNC-04")
def test_a_worker_that_never_joins_ends_by_the_deadline(server: ScriptedServer) -> None:
    released = threading.Event()

    def store_without_worker(body: object) -> Reply:
        asked = InitCommunicator.model_validate(body)
        held = open_group_store(asked.host, asked.port, asked.timeout_s, asked.attempt)
        released.wait(60.0)
        del held
        return {}

    server.routes[INIT] = store_without_worker
    with pusher_to(server, all_phases(1.0)) as pusher, pytest.raises(WeightSyncError) as caught:
        pusher.connect()
    released.set()
    assert caught.value.phase == "rendezvous"


@pytest.mark.req("SYNC-04")
@pytest.mark.parametrize("phase", ROUTES)
def test_each_phase_has_a_deadline_of_its_own(server: ScriptedServer, phase: str) -> None:
    """A server that hangs; the phases before have much more time."""
    worker, model, route = Worker(server), Weights(), ROUTES[phase]
    answer, released = server.routes[route], threading.Event()
    server.routes[route] = lambda _: released.wait(60.0) and {}
    with pusher_to(server, replace(all_phases(60.0), **{phase: 0.5}), model) as pusher:
        with pytest.raises(WeightSyncError, match=r"0\.5 s") as caught:
            pusher.push(version=1)
        assert (caught.value.side, caught.value.phase) == ("server", phase)
        released.set()
    server.routes[route] = answer
    worker.drop_group()
    with pusher_to(server, model=model) as pusher:
        pusher.push(version=1)
    assert_arrived(worker, model)


def before_the_work(worker: Worker, route: Callable[[Any], Reply]) -> Callable[[Any], Reply]:
    """The connections of a dead process are closed, those of the group too."""

    def die(body: Any) -> Reply:
        worker.drop_group()
        return HangUp()

    return die


def half_way_through_its_200(
    worker: Worker, route: Callable[[Any], Reply]
) -> Callable[[Any], Reply]:
    def die(body: Any) -> Reply:
        done = route(body)
        worker.drop_group()
        return HangUp(after=done)

    return die


@pytest.mark.req("SYNC-04")
@pytest.mark.parametrize("phase", ROUTES)
@pytest.mark.parametrize("dying", [before_the_work, half_way_through_its_200])
def test_a_server_that_dies_in_a_phase_is_named_and_the_next_push_is_whole(
    server: ScriptedServer, phase: str, dying: Callable[..., Callable[[Any], Reply]]
) -> None:
    worker, model, route = Worker(server), Weights(), ROUTES[phase]
    alive = server.routes[route]
    server.routes[route] = dying(worker, alive)
    with pusher_to(server, model=model) as pusher:
        with pytest.raises(WeightSyncError) as caught:
            pusher.push(version=1)
        assert (caught.value.side, caught.value.phase) == ("server", phase)
        server.routes[route] = alive
        pusher.push(version=1)
    assert_arrived(worker, model)


@pytest.mark.req("SYNC-04")
def test_a_transfer_that_breaks_half_way_names_the_next_parameters(
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
        assert FINISH not in dict(server.calls)
        worker.stop_after = None
        pusher.push(version=1)
    assert worker.groups_formed == 2
    assert_arrived(worker, model)


@pytest.mark.req("SYNC-04")
def test_a_hung_collective_is_abandoned_and_leaves_nothing_behind(server: ScriptedServer) -> None:
    worker, model = Worker(server), Weights()
    with pusher_to(server, all_phases(60.0), model) as pusher:
        pusher.push(version=1)  # the first one starts threads that stay
    worker.stop_after, worker.hang = 1, threading.Event()
    before = resources()
    with pusher_to(server, replace(all_phases(60.0), transfer=1.0), model) as pusher:
        with pytest.raises(WeightSyncError) as caught:
            pusher.push(version=2)
        assert caught.value.phase == "transfer"
        worker.hang.set()
        assert worker.hung_up.wait(60.0)
    worker.stop_after, worker.hang = None, None
    with pusher_to(server, all_phases(60.0), model) as pusher:
        pusher.push(version=2)
        assert_arrived(worker, model)
    wait_until(lambda: resources() <= before)


@pytest.mark.req("SYNC-04")
def test_an_error_of_the_learner_is_named_as_its_own(server: ScriptedServer) -> None:
    worker, model = Worker(server), Weights()

    class Breaks(MergedWeights):
        def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
            yield from list(super().tensors(dtype))[:2]
            raise MemoryError("no room to merge the next one")

    with (
        pusher_to(server, choice=OneSource(Breaks(model))) as pusher,
        pytest.raises(WeightSyncError, match="no room to merge") as caught,
    ):
        pusher.push(version=1)
    assert (caught.value.side, caught.value.phase) == ("learner", "transfer")
    assert caught.value.parameters == (list(sent_by(model))[1],)
    assert worker.groups_formed == 1


# --- the group from its forming to its end


@pytest.mark.req("SYNC-04", "SYNC-07")
def test_a_store_of_a_former_learner_is_not_joined(server: ScriptedServer) -> None:
    worker, model = Worker(server), Weights()
    looked = threading.Event()

    def after_the_former(body: Any) -> Reply:
        asked = InitCommunicator.model_validate(body)
        former = open_group_store(asked.host, asked.port, asked.timeout_s, "former")
        keys = former.num_keys()
        looked.wait(0.5)  # in which the learner looks for its attempt
        assert former.num_keys() == keys
        del former
        return worker.init(body)

    server.routes[INIT] = after_the_former
    with pusher_to(server, model=model) as pusher:
        pusher.push(version=1)
    assert_arrived(worker, model)


def test_each_group_is_closed_once(server: ScriptedServer) -> None:
    """Also by calls before it was formed, repeated ones, and where the server refuses."""
    worker = Worker(server)
    with pusher_to(server) as pusher:
        pusher.close()
        pusher.abandon()
    with pusher_to(server) as pusher:
        assert pusher.connect() is pusher.connect()
        pusher.abandon()
        pusher.abandon()
        worker.drop_group()
        pusher.push(version=2)
        server.routes[CLOSE] = lambda _: problem("internal", "!", "close")
        pusher.close()
        pusher.close()
    formed = [body["attempt"] for body in server.bodies(INIT)]
    assert [body["attempt"] for body in server.bodies(CLOSE)] == formed
    assert len(formed) == 2


@pytest.mark.req("SYNC-01", "SYNC-04")
@pytest.mark.parametrize("route", [INIT, UPDATE])
def test_a_pusher_that_was_closed_meanwhile_forms_no_other_group(
    server: ScriptedServer, route: str
) -> None:
    """As a push that was left behind in its thread."""
    worker = Worker(server)
    choice = Falling(MergedWeights(Weights()), MergedWeights(Weights()))
    works = server.routes[route]
    with pusher_to(server, choice=choice) as pusher:

        def close(body: object) -> Reply:
            pusher.close()
            return works(body) if route == INIT else problem("internal", "!", "transfer")

        server.routes[route] = close
        with pytest.raises(WeightSyncError):
            pusher.push(version=1)
        with pytest.raises(WeightSyncError, match="has left this server"):
            pusher.push(version=1)
    assert (worker.groups_formed, choice.errors) == (1, [])
    assert len(server.bodies(START)) == (route == UPDATE)


@pytest.mark.req("SYNC-04", "SYNC-07")
@pytest.mark.parametrize("only_if_free", [False, True])
def test_a_learner_sends_heartbeats_from_the_forming_of_its_group_to_its_end(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, only_if_free: bool
) -> None:
    monkeypatch.setattr("learner.rollout.sync.push.Heartbeat", partial(Heartbeat, every_s=0.05))
    worker = Worker(server)
    signs = partial(server.bodies, KEEP)

    def form(body: object) -> Reply:
        wait_until(lambda: len(signs()) >= 2)
        return worker.init(body)

    server.routes[INIT] = form
    with pusher_to(server) as pusher:
        pusher.connect(only_if_free=only_if_free)
        server.routes[KEEP] = lambda _: HangUp()
        begun = len(signs())
        wait_until(lambda: len(signs()) >= begun + 3)  # also after one that failed
        (asked,) = server.bodies(INIT)
        assert {sign["attempt"] for sign in signs()} == {asked["attempt"]}
        pusher.close()
        wait_until(lambda: "heartbeat" not in {each.name for each in threading.enumerate()})


@pytest.mark.req("SYNC-07")
def test_a_learner_leaves_the_group_of_another_alone(server: ScriptedServer) -> None:
    worker = Worker(server)
    with pusher_to(server) as pusher:
        pusher.push(version=1)
        server.routes[START] = lambda _: problem("weight-update-order", "another group", "attempt")
        heard = iter([1.9, 0.1])
        server.routes["GET /info/"] = lambda _: info().model_copy(
            update={"weight_group": "127.0.0.1:51216", "weight_group_heard_s": next(heard)}
        )
        with pytest.raises(WeightSyncError, match="another group"):
            pusher.push(version=2)
        with pytest.raises(ContractError, match="another learner pushes to this server"):
            pusher.push(version=2)
    assert worker.groups_formed == 1


@pytest.mark.slow
@pytest.mark.req("SYNC-04")
def test_a_process_ends_though_its_collective_hangs() -> None:
    """The other rank stays in the group and never receives."""
    program = """
        import sys, threading, torch
        from learner.rollout.sync.transports import GlooGroup
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
    body = InitCommunicator(
        host="127.0.0.1", port=free_ports(1)[0], world_size=2, attempt="a", timeout_s=600
    )
    held = open_group_store(body.host, body.port, body.timeout_s, body.attempt)
    command = [sys.executable, "-c", textwrap.dedent(program), body.model_dump_json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as ours:
        group = other_rank(body)
        output, _ = ours.communicate(timeout=120)
    assert (output, ours.returncode) == ("left\n", 0)
    del group, held


# --- the GPU of a pusher


class NotedGpu(CurrentGpu):
    """threads: in which calls were made on it."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def used_by(self, call: Callable[[], T]) -> Callable[[], T]:
        def on_it() -> T:
            self.threads.append(threading.current_thread())
            return call()

        return on_it


@pytest.mark.req("FULL-07")
def test_a_group_is_joined_and_used_on_the_gpu_of_its_pusher(server: ScriptedServer) -> None:
    gpu, threads = NotedGpu(), list[threading.Thread]()
    Worker(server)

    def join(body: InitCommunicator, given_up: threading.Event) -> WeightGroup:
        threads.append(threading.current_thread())
        group: Any = join_group(body, given_up)
        send = group.send

        def noting(*arguments: Any) -> None:
            threads.append(threading.current_thread())
            send(*arguments)

        group.send = noting
        joined: WeightGroup = group
        return joined

    with pusher_to(server, join=join, gpu=gpu) as pusher:
        pusher.push(version=2)
    assert len(threads) == 2
    assert gpu.threads == threads
