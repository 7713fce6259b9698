"""Distribution of requests over servers (DIST-01 to DIST-04), and their seeds (SEED-01)."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from shared_contracts.errors import ContractError


def plan_chunks(n: int, world_sizes: Sequence[int]) -> list[range]:
    """Return the requests of each server: contiguous, in order, `range(n)` exactly once.

    Equal world sizes: chunks of `ceil(n / servers)`, so the last ones may be shorter.
    Otherwise in proportion to the world sizes; the rest of the rounding goes to the largest
    fractions, then to the lowest indices. No call is sent for an empty chunk.

    world_sizes: or other weights, such as `rank_caps`; not all of them 0.
    """
    assert min(world_sizes) >= 0 < max(world_sizes)
    if len(set(world_sizes)) == 1:
        size = -(-n // len(world_sizes))
        bounds = [min(i * size, n) for i in range(len(world_sizes) + 1)]
    else:
        bounds = [0]
        for size in _proportional_sizes(n, world_sizes):
            bounds.append(bounds[-1] + size)
    return [range(start, end) for start, end in pairwise(bounds)]


def _proportional_sizes(n: int, world_sizes: Sequence[int]) -> list[int]:
    total = sum(world_sizes)
    sizes = [n * size // total for size in world_sizes]
    by_fraction = sorted(range(len(sizes)), key=lambda i: (-(n * world_sizes[i] % total), i))
    for i in by_fraction[: n - sum(sizes)]:
        sizes[i] += 1
    return sizes


def rank_chunk_size(
    decode_batch_size: int, world_sizes: Sequence[int], learner_world_size: int
) -> int:
    """Return the most requests of one learner rank in a round.

    `floor(decode_batch_size * S / W)` with S devices of all servers and W learner ranks.
    Raises `ContractError` if that is 0.
    """
    devices = sum(world_sizes)
    if decode_batch_size * devices < learner_world_size:
        raise ContractError(
            "rollout_matching.decode_batch_size",
            f"{decode_batch_size} sequences on each of {devices} rollout devices are fewer "
            f"than the {learner_world_size} learner ranks, which each need at least one",
            "Use more rollout devices, fewer learner processes or a larger decode_batch_size",
        )
    return decode_batch_size * devices // learner_world_size


# Most calls of all ranks at a server if requests wait for places; a server accepts 64.
_CALLS = 32


def next_call(waiting: int, free: int, most: int, learner_world_size: int, running: int = 0) -> int:
    """Return the most requests of the next call of one rank to a server; 0: none is made now.

    waiting: requests without answer and without call. free: free places of the server, of the
    `most` of the rank. running: calls of the rank at the server.

    If there is a place for each request, one call has all of them. Otherwise several calls share
    the places: when one of them is answered, its places are filled again without a wait for the
    slowest answer of the others. One further call can fill the rest of the places; after that the
    places of several small calls are combined.
    """
    calls = max(1, _CALLS // learner_world_size)
    if running > calls:
        return 0
    return waiting if waiting <= free else max(0, min(-(-most // calls), free))


# Smallest number of parts of a step (STEP-03). In the mean, a step in four parts has at most 5 %
# more packs than in one, and 7 % with segments of half a pack.
PARTS = 4
# Later chunks whose requests are sent, too: all requests of a step of four parts at once.
CHUNKS_AHEAD = PARTS - 1


def part_size(n: int, most: int) -> int:
    """Return the size of the parts in which `n` answers are learned, at most `most`."""
    return max(1, min(most, -(-n // PARTS)))


def cut(n: int, size: int) -> list[range]:
    """Return `range(n)` in order, in chunks of `size`; the last one may be shorter."""
    return [range(start, min(start + size, n)) for start in range(0, n, size)]


def rank_caps(
    decode_batch_size: int, world_sizes: Sequence[int], learner_world_size: int, rank: int
) -> list[int]:
    """Return the most requests of one learner rank at each server at once (DIST-03).

    The servers have `rank_chunk_size` places for every rank, in proportion to their world sizes and
    at most `decode_batch_size` per device. Place k of all places, in the order of the servers,
    belongs to rank `k mod W`. So each rank has exactly its share, spread evenly over the servers,
    and all ranks together exceed the places of no server.
    """
    share = rank_chunk_size(decode_batch_size, world_sizes, learner_world_size)
    places = _proportional_sizes(share * learner_world_size, world_sizes)
    bounds = pairwise(accumulate(places, initial=0))
    return [
        len(range(rank, end, learner_world_size)) - len(range(rank, start, learner_world_size))
        for start, end in bounds
    ]


# Seeds: 31 bits of the step, above them the rank, below them micro step and request. Within a micro
# step they count up by one. A server gives request i of a call the seed of the call plus i, so a
# request's seed does not depend on how the requests were spread over servers. No two requests of a
# step share a seed for up to 4096 requests a micro step, 512 micro steps and any number of ranks;
# up to 1024 ranks every seed is at most 2**62.
_BASE_BITS = 31
_MICRO_STEP_BITS = 9
_REQUEST_BITS = 12


def rollout_seed_base(training_seed: int, global_step: int) -> int:
    """Seed base of an optimizer step, in 0..2**31 - 1."""
    return (training_seed + global_step * 1_000_003) & 0x7FFFFFFF


def rank_seed_base(base: int, rank: int) -> int:
    """Seed base of one learner rank; rank 0 keeps the base of the step."""
    return base + (rank << _BASE_BITS)


def request_seed(base: int, micro_step_idx: int, req_idx: int) -> int:
    """Seed of one request: 1 + base * 2**21 + micro_step_idx * 2**12 + req_idx, never 0.

    base: of the rank (`rank_seed_base`). req_idx: of the rank's requests in this micro step.
    """
    offset = (base << _MICRO_STEP_BITS) + micro_step_idx
    return 1 + (offset << _REQUEST_BITS) + req_idx
