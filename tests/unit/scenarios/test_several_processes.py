"""Scenarios of several learner processes over servers (seed 000), each under its own name."""

from pathlib import Path

import pytest

from learner.config import parse_config
from learner.data.toy import ToyData
from learner.rollout.policy import Asking, OpenBackend, Policy
from learner.training.start_checks import reach_servers
from learner.types import Sample
from shared_contracts.errors import ContractError
from shared_contracts.infer import RequestConfig
from tests.unit.scripted_rollouts import bodies
from tests.unit.scripted_server import info, scripted_server
from tests.unit.small_run import small_mapping
from tests.unit.test_many_ranks import Rank, nothing, ranks


@pytest.mark.req("SYNC-08", "SYNC-09", "RES-04", "RES-14")
def test_multi_process_learner_does_not_deadlock_in_server_mode() -> None:
    steps = 3

    def work(rank: Rank) -> list[int]:
        asking = Asking("Detect.", None, RequestConfig(max_tokens=4))
        rank.backend.connect()
        policy = Policy(
            OpenBackend(rank.backend, rank.backend.version, heal=rank.backend.heal), asking
        )
        answered = []
        for step in range(steps):
            policy.push_if_stale()
            number = 10 * step + rank.peers.rank
            policy.answer([Sample(str(number), (), 64, 64, ())], seed=1 + number)
            rank.peers.all_gather(nothing, meanwhile=policy.heal)
            policy.mark_updated()
            answered.append(number)
        return answered

    with ranks(servers=2) as run:
        asked = run.well(work)
        calls = [call for one in run.rollouts for call in bodies(one.server)]
        assert run.pushed() == [[1, 2, 3]] * 2, "by process 0, once for each step"
    assert asked == [[0, 10, 20], [1, 11, 21]]
    numbers = [int(str(call.infer_requests[0].uuid)) for call in calls]
    assert sorted(numbers) == [0, 1, 10, 11, 20, 21]
    assert [call.expected_weights_version for call in calls] == [n // 10 + 1 for n in numbers]


@pytest.mark.req("DIST-04", "RES-04")
@pytest.mark.parametrize(("processes", "is_refused"), [(8, False), (9, True)])
def test_more_processes_than_the_servers_decode_sequences_are_refused_before_anything_is_loaded(
    processes: int,
    is_refused: bool,
    toy_checkpoint: Path,
    toy_data: ToyData,
    tmp_path: Path,
) -> None:
    environment = {"WORLD_SIZE": str(processes)}
    with scripted_server() as server:
        server.routes["GET /info/"] = lambda _: info(world_size=2, replicas=2)
        address = {"base_url": server.base_url, "group_port": 51216}
        rollout = {"decode_batch_size": 4, "vllm": {"server": {"servers": [address]}}}
        mapping = small_mapping(toy_checkpoint, toy_data, tmp_path, rollout_matching=rollout)
        config = parse_config(mapping)
        if not is_refused:
            assert len(reach_servers(config, environment)) == 1
            return
        with pytest.raises(ContractError) as caught:
            reach_servers(config, environment)
    assert caught.value.where == "rollout_matching.decode_batch_size"
    assert "fewer learner processes" in caught.value.do
