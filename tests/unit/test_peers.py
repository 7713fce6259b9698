"""Agreement of learner processes, and lines about waits: threads as processes, over gloo."""

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from learner.distributed.peers import SINGLE_PROCESS, Peers, broadcast_from_rank0
from learner.distributed.process_group import GroupPeers, Timing
from learner.distributed.waiting import reporting_waits, waiting_for
from learner.rollout.backend import ANSWERED, Call, RolloutBackend
from learner.rollout.parallel_calls import in_thread
from learner.rollout.policy import Policy, RequestSettings
from learner.types import RolloutOutput, Sample
from shared_contracts.errors import ContractError, ContractErrors, RunError
from shared_contracts.infer import RequestConfig
from tests.unit.fleets import wait_until
from tests.unit.ranks_in_threads import gloo_groups, keep

_LIMIT_S = 60.0
# No limit matters unless a test lowers it.
QUICK = Timing(beat=0.01, grace=600.0, linger=600.0)

NO_BOX = ContractError("data.jsonl:3", "no box", "Add one")
OTHER = ContractError("a", "b", "c")

Work = Callable[[GroupPeers], Any]


def ranks_of(
    count: int, timing: Timing = QUICK, timeout_s: float = 60.0, **options: Any
) -> list[GroupPeers]:
    store = HashStore()
    keep(groups := gloo_groups(store, count, timeout_s))
    options = {"end": lambda _: None, **options}
    return [GroupPeers(r, count, store, groups[r], timing, **options) for r in range(count)]


def outcomes(ranks: list[GroupPeers], work: Work) -> list[Any]:
    def guarded(peers: GroupPeers) -> Any:
        with peers.guarded():
            return work(peers)

    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(guarded, peers) for peers in ranks]
        return [_outcome(future) for future in futures]


def _outcome(future: "Future[Any]") -> Any:
    error = future.exception()
    return future.result() if error is None else error


def failing(rank: int, error: BaseException) -> Work:
    """Rank `rank` raises in the second of three rounds."""

    def work(peers: GroupPeers) -> list[int]:
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
def test_all_gather_returns_the_results_in_the_order_of_ranks(count: int) -> None:
    def work(peers: GroupPeers) -> list[list[object]]:
        return [peers.all_gather(partial(result, number, peers.rank)) for number in range(3)]

    def result(number: int, rank: int) -> dict[str, int]:
        return {"round": number, "rank": rank}

    expected = [[result(number, rank) for rank in range(count)] for number in range(3)]
    assert outcomes(ranks_of(count), work) == [expected] * count


@pytest.mark.req("DDP-01")
def test_broadcast_returns_the_result_of_rank_0_and_runs_nowhere_else() -> None:
    ran: list[int] = []

    def work(peers: Peers) -> list[str | None]:
        def choose() -> str:
            ran.append(peers.rank)
            return "A"

        return [broadcast_from_rank0(peers, choose), broadcast_from_rank0(peers, lambda: None)]

    assert outcomes(ranks_of(3), work) == [["A", None]] * 3
    assert ran == [0]
    assert broadcast_from_rank0(SINGLE_PROCESS, lambda: 7) == 7


@pytest.mark.req("DDP-01")
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (RunError("a full disk"), RunError, "learner process 1 failed: a full disk"),
        (ValueError("no"), RunError, "learner process 1 failed: ValueError: no"),
        (KeyboardInterrupt(), RunError, "learner process 1 failed: KeyboardInterrupt"),
        (NO_BOX, ContractError, str(NO_BOX)),
        (ContractErrors([NO_BOX, OTHER]), ContractErrors, str(ContractErrors([NO_BOX, OTHER]))),
    ],
)
def test_error_of_one_rank_ends_all(error: BaseException, kind: type[Exception], text: str) -> None:
    zero, one, two = outcomes(ranks_of(3), failing(1, error))
    assert one is error
    assert [type(zero), type(two)] == [kind] * 2
    assert [str(zero), str(two)] == [text] * 2


@pytest.mark.req("DDP-01")
def test_error_that_follows_from_a_failed_rank_is_raised_as_that_failure() -> None:
    zero, one = ranks_of(2)
    with pytest.raises(ValueError, match="out of memory"), one.guarded():
        raise ValueError("out of memory")
    broken = RuntimeError("connection closed by peer")
    with pytest.raises(RunError) as caught, zero.guarded():
        raise broken
    assert str(caught.value) == "learner process 1 failed: ValueError: out of memory"
    assert caught.value.__cause__ is broken
    alone = ranks_of(2)[0]
    with pytest.raises(RunError, match="connection broke: gloo: closed"), alone.propagate_errors():
        raise RuntimeError("gloo: closed by peer")


@pytest.mark.req("DDP-01", "ROLL-03")
def test_results_are_kept_for_a_rank_that_reads_them_after_the_next_round_has_failed() -> None:
    """As after a push by all processes that breaks, which one of them then makes alone."""

    class Late(PrefixStore):
        def get(self, key: str) -> bytes:
            wait_until(lambda: not key.startswith("round/1/") or self.check(["round/3/1"]))
            return super().get(key)

    def work(peers: Peers) -> list[int]:
        read = peers.all_gather(lambda: peers.rank)
        with suppress(RunError, ZeroDivisionError):
            peers.all_gather(lambda: 1 // (1 - peers.rank))
        peers.all_gather(lambda: None)
        return read

    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    keep(groups := gloo_groups(store, 2))
    stores = (Late("", store), PrefixStore("", store))
    ranks = [GroupPeers(rank, 2, stores[rank], groups[rank], QUICK) for rank in range(2)]
    assert outcomes(ranks, work) == [[0, 1]] * 2


@pytest.mark.req("DDP-01")
def test_rank_that_is_gone_breaks_the_collective_of_the_others() -> None:
    """Its connections close when it is killed, as here when its group is deleted."""
    store, timing = HashStore(), Timing(beat=0.01, linger=0.01)
    own, other = gloo_groups(store, 2)
    del other
    with (
        pytest.raises(RunError, match=r"broke \(late: learner process 1\)"),
        GroupPeers(0, 2, store, own, timing).guarded() as zero,
    ):
        zero.all_gather(lambda: None)


@pytest.mark.req("DDP-01")
def test_waiting_rank_calls_meanwhile_again_and_again() -> None:
    looks = threading.Semaphore(0)

    def work(peers: GroupPeers) -> list[bool]:
        if peers.rank == 0:
            return peers.all_gather(lambda: True, looks.release)
        return peers.all_gather(lambda: all(looks.acquire(timeout=_LIMIT_S) for _ in range(3)))

    assert outcomes(ranks_of(2), work) == [[True, True]] * 2


@pytest.mark.req("DDP-01")
@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (RunError("no server"), 1, "error: learner process 1 failed: no server\n"),
        (ContractError("a.b", "no", "Add it"), 2, "error: a.b\n  found: no\n  do: Add it\n"),
    ],
)
def test_rank_in_a_collective_is_ended_with_the_exit_code_of_the_failure(
    error: Exception, code: int, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    codes, timing = list[int](), Timing(beat=0.01, grace=0.01, linger=600.0)

    def work(peers: GroupPeers) -> None:
        if peers.rank == 1:
            raise error
        wait_until(lambda: codes)

    outcomes(ranks_of(2, timing, end=codes.append), work)
    assert codes == [code]
    assert capfd.readouterr().err == told


class LostStore(HashStore):
    """Breaks like the store of a killed process 0."""

    lost = False

    def check(self, keys: list[str]) -> bool:
        if self.lost:
            raise RuntimeError("Broken pipe")
        return super().check(keys)


@pytest.mark.req("DDP-01")
def test_lost_store_means_that_process_0_is_gone() -> None:
    store = LostStore()
    one = GroupPeers(1, 2, store, None, QUICK, end=lambda _: None)
    with pytest.raises(RunError, match="learner process 0 is gone: Broken pipe"), one.guarded():  # noqa: PT012
        store.lost = True
        raise RuntimeError("its effect")


@pytest.mark.req("DDP-01")
def test_failure_reaches_the_others_before_the_failed_process_has_cleaned_up() -> None:
    raised = threading.Event()

    def work(peers: GroupPeers) -> None:
        if peers.rank == 0:
            try:
                peers.all_gather(lambda: None)
            finally:
                raised.set()
        try:
            with peers.propagate_errors():
                raise RunError("out of memory")
        finally:
            assert raised.wait(_LIMIT_S)

    told = outcomes(ranks_of(2), work)
    assert [str(error) for error in told] == [
        "learner process 1 failed: out of memory",
        "out of memory",
    ]


@pytest.mark.req("DDP-01")
def test_failed_process_whose_clean_up_hangs_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    codes, timing = list[int](), Timing(beat=0.01, grace=0.05, linger=0.1)

    def work(peers: GroupPeers) -> None:
        if peers.rank == 1:
            try:
                with peers.propagate_errors():
                    raise ContractError("a.b", "no", "Add it")
            finally:
                wait_until(lambda: codes)

    zero, _ = outcomes(ranks_of(2, timing, end=codes.append), work)
    assert isinstance(zero, ContractError), "it waits for the other one before it leaves"
    assert codes[0] == 2
    assert "error: a.b" in capfd.readouterr().err


SOON_S = 0.02
SINCE = r" since \d\d:\d\d:\d\d \(\d+ s\)"


class Lines(list[str]):
    """`wait` returns the first line with these words."""

    def wait(self, words: str) -> str:
        wait_until(lambda: any(words in line for line in self))
        return next(line for line in self if words in line)


@pytest.fixture
def output() -> Iterator[Lines]:
    lines = Lines()
    with reporting_waits(lines.append, SOON_S):
        yield lines


def test_line_names_the_wait_its_start_and_what_is_known(output: Lines) -> None:
    known = iter(["nothing yet", "half of it"])
    with waiting_for("a push", lambda: next(known, "all")):
        first, second = output.wait("nothing yet"), output.wait("half of it")
    assert re.fullmatch(f"Waiting for a push{SINCE}: nothing yet", first)
    assert re.fullmatch(f"Waiting for a push{SINCE}: half of it", second)
    assert first.partition(" (")[0] == second.partition(" (")[0]
    with waiting_for("another"):
        assert re.fullmatch(f"Waiting for another{SINCE}", output.wait("another"))


def test_innermost_of_nested_waits_is_reported(output: Lines) -> None:
    with waiting_for("all of it"):
        with waiting_for("a part"):
            output.wait("a part")
            assert not [line for line in output if "all of it" in line]
        output.wait("all of it")


def test_wait_for_another_process_is_reported_with_its_number(output: Lines) -> None:
    quick, slow = ranks_of(2, Timing(beat=0.01))
    in_thread(partial(slow.all_gather, lambda: output.wait("late: learner process 1")))
    assert quick.all_gather(lambda: "here")[0] == "here"


class Slow(RolloutBackend):
    """Waits for `lines` about each push, and about the first answer of the first call."""

    def __init__(self, wait: Callable[[str], str]) -> None:
        super().__init__()
        self._wait = wait
        self.lines: list[str] = []

    def rollout(self, requests: Any, _: RequestConfig) -> list[RolloutOutput]:
        self.journal.call(Call("http://a:1", 0, 1, None, 1, "timeout"))
        self.journal.call(Call("http://a:1", 0, 1, None, 2, ANSWERED))
        if len(self.lines) < 2:
            self.lines.append(self._wait("1 of 3 are there"))
        return [RolloutOutput([1], [2], "", "stop", False, (1, 1), 0) for _ in requests]

    def push_weights(self, version: int) -> None:
        self.lines.append(self._wait(f"version {version}"))

    def close(self) -> None: ...


def test_pushes_and_the_first_answers_are_reported_and_no_later_ones(output: Lines) -> None:
    samples = [Sample(f"a.jsonl:{n}", (Path("/a.png"),), 64, 64, ()) for n in (1, 2, 3)]
    backend = Slow(output.wait)
    policy = Policy(backend, RequestSettings("", None, RequestConfig()))
    policy.push_if_stale()
    policy.answer(samples, 0)
    pushed, answered = backend.lines
    assert re.fullmatch(f"Waiting for a push of the weights, version 1{SINCE}", pushed)
    assert re.fullmatch(f"Waiting for answers{SINCE}: 1 of 3 are there", answered)
    policy.take_notes()
    with waiting_for("a step"):
        output.wait("a step")
        output.clear()
        policy.answer(samples, 0)
        output.wait("a step")
    assert not [line for line in output if "answers" in line]
