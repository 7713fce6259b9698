"""Seeds of rollouts (SEED-01)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.rollout.distribution import rank_seed_base, request_seed, rollout_seed_base

BASES = st.integers(0, 2**31 - 1)


@pytest.mark.req("SEED-01", "ARCH-02", "SEED-02")
@pytest.mark.scenario("Same step produces identical derived rollout seed base")
def test_the_base_of_a_step_by_hand() -> None:
    assert rollout_seed_base(123, 7) == 123 + 7 * 1000003
    assert rollout_seed_base(42, 0) == 42
    assert rollout_seed_base(2**31 - 1, 1) == 1000002


@pytest.mark.req("SEED-01")
@given(BASES, st.integers(0, 1023), st.integers(0, 511), st.integers(0, 4095))
def test_a_seed_tells_its_request_so_no_two_requests_share_one(
    base: int, rank: int, micro: int, req: int
) -> None:
    seed = request_seed(rank_seed_base(base, rank), micro, req)
    assert 1 <= seed <= 2**62
    rest, found_req = divmod(seed - 1, 4096)
    rest, found_micro = divmod(rest, 512)
    found_rank, found_base = divmod(rest, 2**31)
    assert (found_base, found_rank, found_micro, found_req) == (base, rank, micro, req)
