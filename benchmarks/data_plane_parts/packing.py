"""A step's pool in packs: `plan_packs` against packing it pack by pack with binpacking.

The peer packs the whole pool into bins with `binpacking.to_constant_volume`, keeps the
fullest bin that holds the oldest segment (or first come, first served where that is
fuller), and starts again with what is left: what a trainer does that selects one pack at
a time. Both get the same pools. Times are of the processor, not of the clock.

Two kinds of pools mostly: lengths as rollouts have them (lognormal, median an eighth of a pack,
sigma 0.6), and long segments, of which two or three share a pack (lognormal, median 0.4 of
a pack, sigma 0.4); both cut at a pack. The largest pools are of lengths uniform in 0.3 to
0.6 of a pack, at capacities from 12,000 to 1,000,000.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from binpacking.to_constant_volume import to_constant_volume

from benchmarks.results import Result, median_of
from learner.stages.packing.plan import plan_packs

CAPACITY = 12_000
LARGE_CAPACITY = 131_072
CAPACITIES = (CAPACITY, 32_768, LARGE_CAPACITY, 1_000_000)
MIN_FILL = 0.6
DRAWS = 100

Packs = list[list[int]]


@dataclass(frozen=True)
class Pool:
    lengths: list[int]
    capacity: int
    min_fill: float = MIN_FILL

    def plan(self) -> Packs:
        return plan_packs(self.lengths, self.capacity, self.min_fill)

    def totals(self, packs: Packs) -> list[int]:
        return [sum(self.lengths[i] for i in pack) for pack in packs]

    @property
    def fewest(self) -> int:
        """A lower bound: a plan of so many packs is optimal."""
        return fewest_packs(self.lengths, self.capacity)


def measure(rounds: int) -> list[Result]:
    """Each round draws pools of its own."""
    step = [_rollouts(32, n) + _long(32, n) for n in range(rounds)]
    large = [_rollouts(256, n, LARGE_CAPACITY) for n in range(rounds)]
    long = [_long(256, n, draws=20) for n in range(rounds)]
    thousand = [[_thousand(capacity, n) for capacity in CAPACITIES] for n in range(rounds)]
    return [
        _fewest(rounds),
        _long_segments(rounds),
        _worst("slowest plan of a step of 32 segments", step, 20),
        _worst(f"slowest plan of 256 segments in packs of {LARGE_CAPACITY:,}", large, 100),
        _worst("slowest plan of 256 long segments", long, 250),
        _worst("slowest plan of 1,000 long segments at any capacity", thousand, 1_500),
    ]


# ---- pools ---------------------------------------------------------------------------


def _rollouts(segments: int, seed: int, capacity: int = CAPACITY) -> list[Pool]:
    return _draw(segments, seed, capacity, DRAWS, median=0.125, sigma=0.6)


def _long(segments: int, seed: int, draws: int = DRAWS) -> list[Pool]:
    return _draw(segments, seed, CAPACITY, draws, median=0.4, sigma=0.4)


def _thousand(capacity: int, seed: int) -> Pool:
    """The lower bound falls short of it by some 20 packs: many numbers of packs to try."""
    chance = random.Random(seed)
    lengths = [round(capacity * chance.uniform(0.3, 0.6)) for _ in range(1_000)]
    return Pool(lengths, capacity, min_fill=0.9)


def _draw(
    segments: int, seed: int, capacity: int, draws: int, median: float, sigma: float
) -> list[Pool]:
    chance = random.Random(seed)

    def length() -> int:
        return round(capacity * chance.lognormvariate(math.log(median), sigma))

    return [
        Pool([min(max(1, length()), capacity) for _ in range(segments)], capacity)
        for _ in range(draws)
    ]


# ---- the lower bound -----------------------------------------------------------------


def fewest_packs(lengths: Sequence[int], capacity: int) -> int:
    """The bound L2 of Martello and Toth (Knapsack Problems, 1990, section 8.3).

    No two segments over half a pack share one. Beside those that leave room for `limit`
    tokens go segments of `limit` tokens up to half a pack; what they cannot take needs
    packs of its own. The least limit alone asks for ceil(total / capacity) or more.
    """
    long = sorted(length for length in lengths if 2 * length > capacity)
    short = sorted((length for length in lengths if 2 * length <= capacity), reverse=True)
    bound, with_room, room, to_place = len(long), 0, 0, 0
    for limit in short:
        to_place += limit
        while with_room < len(long) and long[with_room] + limit <= capacity:
            room += capacity - long[with_room]
            with_room += 1
        bound = max(bound, len(long) - (room - to_place) // capacity)
    return bound


# ---- the peer ------------------------------------------------------------------------


def _pack_by_pack(pool: Pool) -> Packs:
    waiting, packs = list(range(len(pool.lengths))), Packs()
    while waiting:
        packs.append(_fullest_with_oldest(waiting, pool))
        waiting = [i for i in waiting if i not in packs[-1]]
    return packs


def _fullest_with_oldest(waiting: list[int], pool: Pool) -> list[int]:
    oldest, *others = waiting
    room = pool.capacity - pool.lengths[oldest]
    fitting = [(i, pool.lengths[i]) for i in others if pool.lengths[i] <= room]
    bins = to_constant_volume(fitting, room, weight_pos=1)
    candidates = [[oldest, *(i for i, _ in items)] for items in bins]
    candidates.append(_first_come(waiting, pool))
    return max(candidates, key=lambda pack: sum(pool.lengths[i] for i in pack))


def _first_come(waiting: list[int], pool: Pool) -> list[int]:
    pack, room = [], pool.capacity
    for i in waiting:
        if pool.lengths[i] <= room:
            pack.append(i)
            room -= pool.lengths[i]
    return pack


# ---- what is measured ----------------------------------------------------------------


def _optimal(pools: Sequence[Pool], plans: Sequence[Packs]) -> int:
    """How many of the plans have provably the fewest packs."""
    return sum(len(plan) == pool.fewest for pool, plan in zip(pools, plans, strict=True))


def _fewest(rounds: int) -> Result:
    ours, peers = [], []
    for n in range(rounds):
        pools = _rollouts(32, n)
        ours.append(_optimal(pools, [pool.plan() for pool in pools]))
        peers.append(_optimal(pools, [_pack_by_pack(pool) for pool in pools]))
    return median_of(
        f"plans of 32 segments with provably the fewest packs, of {DRAWS} draws",
        ours,
        95,
        at_least=True,
        detail=f"peer {statistics.median(peers):g}",
    )


def _long_segments(rounds: int) -> Result:
    """Where no plan may reach the bound: packs over the peer's."""
    ratios, optimal, peers_optimal = [], [], []
    for n in range(rounds):
        pools = _long(32, n)
        plans, peers = [p.plan() for p in pools], [_pack_by_pack(p) for p in pools]
        ratios.append(sum(map(len, plans)) / sum(map(len, peers)))
        optimal.append(_optimal(pools, plans))
        peers_optimal.append(_optimal(pools, peers))
    found = f"{statistics.median(optimal):g} and {statistics.median(peers_optimal):g}"
    return median_of(
        "packs of 32 long segments over the peer's",
        ratios,
        1,
        at_least=False,
        detail=f"provably the fewest in {found} of {DRAWS} draws",
    )


def _worst(name: str, rounds: Sequence[Sequence[Pool]], goal_ms: float) -> Result:
    times = [[_ms(_seconds(pool.plan)) for pool in pools] for pools in rounds]
    worst = tuple(max(some) for some in times)
    usual = statistics.median(t for some in times for t in some)
    return Result(name, max(worst), worst, goal_ms, False, " ms", f"median {usual:.2f} ms")


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _ms(seconds: float) -> float:
    return 1_000 * seconds
