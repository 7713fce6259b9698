"""A weight group from its forming to its end: nothing of it is left behind."""

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import pytest
from torch import Tensor

from learner.rollout.exclusive_lease import Heartbeat
from learner.rollout.sync.push import WeightSyncError
from learner.rollout.sync.transports import CurrentGpu, WeightGroup, join_group
from learner.rollout.sync.weights import MergedWeights
from rollout_server.weights.weight_group import open_group_store
from shared_contracts.errors import ContractError
from shared_contracts.server_info import Info
from shared_contracts.weights import InitCommunicator, ParameterMeta
from tests.unit.push_worker import (
    Falling,
    Weights,
    Worker,
    free_port,
    other_rank,
    pusher_to,
    resources,
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


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


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
    formed = [body["attempt"] for body in server.bodies("POST /init_communicator/")]
    left = [body["attempt"] for body in server.bodies("POST /close_communicator/")]
    assert left == formed, "each once: the first before the second was formed"


class NumberedGpu(CurrentGpu):
    """GPU 3, and in which threads it is current."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    @property
    def current(self) -> int:
        return getattr(self._of_thread, "index", 0)

    def used_by(self, call: Callable[[], T]) -> Callable[[], T]:
        def on_it() -> T:
            self._of_thread.index = 3
            return call()

        return on_it


@pytest.mark.req("FULL-07")
def test_the_group_is_joined_and_used_on_the_gpu_that_was_current_for_the_pusher(
    server: ScriptedServer,
) -> None:
    gpu, worker = NumberedGpu(), Worker(server)
    joined_on: list[int] = []
    sent_on: list[int] = []

    class Noting:
        def __init__(self, group: WeightGroup) -> None:
            self._group = group
            self.close, self.abandon = group.close, group.abandon

        def send(
            self, parameters: Sequence[ParameterMeta], weights: Iterable[tuple[str, Tensor]]
        ) -> None:
            sent_on.append(gpu.current)
            self._group.send(parameters, weights)

    def join(body: InitCommunicator, given_up: threading.Event) -> WeightGroup:
        joined_on.append(gpu.current)
        return Noting(join_group(body, given_up))

    with pusher_to(server, join=join, gpu=gpu) as pusher:
        pusher.push(version=2)
    assert (joined_on, sent_on) == ([3], [3])
    assert worker.groups_formed == 1
    assert gpu.current == 0, "each in a thread of its own"


@pytest.mark.req("FULL-07")
def test_nccl_is_loaded_before_the_server_is_asked_for_a_group(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from learner.rollout.sync import nccl

    def missing() -> None:
        raise OSError("no NCCL is here")

    monkeypatch.setattr(nccl, "NCCLLibrary", missing)
    with (
        pusher_to(server, transport="nccl") as pusher,
        pytest.raises(OSError, match="no NCCL is here"),
    ):
        pusher.connect()
    assert server.bodies("POST /init_communicator/") == []


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


@pytest.mark.req("SYNC-07")
def test_a_learner_says_that_it_lives_as_long_as_its_group_stands(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_s = 0.05
    monkeypatch.setattr("learner.rollout.sync.push.Heartbeat", partial(Heartbeat, every_s=every_s))
    Worker(server)
    signs = partial(server.bodies, "POST /keep_communicator/")
    with pusher_to(server) as pusher:
        pusher.connect()
        wait_until(lambda: len(signs()) >= 3)
        server.routes["POST /keep_communicator/"] = lambda _: HangUp()
        wait_until(lambda: len(signs()) >= 6)  # whatever becomes of one
        (asked,) = server.bodies("POST /init_communicator/")
        assert {sign["attempt"] for sign in signs()} == {asked["attempt"]}
        pusher.abandon()
        wait_until(lambda: "heartbeat" not in {each.name for each in threading.enumerate()})
        given = len(signs())
        time.sleep(5 * every_s)
        assert len(signs()) == given


@pytest.mark.req("SYNC-04", "SYNC-07")
@pytest.mark.parametrize("only_if_free", [False, True])
def test_a_learner_says_that_it_lives_while_its_group_still_forms(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, only_if_free: bool
) -> None:
    """A guest, as `learner doctor` is, too: a server gives up who is silent."""
    monkeypatch.setattr("learner.rollout.sync.push.Heartbeat", partial(Heartbeat, every_s=0.05))
    worker = Worker(server)
    signs = partial(server.bodies, "POST /keep_communicator/")

    def form(body: object) -> Reply:
        wait_until(lambda: len(signs()) >= 2)
        return worker.init(body)

    server.routes["POST /init_communicator/"] = form
    with pusher_to(server) as pusher:
        pusher.connect(only_if_free=only_if_free)
        (asked,) = server.bodies("POST /init_communicator/")
        assert {sign["attempt"] for sign in signs()} == {asked["attempt"]}
        pusher.close()
        wait_until(lambda: "heartbeat" not in {each.name for each in threading.enumerate()})


def info_of_a_group(heard_s: float) -> Info:
    group = {"weight_group": "127.0.0.1:51216", "weight_group_heard_s": heard_s}
    return info().model_copy(update=group)


@pytest.mark.req("SYNC-07")
def test_every_push_names_the_group_it_is_to_go_over(server: ScriptedServer) -> None:
    Worker(server)
    with pusher_to(server) as pusher:
        pusher.push(version=1)
        pusher.push(version=2)
    (formed,) = server.bodies("POST /init_communicator/")
    starts = server.bodies("POST /start_weight_update/")
    assert [start["attempt"] for start in starts] == [formed["attempt"]] * 2


@pytest.mark.req("SYNC-07")
def test_a_learner_that_wakes_when_another_has_its_server_leaves_it_alone(
    server: ScriptedServer,
) -> None:
    """It was suspended for so long that its group counted as one left behind."""
    worker = Worker(server)
    with pusher_to(server) as pusher:
        pusher.push(version=1)
        server.routes["POST /start_weight_update/"] = lambda _: problem(
            "weight-update-order", "another group stands", "attempt"
        )
        signs = iter([1.9, 0.1])
        server.routes["GET /info/"] = lambda _: info_of_a_group(next(signs))
        with pytest.raises(WeightSyncError, match="another group stands"):
            pusher.push(version=2)
        with pytest.raises(ContractError, match="another learner pushes to this server"):
            pusher.push(version=2)
    assert worker.groups_formed == 1


@pytest.mark.req("SYNC-07")
def test_a_learner_does_not_wait_for_the_group_that_it_has_left_itself(
    server: ScriptedServer,
) -> None:
    worker = Worker(server)
    finish, close = server.routes["POST /finish_weight_update/"], worker.close

    def closed(body: object) -> Reply:
        server.routes["GET /info/"] = lambda _: info()
        return close(body)

    server.routes |= {
        "GET /info/": lambda _: info_of_a_group(0.1),
        "POST /close_communicator/": closed,
        "POST /finish_weight_update/": lambda _: problem("internal", "!", "finish"),
    }
    with pusher_to(server) as pusher:
        with pytest.raises(WeightSyncError):
            pusher.push(version=1)
        server.routes["POST /finish_weight_update/"] = finish
        pusher.push(version=1)
        assert len(server.bodies("GET /info/")) == 1
    assert worker.groups_formed == 2


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


@pytest.mark.req("SYNC-04")
def test_a_process_ends_though_a_collective_of_it_hangs() -> None:
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
        host="127.0.0.1", port=free_port(), world_size=2, attempt="a", timeout_s=600
    )
    held = open_group_store(body.host, body.port, body.timeout_s, body.attempt)
    command = [sys.executable, "-c", textwrap.dedent(program), body.model_dump_json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as ours:
        group = other_rank(body)
        said, _ = ours.communicate(timeout=120)
    assert (said, ours.returncode) == ("left\n", 0)
    del group, held
