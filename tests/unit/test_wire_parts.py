"""What both programs run of a push: the digest of a bucket, and the handshake before a group."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from shared_contracts.weights import digest, meet, positions_of


def defined(words: list[int]) -> int:
    """The digest by its definition, as a signed number."""
    total = sum(word * (2 * i + 1) for i, word in enumerate(words)) % 2**64
    return total - 2**64 if total >= 2**63 else total


def digest_of(words: list[int]) -> int:
    tensor = torch.tensor(words, dtype=torch.int64)
    return int(digest(tensor, torch.arange(positions_of(len(words)))))


def some_words(count: int) -> list[int]:
    draw = random.Random(count)
    return [draw.randrange(-(2**63), 2**63) for _ in range(count)]


@pytest.mark.req("SYNC-06")
@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 20_001])
def test_a_digest_is_that_of_its_definition(count: int) -> None:
    words = some_words(count)
    assert digest_of(words) == defined(words)


@pytest.mark.req("SYNC-06")
@pytest.mark.parametrize("bit", [0, 63])
@pytest.mark.parametrize("place", [0, 4095, 4096, 10_000])
def test_a_flipped_bit_and_words_that_trade_places_are_seen(bit: int, place: int) -> None:
    """Bit 63 is the sign. The distances are those of a word, a row, and to the tail."""
    words = some_words(10_001)
    flipped = list(words)
    flipped[place] ^= -(2**63) if bit == 63 else 2**bit
    assert digest_of(flipped) != digest_of(words)
    for other in (1, 4096, 10_000):
        traded = list(words)
        traded[place], traded[other] = words[other], words[place]
        assert (digest_of(traded) == digest_of(words)) == (place == other)


@pytest.mark.req("FULL-07", "SYNC-04")
def test_ranks_that_are_missing_are_named() -> None:
    with pytest.raises(TimeoutError) as caught:
        meet(HashStore(), 1, 4, 0.1)
    missing = "learner (rank 0), engine worker (rank 2), engine worker (rank 3): missing for 0.1 s"
    assert str(caught.value) == missing


@pytest.mark.req("FULL-07", "SYNC-04")
def test_a_rank_whose_group_is_given_up_stops_waiting() -> None:
    given_up = threading.Event()
    with ThreadPoolExecutor(1) as ranks:
        waiting = ranks.submit(meet, HashStore(), 0, 2, 3600.0, given_up.is_set)
        given_up.set()
        assert isinstance(waiting.exception(60.0), ConnectionAbortedError)
