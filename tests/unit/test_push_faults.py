"""A server that dies in a phase of a push: told at once, and the next push is whole."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from learner.sync.push import WeightSyncError
from rollout_server.group_store import open_group_store
from shared_contracts.weights import InitCommunicator
from tests.unit.scripted_server import HangUp, Reply, scripted_server
from tests.unit.test_push import Weights, Worker, assert_arrived, pusher_to

ROUTES = {
    "reach": "GET /get_world_size/",
    "rendezvous": "POST /init_communicator/",
    "start": "POST /start_weight_update/",
    "transfer": "POST /update_weights/",
    "finish": "POST /finish_weight_update/",
}


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
