"""Servers of another learner: told by its signs of life, and not by the group it leaves behind."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from learner.config import parse_config
from learner.data.toy import ToyData
from learner.preflight import reach_servers
from learner.rollout.alone import require_alone
from learner.rollout.client import RolloutClient
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.server_info import Info
from tests.unit.scripted_server import ScriptedServer, info, scripted_server
from tests.unit.small_run import small_mapping

ALONE = "learner.rollout.alone"


class Group:
    """The weight group of a server, whose learner gives a sign of life every `every_s`.

    until: when it gives the last one. leaves: when it closes the group.
    """

    def __init__(
        self, server: ScriptedServer, every_s: float, until: float, leaves: float = float("inf")
    ) -> None:
        self._began = time.monotonic()
        self._every_s, self._until, self._leaves = every_s, until, leaves
        server.routes["GET /info/"] = lambda _: self._info()

    def _info(self) -> Info:
        now = time.monotonic() - self._began
        told = info()
        if now > self._leaves:
            return told
        newest = min(now, self._until) // self._every_s * self._every_s
        return told.model_copy(
            update={"weight_group": "127.0.0.1:51216", "weight_group_heard_s": now - newest}
        )


@contextmanager
def server_and_client() -> Iterator[tuple[ScriptedServer, RolloutClient]]:
    with scripted_server() as server, RolloutClient(server.base_url, timeout_s=20.0) as client:
        yield server, client


@pytest.mark.req("SYNC-07")
def test_a_server_is_alone_where_nobody_says_that_it_has_a_group() -> None:
    with server_and_client() as (_, client):
        require_alone([client])


@pytest.mark.req("SYNC-07", "REP-06")
def test_a_learner_that_lives_is_left_alone_and_named() -> None:
    with server_and_client() as (one, first), server_and_client() as (_, second):
        Group(one, every_s=0.8, until=float("inf"))
        with pytest.raises(ContractError) as caught:
            require_alone([first, second])
    assert caught.value.where == f"GET {one.base_url}/info/ weight_group"
    assert "another learner pushes" in caught.value.found
    assert "127.0.0.1:51216" in caught.value.found
    assert "name other servers" in caught.value.do


def test_all_servers_of_another_learner_are_told_at_once() -> None:
    with server_and_client() as (one, first), server_and_client() as (two, second):
        for server in (one, two):
            Group(server, every_s=0.8, until=float("inf"))
        with pytest.raises(ContractErrors) as caught:
            require_alone([first, second])
    assert len(caught.value.errors) == 2


@pytest.mark.req("SYNC-07")
def test_a_learner_that_was_killed_is_gone_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{ALONE}.GONE_AFTER_S", 2.0)
    with server_and_client() as (server, client):
        Group(server, every_s=0.1, until=0.0)
        require_alone([client])
        assert len(server.bodies("GET /info/")) > 2, "it was waited for"


def test_a_learner_that_ends_meanwhile_is_gone_at_once() -> None:
    with server_and_client() as (server, client):
        Group(server, every_s=60.0, until=0.0, leaves=0.7)
        require_alone([client])


@pytest.mark.req("SYNC-07", "REP-06")
def test_no_command_reaches_for_servers_of_another_learner(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    with scripted_server() as server:
        address = {"base_url": server.base_url, "group_port": 51216}
        vllm = {"mode": "server", "server": {"servers": [address], "timeout_s": 20.0}}
        mapping = small_mapping(toy_checkpoint, toy_data, tmp_path, rollout_matching={"vllm": vllm})
        Group(server, every_s=0.8, until=float("inf"))
        with pytest.raises(ContractError, match="another learner pushes"):
            reach_servers(parse_config(mapping))
