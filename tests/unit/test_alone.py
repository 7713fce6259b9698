"""Servers of another learner: told by its signs of life, and not by the group it leaves behind."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from learner.config import Config, parse_config
from learner.data.toy import ToyData
from learner.operate.doctor.weights import probe_servers
from learner.rollout.client import RolloutClient
from learner.rollout.exclusive_lease import require_exclusive_lease
from learner.training.start_checks import reach_servers
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.server_info import Info
from shared_contracts.weights import GONE_AFTER_S
from tests.unit.scripted_server import ScriptedServer, info, scripted_server
from tests.unit.small_run import small_mapping


class Clock:
    """What `require_exclusive_lease` waits by; its waits take no time."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stands_in = Clock()
    monkeypatch.setattr("learner.rollout.exclusive_lease.time", stands_in)
    return stands_in


class Group:
    """The weight group of a server, whose learner gives a sign of life every `every_s`.

    until: when it gives the last one. leaves: when it closes the group.
    """

    def __init__(
        self,
        server: ScriptedServer,
        clock: Clock,
        every_s: float,
        until: float = float("inf"),
        leaves: float = float("inf"),
    ) -> None:
        self._clock = clock
        self._every_s, self._until, self._leaves = every_s, until, leaves
        server.routes["GET /info/"] = lambda _: self._info()

    def _info(self) -> Info:
        now = self._clock.now
        if now > self._leaves:
            return info()
        heard_s = now - min(now, self._until) // self._every_s * self._every_s
        return info_of_a_group(heard_s)


def info_of_a_group(heard_s: float | None) -> Info:
    group = {"weight_group": "127.0.0.1:51216", "weight_group_heard_s": heard_s}
    return info().model_copy(update=group)


def looks(server: ScriptedServer) -> int:
    return len(server.bodies("GET /info/"))


@contextmanager
def server_and_client() -> Iterator[tuple[ScriptedServer, RolloutClient]]:
    with scripted_server() as server, RolloutClient(server.base_url, timeout_s=20.0) as client:
        yield server, client


@pytest.mark.req("SYNC-07")
def test_a_server_without_a_group_and_one_of_a_guest_are_looked_at_once(clock: Clock) -> None:
    with server_and_client() as (one, first), server_and_client() as (other, second):
        other.routes["GET /info/"] = lambda _: info_of_a_group(heard_s=None)
        require_exclusive_lease([first, second])
        assert (looks(one), looks(other)) == (1, 1)


@pytest.mark.req("SYNC-07", "REP-06")
def test_a_learner_that_lives_is_left_alone_and_named(clock: Clock) -> None:
    with server_and_client() as (one, first), server_and_client() as (_, second):
        Group(one, clock, every_s=0.8)
        with pytest.raises(ContractError) as caught:
            require_exclusive_lease([first, second])
    assert caught.value.where == f"GET {one.base_url}/info/ weight_group"
    assert "another learner pushes" in caught.value.found
    assert "127.0.0.1:51216" in caught.value.found
    assert "name other servers" in caught.value.do


def test_all_servers_of_another_learner_are_told_at_once(clock: Clock) -> None:
    with server_and_client() as (one, first), server_and_client() as (two, second):
        for server in (one, two):
            Group(server, clock, every_s=0.8)
        with pytest.raises(ContractErrors) as caught:
            require_exclusive_lease([first, second])
    assert len(caught.value.errors) == 2


@pytest.mark.req("SYNC-07")
def test_a_learner_that_was_killed_is_gone_after_a_while(clock: Clock) -> None:
    with server_and_client() as (server, client):
        Group(server, clock, every_s=0.1, until=0.0)
        require_exclusive_lease([client])
    assert clock.now > GONE_AFTER_S, "it was waited for"


@pytest.mark.req("SYNC-07")
def test_a_sign_that_comes_late_still_counts(clock: Clock) -> None:
    """Of a learner that was held up so long that it seems gone at the first look."""
    with server_and_client() as (server, client):
        late = iter([GONE_AFTER_S + 1.0, 0.1])
        server.routes["GET /info/"] = lambda _: info_of_a_group(next(late))
        with pytest.raises(ContractError, match="another learner pushes"):
            require_exclusive_lease([client])


def test_a_learner_that_ends_meanwhile_is_waited_for_no_longer(clock: Clock) -> None:
    with server_and_client() as (server, client):
        Group(server, clock, every_s=60.0, leaves=0.7)
        require_exclusive_lease([client])
        assert looks(server) == 3, "at 0, 0.5 and 1 s"


@pytest.mark.req("SYNC-07", "REP-06")
def test_no_command_reaches_for_servers_of_another_learner(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path, clock: Clock
) -> None:
    with scripted_server() as server:
        Group(server, clock, every_s=0.8)
        with pytest.raises(ContractError, match="another learner pushes"):
            reach_servers(config_for(server, toy_checkpoint, toy_data, tmp_path))


@pytest.mark.req("SYNC-07")
def test_a_probe_looks_again_right_before_it_takes_a_server(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path, clock: Clock
) -> None:
    with server_and_client() as (server, client):
        config = config_for(server, toy_checkpoint, toy_data, tmp_path)
        require_exclusive_lease([client])
        Group(server, clock, every_s=0.8)  # it came while the model was loaded
        with pytest.raises(ContractError, match="another learner pushes"):
            list(probe_servers(config, [client]))
        assert server.bodies("POST /init_communicator/") == []


def config_for(server: ScriptedServer, checkpoint: Path, data: ToyData, folder: Path) -> Config:
    address = {"base_url": server.base_url, "group_port": 51216}
    vllm = {"mode": "server", "server": {"servers": [address], "timeout_s": 20.0}}
    return parse_config(small_mapping(checkpoint, data, folder, rollout_matching={"vllm": vllm}))
