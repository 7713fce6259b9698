"""What learner processes tell each other; threads are the processes, over a store in memory."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from torch.distributed import HashStore

from learner.distributed.peers import (
    SINGLE_PROCESS,
    Peers,
    StorePeers,
    Timing,
    Watch,
    broadcast_from_rank0,
)
from shared_contracts.errors import ContractError, ContractErrors, RunError

# No process is silent for so long that it counts, unless a test says so.
QUICK = Timing(beat=0.01, silence=60.0, patience=60.0, grace=60.0, linger=60.0)

Work = Callable[[StorePeers], Any]


def ranks_of(count: int, timing: Timing = QUICK, **options: Any) -> list[StorePeers]:
    store = HashStore()
    options = {"end": lambda _: None, **options}
    return [StorePeers(rank, count, lambda: store, timing, **options) for rank in range(count)]


def outcomes(ranks: list[StorePeers], work: Work) -> list[Any]:
    """What `work` gave or raised in each rank."""

    def guarded(peers: StorePeers) -> Any:
        with peers.guarded():
            return work(peers)

    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(guarded, peers) for peers in ranks]
        return [_outcome(future) for future in futures]


def _outcome(future: "Future[Any]") -> Any:
    error = future.exception()
    return future.result() if error is None else error


def failing(rank: int, error: BaseException) -> Work:
    """Rank `rank` raises in the second of three shares."""

    def work(peers: StorePeers) -> list[int]:
        def second() -> int:
            if peers.rank == rank:
                raise error
            return peers.rank

        peers.all_gather(lambda: 0)
        said = peers.all_gather(second)
        peers.all_gather(lambda: 0)
        return said

    return work


@pytest.mark.req("DDP-01")
@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_rank_gets_what_each_of_them_said_in_the_order_of_ranks(count: int) -> None:
    def work(peers: StorePeers) -> list[list[object]]:
        return [peers.all_gather(partial(said_in, number, peers.rank)) for number in range(3)]

    def said_in(number: int, rank: int) -> dict[str, int]:
        return {"round": number, "rank": rank}

    said = [[said_in(number, rank) for rank in range(count)] for number in range(3)]
    assert outcomes(ranks_of(count), work) == [said] * count


@pytest.mark.req("DDP-01")
def test_what_the_first_rank_alone_does_all_have_and_none_that_is_null() -> None:
    did: list[int] = []

    def work(peers: Peers) -> list[str | None]:
        def chosen() -> str:
            did.append(peers.rank)
            return "A"

        return [
            broadcast_from_rank0(peers, chosen),
            broadcast_from_rank0(peers, lambda: None),
        ]

    assert outcomes(ranks_of(3), work) == [["A", None]] * 3
    assert did == [0]
    assert broadcast_from_rank0(SINGLE_PROCESS, lambda: 7) == 7


@pytest.mark.req("DDP-01")
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RunError("the disk is full"), "learner process 1 failed: the disk is full"),
        (ValueError("a bad image"), "learner process 1 failed: ValueError: a bad image"),
        (KeyboardInterrupt(), "learner process 1 failed: KeyboardInterrupt"),
    ],
    ids=["run", "any", "signal"],
)
def test_an_error_of_one_rank_ends_all_with_its_text_and_once(
    error: BaseException, told: str
) -> None:
    for _ in range(20):  # in whatever order they leave
        zero, one, two = outcomes(ranks_of(3), failing(1, error))
        assert one is error
        assert [type(zero), type(two)] == [RunError] * 2
        assert [str(zero), str(two)] == [told] * 2


@pytest.mark.req("DDP-01")
def test_an_error_of_the_input_is_the_same_error_in_all_ranks() -> None:
    errors = [ContractError("data.jsonl:3", "no box", "Add one"), ContractError("a", "b", "c")]
    for error, count in [(errors[0], 1), (ContractErrors(errors), 2)]:
        zero, one = outcomes(ranks_of(2), failing(1, error))
        assert one is error
        assert isinstance(zero, ContractError)
        assert str(zero) == str(error)
        assert len(zero.errors) == count


@pytest.mark.req("DDP-01")
def test_ranks_that_fail_at_once_each_say_their_own() -> None:
    def work(peers: StorePeers) -> None:
        def fail() -> None:
            if peers.rank < 2:
                raise ValueError(f"of rank {peers.rank}")

        peers.all_gather(fail)

    zero, one, two = outcomes(ranks_of(3), work)
    assert [str(zero), str(one)] == ["of rank 0", "of rank 1"]
    assert str(two) == "learner process 0 failed: ValueError: of rank 0"


@pytest.mark.req("DDP-01")
def test_what_follows_from_another_ranks_failure_is_told_as_that_failure() -> None:
    """As a collective that breaks when a process of it ends."""
    zero, one = ranks_of(2)
    with pytest.raises(ValueError, match="out of memory"), one.guarded():
        raise ValueError("out of memory")
    broken = RuntimeError("connection closed by peer")
    with pytest.raises(RunError) as caught, zero.guarded():
        raise broken
    assert str(caught.value) == "learner process 1 failed: ValueError: out of memory"
    assert caught.value.__cause__ is broken


@pytest.mark.req("DDP-01")
def test_a_signal_ends_the_process_it_was_sent_to_whatever_happened_elsewhere() -> None:
    zero, one = ranks_of(2)
    with pytest.raises(ValueError, match="no"), one.guarded():
        raise ValueError("no")
    with pytest.raises(KeyboardInterrupt), zero.guarded():
        raise KeyboardInterrupt


@pytest.mark.req("DDP-01")
def test_a_rank_that_is_silent_ends_the_others() -> None:
    zero, _ = ranks_of(2, Timing(beat=0.01, silence=0.05, linger=0.01))
    with pytest.raises(RunError, match=r"process 1 has sent no heartbeat for 0.05 s"):  # noqa: SIM117
        with zero.guarded():
            zero.all_gather(lambda: None)


@pytest.mark.req("DDP-01")
def test_a_rank_that_has_left_is_not_missed() -> None:
    store = HashStore()
    timing = Timing(beat=0.01, silence=0.05, linger=0.01)
    zero, one, _ = (Watch(rank, 3, store, timing) for rank in range(3))
    one.start()
    one.stop()
    while (failure := zero.failure()) is None:
        pass
    assert "learner process 2" in str(failure)


@pytest.mark.req("DDP-01")
def test_a_rank_that_works_is_waited_for_as_long_as_there_is_patience() -> None:
    zero, one = ranks_of(2, Timing(beat=0.01, silence=60.0, patience=0.05, linger=60.0))
    given_up = threading.Event()

    def work(peers: StorePeers) -> None:
        try:
            peers.all_gather(lambda: given_up.wait(60) if peers.rank == 1 else None)
        finally:
            given_up.set()

    lost, told = outcomes([zero, one], work)
    assert str(lost) == "learner process 1 is alive, but took more than 0.05 s"
    assert str(told) == f"learner process 0 failed: {lost}"


@pytest.mark.req("DDP-01")
def test_who_waits_does_something_meanwhile() -> None:
    looks = threading.Semaphore(0)

    def work(peers: StorePeers) -> list[bool]:
        if peers.rank == 0:
            return peers.all_gather(lambda: True, looks.release)
        return peers.all_gather(lambda: all(looks.acquire(timeout=60) for _ in range(3)))

    assert outcomes(ranks_of(2), work) == [[True, True]] * 2


@pytest.mark.req("DDP-01")
def test_the_store_does_not_grow_with_the_rounds() -> None:
    store = HashStore()
    ranks = [StorePeers(rank, 2, lambda: store, QUICK) for rank in range(2)]

    def work(peers: StorePeers) -> int:
        return max(peers.all_gather(store.num_keys)[0] for _ in range(100))

    most = outcomes(ranks, work)
    assert max(most) <= 2 * 2 + 2  # two rounds at a time, and the beats


@pytest.mark.req("DDP-01")
@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (RunError("no server"), 1, "error: learner process 1 failed: no server\n"),
        (ContractError("a.b", "no", "Add it"), 2, "error: a.b\n  found: no\n  do: Add it\n"),
    ],
)
def test_a_rank_that_sits_in_a_collective_is_ended_with_the_exit_code_of_the_failure(
    error: Exception, code: int, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    ended = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    timing = Timing(beat=0.01, silence=60.0, grace=0.01, linger=60.0)

    def work(peers: StorePeers) -> None:
        if peers.rank == 1:
            raise error
        assert ended.wait(60)

    outcomes(ranks_of(2, timing, end=end), work)
    assert codes == [code]
    assert capfd.readouterr().err == told


@pytest.mark.req("DDP-01")
def test_when_the_launcher_is_gone_so_are_its_processes() -> None:
    store = HashStore()
    kept, orphan = (Watch(0, 1, store, QUICK, os.getppid() + more) for more in (0, 1))
    assert kept.failure() is None
    assert "launched" in str(orphan.failure())


@pytest.mark.req("DDP-01")
def test_process_0_keeps_the_store_until_the_others_have_left_but_not_for_ever() -> None:
    store = HashStore()
    zero, one = (Watch(rank, 2, store, QUICK) for rank in range(2))
    leaving = threading.Thread(target=zero.stop, daemon=True)
    leaving.start()
    leaving.join(0.2)
    assert leaving.is_alive()
    one.stop()
    leaving.join(60)
    assert not leaving.is_alive()
    Watch(0, 2, HashStore(), Timing(linger=0.01)).stop()


class LostStore(HashStore):
    """Goes, as the store of process 0 does when that is killed."""

    lost = False

    def check(self, keys: list[str]) -> bool:
        if self.lost:
            raise RuntimeError("Broken pipe")
        return super().check(keys)


@pytest.mark.req("DDP-01")
def test_without_its_store_process_0_is_gone() -> None:
    store = LostStore()
    one = StorePeers(1, 2, lambda: store, QUICK, end=lambda _: None)
    with pytest.raises(RunError, match="learner process 0 is gone: Broken pipe"), one.guarded():  # noqa: PT012
        store.lost = True
        one.all_gather(lambda: None)


@pytest.mark.req("DDP-01")
def test_others_hear_of_a_failure_before_the_failed_process_has_cleaned_up() -> None:
    heard = threading.Event()

    def work(peers: StorePeers) -> None:
        if peers.rank == 0:
            try:
                peers.all_gather(lambda: None)
            finally:
                heard.set()
        try:
            with peers.propagate_errors():
                raise RunError("out of memory")
        finally:
            assert heard.wait(60), "what it waits for comes of telling"

    told = outcomes(ranks_of(2), work)
    assert [str(error) for error in told] == [
        "learner process 1 failed: out of memory",
        "out of memory",
    ]


@pytest.mark.req("DDP-01")
def test_a_failed_process_whose_clean_up_hangs_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    codes: list[int] = []
    ended = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    def work(peers: StorePeers) -> None:
        if peers.rank == 0:
            assert ended.wait(60)
            return
        try:
            with peers.propagate_errors():
                raise ContractError("a.b", "no", "Add it")
        finally:
            assert ended.wait(60)

    timing = Timing(beat=0.01, silence=60.0, grace=60.0, linger=0.1, unwind=0.05)
    outcomes(ranks_of(2, timing, end=end), work)
    assert codes[0] == 2
    assert "error: a.b" in capfd.readouterr().err
