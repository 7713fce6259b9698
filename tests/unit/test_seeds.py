"""Seeds of rollouts (SEED-01)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.rollout.distribution import plan_chunks
from learner.rollout.seeds import rank_seed_base, request_seed, rollout_seed_base

BASES = st.integers(0, 2**31 - 1)


@pytest.mark.req("SEED-01", "ARCH-02", "SEED-02")
@pytest.mark.scenario("Same step produces identical derived rollout seed base")
def test_the_base_of_a_step_by_hand() -> None:
    assert rollout_seed_base(123, 7) == 123 + 7 * 1000003
    assert rollout_seed_base(42, 0) == 42
    assert rollout_seed_base(2**31 - 1, 1) == 1000002


@pytest.mark.req("SEED-01")
@given(st.integers(0, 2**40), st.integers(0, 10**9))
def test_the_base_is_31_bits_and_the_same_every_time(training_seed: int, step: int) -> None:
    base = rollout_seed_base(training_seed, step)
    assert base == (training_seed + step * 1000003) & 0x7FFFFFFF
    assert base == rollout_seed_base(training_seed, step)


@pytest.mark.req("SEED-01")
@given(BASES, st.integers(0, 10**4), st.integers(0, 10**6), st.integers(0, 10**4))
def test_seeds_of_a_micro_step_count_up(base: int, micro: int, req: int, i: int) -> None:
    assert request_seed(base, micro, req + i) == request_seed(base, micro, req) + i


@pytest.mark.req("SEED-01")
@given(
    BASES,
    st.integers(0, 511),
    st.integers(0, 60),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
)
def test_a_request_has_the_same_seed_however_many_servers_there_are(
    base: int, micro: int, n: int, world_sizes: list[int]
) -> None:
    """A call carries the seed of its chunk's first request, and its server counts up from it."""
    alone = [request_seed(base, micro, i) for i in range(n)]
    spread = [
        request_seed(base, micro, chunk.start) + i
        for chunk in plan_chunks(n, world_sizes)
        for i in range(len(chunk))
    ]
    assert spread == alone


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
