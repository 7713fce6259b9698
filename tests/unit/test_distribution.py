"""Requests over servers (section 7 of the contract), and their seeds (SEED-01)."""

from collections import deque
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.rollout.distribution import (
    next_call,
    part_size,
    plan_chunks,
    rank_caps,
    rank_chunk_size,
    rank_seed_base,
    request_seed,
    rollout_seed_base,
)
from shared_contracts.errors import ContractError

WORLD_SIZES = st.lists(st.integers(1, 8), min_size=1, max_size=6)


@pytest.mark.req("DIST-01", "DIST-02", "DIST-03")
@pytest.mark.scenario("Multi-server request distribution is deterministic")
@given(st.integers(0, 200), WORLD_SIZES)
def test_chunks_are_contiguous_and_in_order(n: int, world_sizes: list[int]) -> None:
    chunks = plan_chunks(n, world_sizes)
    assert len(chunks) == len(world_sizes)
    assert [i for chunk in chunks for i in chunk] == list(range(n))
    assert chunks == plan_chunks(n, list(world_sizes))


UNEQUAL = WORLD_SIZES.filter(lambda sizes: len(set(sizes)) > 1)


@pytest.mark.req("DIST-03")
@given(st.integers(0, 40), UNEQUAL)
def test_remainders_go_to_the_largest_fractions_then_to_the_lowest_indices(
    n: int, world_sizes: list[int]
) -> None:
    """Among all ways to round the shares up or down, the one that takes the best places."""
    shares = [Fraction(n * size, sum(world_sizes)) for size in world_sizes]
    places = sorted(range(len(shares)), key=lambda i: (-(shares[i] % 1), i))
    left_over = n - sum(int(share) for share in shares)
    ways = [up for up in product((0, 1), repeat=len(shares)) if sum(up) == left_over]
    best = max(ways, key=lambda up: [up[i] for i in places])
    expected = [int(share) + up for share, up in zip(shares, best, strict=True)]
    assert [len(chunk) for chunk in plan_chunks(n, world_sizes)] == expected


@pytest.mark.req("DIST-04")
@pytest.mark.scenario("vLLM server mode fails fast when cap is infeasible")
def test_fewer_decoded_sequences_than_learner_ranks_fail_fast_with_three_ways_out() -> None:
    with pytest.raises(ContractError) as error:
        rank_chunk_size(1, [1, 1], 4)
    assert error.value.where == "rollout_matching.decode_batch_size"
    assert error.value.found == (
        "1 sequences on each of 2 rollout devices are fewer than the 4 learner ranks, "
        "which each need at least one"
    )
    assert error.value.do == (
        "Use more rollout devices, fewer learner processes or a larger decode_batch_size"
    )


@pytest.mark.req("DIST-03", "RES-04", "DIST-04", "CFG-05")
@pytest.mark.scenario("Canonical Stage-2 key controls decode microbatching")
@pytest.mark.parametrize(
    ("decode_batch_size", "world_sizes", "ranks", "caps"),
    [
        (4, [2, 1], 1, [[8, 4]]),
        (1, [1, 1], 2, [[1, 0], [0, 1]]),
        (4, [1, 1], 2, [[2, 2], [2, 2]]),
        # Eight places are needed of nine: five at the larger server, dealt out in turns.
        (3, [2, 1], 2, [[3, 1], [2, 2]]),
        # Three are needed of four.
        (2, [1, 1], 3, [[1, 0], [1, 0], [0, 1]]),
    ],
)
def test_ranks_share_the_places_of_the_servers(
    decode_batch_size: int, world_sizes: list[int], ranks: int, caps: list[list[int]]
) -> None:
    found = [rank_caps(decode_batch_size, world_sizes, ranks, rank) for rank in range(ranks)]
    assert found == caps


@pytest.mark.req("DIST-03", "FULL-06")
@pytest.mark.parametrize(
    ("waiting", "free", "ranks", "running", "count"),
    [
        # Places are split over calls only where requests wait for them.
        (65, 64, 1, 0, 2),
        (65, 64, 4, 0, 8),
        (65, 5, 4, 0, 5),
        (3, 5, 1, 0, 3),
        (64, 64, 4, 0, 64),
        (65, 64, 100, 0, 64),
        # What small calls leave of the places is put together.
        (65, 3, 4, 8, 3),
        (65, 3, 4, 9, 0),
        # A server that has become smaller.
        (65, -1, 4, 1, 0),
    ],
)
def test_the_next_call_of_64_places(
    waiting: int, free: int, ranks: int, running: int, count: int
) -> None:
    assert next_call(waiting, free, 64, ranks, running) == count


@pytest.mark.req("STEP-03")
@pytest.mark.parametrize(
    ("n", "most", "size"), [(32, 64, 8), (33, 64, 9), (32, 4, 4), (3, 64, 1), (0, 64, 1), (9, 0, 1)]
)
def test_a_step_has_four_parts_or_more(n: int, most: int, size: int) -> None:
    assert part_size(n, most) == size


@pytest.mark.req("DIST-03", "FULL-06")
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(1, 40),
    st.integers(1, 64),
    st.data(),
)
def test_calls_fill_the_places_and_are_few_however_parts_and_calls_end(
    parts: list[int], most: int, ranks: int, data: st.DataObject
) -> None:
    """A call has requests of one part only."""
    left, running = deque(parts), list[int]()
    while left or running:
        free = most - sum(running)
        if left and (count := next_call(sum(left), free, most, ranks, len(running))):
            running.append(min(count, left[0]))
            left[0] -= running[-1]
            if not left[0]:
                left.popleft()
        else:
            assert running, "something is always under way"
            running.pop(data.draw(st.integers(0, len(running) - 1)))
        assert sum(running) <= most
        assert len(running) <= 1 + max(1, 32 // ranks)


@pytest.mark.req("DIST-02", "DIST-03", "DIST-04", "RES-04", "ARCH-02", "CFG-05")
@given(st.integers(1, 8), WORLD_SIZES, st.one_of(st.integers(1, 9), st.integers(1, 400)), st.data())
def test_every_rank_has_its_part_of_every_server_and_none_is_overfilled(
    decode_batch_size: int, world_sizes: list[int], ranks: int, data: st.DataObject
) -> None:
    """Refused exactly where not every rank can have a request. Parts are as equal as can be."""
    places = decode_batch_size * sum(world_sizes)
    if places < ranks:
        with pytest.raises(ContractError):
            rank_chunk_size(decode_batch_size, world_sizes, ranks)
        return
    share = rank_chunk_size(decode_batch_size, world_sizes, ranks)
    assert share >= 1
    assert share * ranks <= places < (share + 1) * ranks
    caps = [rank_caps(decode_batch_size, world_sizes, ranks, rank) for rank in range(ranks)]
    assert [sum(of_rank) for of_rank in caps] == [share] * ranks
    for size, of_server in zip(world_sizes, zip(*caps, strict=True), strict=True):
        assert sum(of_server) <= decode_batch_size * size
        assert max(of_server) - min(of_server) <= 1
    for of_rank in caps[:9]:
        round_size = data.draw(st.integers(0, share))
        for chunk, cap in zip(plan_chunks(round_size, of_rank), of_rank, strict=True):
            assert len(chunk) <= cap
        for size in set(world_sizes):
            equal = [cap for cap, other in zip(of_rank, world_sizes, strict=True) if other == size]
            assert max(equal) - min(equal) <= 1


@pytest.mark.req("RES-21", "DIST-02", "RES-11")
@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 8), st.data())
def test_a_single_rank_sends_equal_servers_what_is_rounded_up(
    decode_batch_size: int, servers: int, size: int, data: st.DataObject
) -> None:
    caps = rank_caps(decode_batch_size, [size] * servers, 1, 0)
    n = data.draw(st.integers(1, sum(caps)))
    sent = [len(chunk) for chunk in plan_chunks(n, caps)]
    per_server = -(-n // servers)
    assert sent == [max(min(per_server, n - i * per_server), 0) for i in range(servers)]


@pytest.mark.req("SEED-01", "ARCH-02", "SEED-02")
@pytest.mark.scenario("Same step produces identical derived rollout seed base")
def test_the_base_of_a_step_by_hand() -> None:
    assert rollout_seed_base(123, 7) == 123 + 7 * 1000003
    assert rollout_seed_base(42, 0) == 42
    assert rollout_seed_base(2**31 - 1, 1) == 1000002


@pytest.mark.req("SEED-01")
@given(st.integers(0, 2**31 - 1), st.integers(0, 1023), st.integers(0, 511), st.integers(0, 4095))
def test_a_seed_tells_its_request_so_no_two_requests_share_one(
    base: int, rank: int, micro: int, req: int
) -> None:
    seed = request_seed(rank_seed_base(base, rank), micro, req)
    assert 1 <= seed <= 2**62
    rest, found_req = divmod(seed - 1, 4096)
    rest, found_micro = divmod(rest, 512)
    found_rank, found_base = divmod(rest, 2**31)
    assert (found_base, found_rank, found_micro, found_req) == (base, rank, micro, req)
