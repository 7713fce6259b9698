"""A step's pool in packs: `plan_packs` against packing it pack by pack with binpacking.

The peer packs the whole pool into bins with `binpacking.to_constant_volume`, keeps the
fullest bin that holds the oldest segment (or first come, first served where that is
fuller), and starts again with what is left: what a trainer does that selects one pack at
a time. Both get the same pools.

Two kinds of pools: lengths as rollouts have them (lognormal, median an eighth of a pack,
sigma 0.6), and long segments, of which two or three share a pack (lognormal, median 0.4 of
a pack, sigma 0.4); both cut at a pack.
"""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from binpacking.to_constant_volume import to_constant_volume

from benchmarks.command import Bench
from benchmarks.results import Result, median_of
from learner.stages.packing import plan_packs

CAPACITY = 12_000
MIN_FILL = 0.6
DRAWS, SEGMENTS = 100, 32

Packs = list[list[int]]


@dataclass(frozen=True)
class Pool:
    lengths: list[int]

    def plan(self) -> Packs:
        return plan_packs(self.lengths, CAPACITY, MIN_FILL)

    @property
    def fewest(self) -> int:
        """A lower bound: a plan of so many packs is optimal."""
        return fewest_packs(self.lengths, CAPACITY)


def measure(bench: Bench) -> list[Result]:
    """Each round draws pools of its own."""
    return [_fewest(bench.rounds), _long_segments(bench.rounds)]


# ---- pools ---------------------------------------------------------------------------


def _rollouts(seed: int) -> list[Pool]:
    return _draw(seed, median=0.125, sigma=0.6)


def _long(seed: int) -> list[Pool]:
    return _draw(seed, median=0.4, sigma=0.4)


def _draw(seed: int, median: float, sigma: float) -> list[Pool]:
    chance = random.Random(seed)

    def length() -> int:
        return round(CAPACITY * chance.lognormvariate(math.log(median), sigma))

    return [Pool([min(max(1, length()), CAPACITY) for _ in range(SEGMENTS)]) for _ in range(DRAWS)]


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
    room = CAPACITY - pool.lengths[oldest]
    fitting = [(i, pool.lengths[i]) for i in others if pool.lengths[i] <= room]
    bins = to_constant_volume(fitting, room, weight_pos=1)
    candidates = [[oldest, *(i for i, _ in items)] for items in bins]
    candidates.append(_first_come(waiting, pool))
    return max(candidates, key=lambda pack: sum(pool.lengths[i] for i in pack))


def _first_come(waiting: list[int], pool: Pool) -> list[int]:
    pack, room = [], CAPACITY
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
        pools = _rollouts(n)
        ours.append(_optimal(pools, [pool.plan() for pool in pools]))
        peers.append(_optimal(pools, [_pack_by_pack(pool) for pool in pools]))
    return median_of(
        f"plans of {SEGMENTS} segments with provably the fewest packs, of {DRAWS} draws",
        ours,
        95,
        at_least=True,
        detail=f"peer {statistics.median(peers):g}",
    )


def _long_segments(rounds: int) -> Result:
    """Packs over the peer's, for long segments; no plan may reach the bound."""
    ratios, optimal, peers_optimal = [], [], []
    for n in range(rounds):
        pools = _long(n)
        plans, peers = [p.plan() for p in pools], [_pack_by_pack(p) for p in pools]
        ratios.append(sum(map(len, plans)) / sum(map(len, peers)))
        optimal.append(_optimal(pools, plans))
        peers_optimal.append(_optimal(pools, peers))
    found = f"{statistics.median(optimal):g} and {statistics.median(peers_optimal):g}"
    return median_of(
        f"packs of {SEGMENTS} long segments over the peer's",
        ratios,
        1,
        at_least=False,
        detail=f"provably the fewest in {found} of {DRAWS} draws",
    )
