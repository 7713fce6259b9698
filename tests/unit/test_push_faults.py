"""A push that breaks in a phase: told at once, with side and phase, and the next push is whole."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from learner.rollout.sync.push import WeightSyncError
from learner.rollout.sync.weights import MergedWeights, OneSource
from rollout_server.weights.weight_group import open_group_store
from shared_contracts.weights import DtypeName, InitCommunicator
from tests.unit.push_worker import (
    Weights,
    Worker,
    all_phases,
    assert_arrived,
    pusher_to,
    resources,
    sent_by,
    wait_until,
)
from tests.unit.scripted_server import HangUp, Reply, ScriptedServer, problem, scripted_server

ROUTES = {
    "reach": "GET /get_world_size/",
    "rendezvous": "POST /init_communicator/",
    "start": "POST /start_weight_update/",
    "transfer": "POST /update_weights/",
    "finish": "POST /finish_weight_update/",
}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


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


def before_the_work(worker: Worker, route: Callable[[Any], Reply]) -> Callable[[Any], Reply]:
    """The connections of a process that died are closed, to the group too."""

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
def test_a_server_that_dies_in_a_phase_is_told_and_the_next_push_is_whole(
    phase: str, dying: Callable[..., Callable[[Any], Reply]]
) -> None:
    with scripted_server() as server:
        worker, model, route = Worker(server), Weights(), ROUTES[phase]
        alive = server.routes[route]
        server.routes[route] = dying(worker, alive)
        with pusher_to(server, model=model) as pusher:
            with pytest.raises(WeightSyncError) as caught:
                pusher.push(version=1)
            assert (caught.value.side, caught.value.phase) == ("server", phase)
            assert caught.value.address == server.base_url
            server.routes[route] = alive
            pusher.push(version=1)
        assert_arrived(worker, model)


@pytest.mark.req("SYNC-04", "SYNC-07")
def test_a_rendezvous_that_a_former_learner_has_left_is_left_alone() -> None:
    with scripted_server() as server:
        worker, model = Worker(server), Weights()

        def after_the_former(body: Any) -> Reply:
            asked = InitCommunicator.model_validate(body)
            former = open_group_store(asked.host, asked.port, asked.timeout_s, "former")
            keys = former.num_keys()
            time.sleep(0.5)  # for the learner to meet somebody there
            assert former.num_keys() == keys
            del former
            return worker.init(body)

        server.routes["POST /init_communicator/"] = after_the_former
        with pusher_to(server, model=model) as pusher:
            pusher.push(version=1)
        assert_arrived(worker, model)
