"""Requests go to the replica with the fewest outstanding tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.routing import Router


@pytest.mark.req("SRV-01")
def test_the_least_loaded_replica_is_next_and_equals_are_taken_in_order() -> None:
    router = Router(3)
    assert [router.acquire(tokens) for tokens in (10, 5, 7, 1, 1, 1)] == [0, 1, 2, 1, 1, 1]
    router.release(0, 10)
    assert router.acquire(4) == 0


@pytest.mark.req("SRV-01")
@given(st.integers(1, 5), st.lists(st.integers(1, 500), min_size=1))
def test_loads_differ_by_at_most_one_request(replicas: int, costs: list[int]) -> None:
    router = Router(replicas)
    taken = [(router.acquire(cost), cost) for cost in costs]
    assert max(router.outstanding) - min(router.outstanding) <= max(costs)
    for replica, cost in taken:
        router.release(replica, cost)
    assert router.outstanding == [0] * replicas
