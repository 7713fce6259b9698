"""Scenarios of how rollout requests are spread and batched (seeds 000, 002 and 004)."""

import pytest

from learner.rollout.distribution import plan_chunks, rank_caps, rank_chunk_size
from shared_contracts.errors import ContractError
from shared_contracts.infer import RequestConfig
from tests.unit.test_backend import asked, backend_over, requests, tokens


@pytest.mark.req("DIST-01", "DIST-02", "DIST-03")
def test_multi_server_request_distribution_is_deterministic() -> None:
    requests = [f"request {i}" for i in range(11)]
    for world_sizes in ([1, 1, 1], [4, 2, 1]):
        first, second = (plan_chunks(len(requests), world_sizes) for _ in range(2))
        assert first == second
        reassembled = [requests[i] for chunk in first for i in chunk]
        assert reassembled == requests


@pytest.mark.req("DIST-04")
def test_vllm_server_mode_fails_fast_when_cap_is_infeasible() -> None:
    with pytest.raises(ContractError) as error:
        rank_chunk_size(decode_batch_size=1, world_sizes=[1, 1], learner_world_size=4)
    assert error.value.where == "rollout_matching.decode_batch_size"
    for way_out in ("rollout devices", "learner processes", "decode_batch_size"):
        assert way_out in error.value.do


@pytest.mark.req("DIST-03", "DIST-04", "CFG-05")
def test_canonical_stage_2_key_controls_decode_microbatching() -> None:
    sizes = [rank_chunk_size(m, world_sizes=[2, 1], learner_world_size=1) for m in (1, 2, 4)]
    assert sizes == [3, 6, 12]
    assert rank_caps(4, [2, 1], learner_world_size=1, rank=0) == [8, 4]


@pytest.mark.req("CFG-05", "DIST-03", "ROLL-01")
def test_microbatching_increases_decode_parallelism_without_changing_outputs_format() -> None:
    answers = {}
    for decode_batch_size, calls in ((1, [[0], [1], [2], [3]]), (4, [[0, 1, 2, 3]])):
        with backend_over([1], decode_batch_size) as (backend, (server,)):
            answers[decode_batch_size] = backend.rollout(requests(4), RequestConfig(seed=7))
            assert asked(server) == calls
    assert answers[1] == answers[4]
    assert tokens(answers[4]) == [0, 1, 2, 3]
