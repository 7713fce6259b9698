"""How many packs a pool needs at least."""

from collections.abc import Sequence


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
