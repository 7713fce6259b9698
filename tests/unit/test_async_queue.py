"""The queue of ready shares and who has which share: every order of events."""

from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from learner.async_rollout.queue import Part, ReadyQueue, ReadyShare
from learner.async_rollout.shares import Shares
from learner.async_rollout.stock import Stock
from shared_contracts.errors import ContractError, RunError

Ready = ReadyShare[str]


def ready(share: int, version: int, packs: int = 1) -> Ready:
    return Ready(share, [Part(version, [f"{share}.{i}" for i in range(packs)])])


def queue_at(version: int, limit: int = 8, window: int = 2) -> ReadyQueue[Ready]:
    queue = ReadyQueue[Ready](limit, window)
    queue.drop_stale(version)
    return queue


def shares_in(queue: ReadyQueue[Ready], step: int = 0) -> list[int]:
    return [queue.take(step).share for _ in range(len(queue))]


@pytest.mark.req("ASYNC-01")
def test_the_oldest_share_is_trained_on_first() -> None:
    queue = queue_at(1)
    for share in (4, 2, 7):
        assert queue.put(ready(share, 1)) == []
    assert shares_in(queue) == [4, 2, 7]


@pytest.mark.req("ASYNC-01")
def test_a_full_queue_drops_its_oldest_shares_whole() -> None:
    queue = queue_at(1, limit=5)
    for share in range(2):
        queue.put(ready(share, 1, packs=2))
    assert queue.put(ready(2, 1, packs=1)) == [], "five packs fit"
    assert [dropped.share for dropped in queue.put(ready(3, 1, packs=3))] == [0, 1]
    assert (queue.packs, shares_in(queue)) == (4, [2, 3])


@pytest.mark.req("ASYNC-01")
def test_no_share_older_than_the_window_is_left() -> None:
    queue = queue_at(1, window=1)
    for share, version in enumerate((1, 1, 2)):
        queue.drop_stale(version)
        queue.put(ready(share, version))
    assert queue.drop_stale(2) == [], "one version behind is within the window"
    assert [stale.share for stale in queue.drop_stale(3)] == [0, 1]
    assert shares_in(queue) == [2]


@pytest.mark.req("ASYNC-01")
def test_a_share_is_as_old_as_its_oldest_part() -> None:
    queue = queue_at(2, window=1)
    queue.put(Ready(0, [Part(1, ["a"]), Part(2, ["b"])]))
    assert [stale.packs for stale in queue.drop_stale(3)] == [["a", "b"]]


@pytest.mark.req("ASYNC-01")
def test_a_share_without_a_usable_answer_takes_the_place_of_a_pack() -> None:
    queue = queue_at(1, limit=2)
    for share in range(2):
        queue.put(ready(share, 1, packs=0))
    assert queue.packs == 2
    assert [dropped.share for dropped in queue.put(ready(2, 1, packs=0))] == [0]


@pytest.mark.req("ASYNC-01")
def test_a_share_that_never_fits_is_the_users_to_solve() -> None:
    queue = queue_at(3, limit=4)
    queue.put(ready(8, 2))
    with pytest.raises(ContractError) as caught:
        queue.put(ready(9, 3, packs=5))
    assert caught.value.where == "rollout_matching.async_rollout.queue_limit"
    assert "the 5 packs of share 9" in caught.value.found
    assert "share 8 of version 2 in 1 packs" in caught.value.found
    assert "at least 5" in caught.value.do


@pytest.mark.req("ASYNC-01")
@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (ready(1, 3), "share 1 is made twice"),
        (ready(2, 4), "version 4, which nobody has pushed"),
        (Ready(2, [Part(3, []), Part(2, [])]), r"parts of the versions \[3, 2\]"),
        (Ready(2, [Part(3, []), Part(3, [])]), r"parts of the versions \[3, 3\]"),
        (Ready(2, []), r"parts of the versions \[\]"),
    ],
)
def test_what_cannot_be_is_told_with_the_state_of_the_queue(broken: Ready, found: str) -> None:
    queue = queue_at(3)
    queue.put(ready(1, 3))
    with pytest.raises(RunError, match=found) as caught:
        queue.put(broken)
    assert "share 1 of version 3 in 1 packs; newest version 3, version_window 2" in str(
        caught.value
    )


@pytest.mark.req("ASYNC-01")
def test_the_newest_version_never_goes_back() -> None:
    with pytest.raises(RunError, match=r"version 2, and before: .* newest version 3"):
        queue_at(3).drop_stale(2)


@pytest.mark.req("STEP-02")
def test_a_share_goes_back_only_from_whom_it_was_claimed_for() -> None:
    shares = Shares(0, 3)
    assert shares.claim() == 0
    shares.trained(0)
    for used in (0, 1):
        with pytest.raises(RunError, match=f"share {used} is given back or trained on"):
            shares.give_back(used)
        with pytest.raises(RunError, match=f"share {used} is given back or trained on"):
            shares.trained(used)


@pytest.mark.req("STEP-02", "RUN-01")
def test_a_run_that_goes_on_has_every_share_left_that_was_not_trained_on() -> None:
    shares = Shares(0, 8)
    for _ in range(5):
        shares.claim()
    shares.trained(1)
    shares.trained(3)
    shares.give_back(4)
    again = Shares.restored(shares.state(), 8)
    assert [again.claim() for _ in range(7)] == [0, 2, 4, 5, 6, 7, None]


@pytest.mark.req("ASYNC-01")
def test_no_share_is_begun_that_would_drop_a_ready_one() -> None:
    stock = Stock(Shares(0, 9), queue_at(1, limit=3), target=3)
    assert stock.begin() == 0
    stock.put(ready(0, 1, packs=2))
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(stock.begin)
        assert not wait([begun], timeout=0.1).done, "two more packs would be four"
        stock.take(0)
        assert begun.result() == 1


TOTAL, LIMIT, WINDOW, TARGET = 12, 5, 1, 4


class AnyOrder(RuleBasedStateMachine):
    """A stock between its two threads, whose calls come in any order.

    trained: shares by step. held: (share, version, packs) in the queue, oldest first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stock = Stock(Shares(0, TOTAL), ReadyQueue[Ready](LIMIT, WINDOW), TARGET)
        self.stock.refresh(1)
        self.version = 1
        self.trained: list[int] = []
        self.held: list[tuple[int, int, int]] = []
        self.making: int | None = None
        self.asked_at = 1
        self.largest = 1

    @property
    def packs(self) -> int:
        return sum(packs for _, _, packs in self.held)

    @property
    def unclaimed(self) -> set[int]:
        claimed = {*self.trained, *(share for share, _, _ in self.held), self.making}
        return set(range(TOTAL)) - claimed

    @precondition(
        lambda self: (
            self.making is None
            and self.unclaimed
            and self.packs < TARGET
            and (not self.held or self.packs + self.largest <= LIMIT)
        )
    )
    @rule()
    def begin(self) -> None:
        expected = min(self.unclaimed)
        self.making = self.stock.begin()
        self.asked_at = self.version
        assert self.making == expected

    @precondition(lambda self: self.making is not None)
    @rule(packs=st.integers(1, LIMIT))
    def put(self, packs: int) -> None:
        assert self.making is not None
        share, self.making = self.making, None
        self.stock.put(ready(share, self.asked_at, packs))
        if share in self.trained:
            return
        self.largest = max(self.largest, packs)
        if self.asked_at >= self.version - WINDOW:
            while self.packs + packs > LIMIT:
                self.held.pop(0)
            self.held.append((share, self.asked_at, packs))

    @rule()
    def push(self) -> None:
        self.version += 1
        self.stock.refresh(self.version)
        self.held = [entry for entry in self.held if entry[1] >= self.version - WINDOW]

    @precondition(lambda self: self.held)
    @rule()
    def channel_b(self) -> None:
        expected, version, _ = self.held.pop(0)
        taken = self.stock.take(len(self.trained))
        assert (taken.share, taken.version) == (expected, version)
        assert version >= self.version - WINDOW
        self.trained.append(taken.share)

    @precondition(lambda self: len(self.trained) < TOTAL)
    @rule()
    def channel_a(self) -> None:
        if self.unclaimed:
            expected: int | None = min(self.unclaimed)
        elif self.held:
            expected = self.held.pop()[0]
        else:
            expected = self.making
        self.trained.append(self.stock.take_unanswered(len(self.trained)))
        assert self.trained[-1] == expected

    @invariant()
    def no_share_is_trained_on_twice(self) -> None:
        assert len(set(self.trained)) == len(self.trained)

    @invariant()
    def the_queue_is_bounded(self) -> None:
        assert self.stock.packs == self.packs <= LIMIT
        assert self.stock.has_ready() == bool(self.held)

    @invariant()
    def what_is_not_trained_on_is_left_for_a_run_that_goes_on(self) -> None:
        state = self.stock.state()
        left = {*state["left"], *range(state["next"], TOTAL)}
        assert left == set(range(TOTAL)) - set(self.trained)

    @precondition(lambda self: len(self.trained) == TOTAL)
    @rule()
    def over(self) -> None:
        with pytest.raises(RunError, match="no share is left for step 13"):
            self.stock.take_unanswered(TOTAL)


TestAnyOrder = pytest.mark.req("ASYNC-01", "STEP-02")(AnyOrder.TestCase)
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=60)
