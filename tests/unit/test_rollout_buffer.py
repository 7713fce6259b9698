"""The rollout buffer: every order of events."""

from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from learner.stages.packing import Part
from learner.training.rollout_buffer import ReadyBatch, RolloutBuffer
from shared_contracts.errors import ContractError, RunError

Ready = ReadyBatch[str]


def ready(batch: int, version: int, packs: int = 1) -> Ready:
    return Ready(batch, [Part(version, [f"{batch}.{i}" for i in range(packs)])])


def buffer_at(
    version: int, limit: int = 8, window: int = 2, target: int = 100, total: int = 100
) -> RolloutBuffer[Ready]:
    buffer = RolloutBuffer[Ready](limit, window, target, total)
    buffer.start(0)
    buffer.refresh(version)
    return buffer


def make(buffer: RolloutBuffer[Ready], version: int, packs: int = 1) -> int:
    """Make the next batch, by weights of `version`; returns its number."""
    batch = buffer.begin_now()
    assert batch is not None
    buffer.put(ready(batch, version, packs))
    return batch


def batches_in(buffer: RolloutBuffer[Ready]) -> list[int]:
    taken = []
    while buffer.has_ready():
        taken.append(buffer.take(0).batch)
    return taken


@pytest.mark.req("ASYNC-01")
def test_the_oldest_batch_is_trained_on_first() -> None:
    buffer = buffer_at(1)
    assert [make(buffer, 1) for _ in range(3)] == [0, 1, 2]
    assert batches_in(buffer) == [0, 1, 2]


@pytest.mark.req("ASYNC-01")
def test_where_a_batch_of_the_largest_size_has_no_room_none_is_begun() -> None:
    buffer = buffer_at(1, limit=5)
    for _ in range(2):
        make(buffer, 1, packs=2)
    assert buffer.begin_now() is None, "two more packs would be six"
    assert buffer.take_unanswered(0) == 2
    assert batches_in(buffer) == [0, 1]


@pytest.mark.req("ASYNC-01")
def test_a_batch_that_is_larger_than_any_before_drops_the_oldest() -> None:
    buffer = buffer_at(1, limit=5)
    for _ in range(3):
        make(buffer, 1)
    make(buffer, 1, packs=4)
    assert (buffer.packs, buffer.dropped_oldest) == (5, 2)
    assert batches_in(buffer) == [2, 3]
    assert make(buffer, 1) == 0, "it was given back"


@pytest.mark.req("ASYNC-01")
def test_no_batch_older_than_the_window_is_left() -> None:
    buffer = buffer_at(1, window=1)
    for version in (1, 1, 2):
        buffer.refresh(version)
        make(buffer, version)
    buffer.refresh(2)
    assert buffer.dropped_stale == 0, "one version behind is within the window"
    buffer.refresh(3)
    assert buffer.dropped_stale == 2
    assert batches_in(buffer) == [2]
    assert [make(buffer, 3) for _ in range(2)] == [0, 1], "they were given back"


@pytest.mark.req("ASYNC-01")
def test_a_batch_is_as_old_as_its_oldest_part() -> None:
    buffer = buffer_at(2, window=1)
    assert buffer.begin_now() == 0
    buffer.put(Ready(0, [Part(1, ["a"]), Part(2, ["b"])]))
    buffer.refresh(3)
    assert (buffer.dropped_stale, buffer.has_ready()) == (2, False)


@pytest.mark.req("ASYNC-01")
def test_a_batch_that_is_stale_when_it_is_made_is_given_back() -> None:
    buffer = buffer_at(1, window=1)
    assert buffer.begin_now() == 0
    buffer.refresh(3)
    buffer.put(ready(0, 1, packs=3))
    assert (buffer.dropped_stale, buffer.has_ready()) == (3, False)
    assert buffer.begin_now() == 0


@pytest.mark.req("ASYNC-01")
def test_a_batch_without_a_usable_answer_takes_the_place_of_a_pack() -> None:
    buffer = buffer_at(1, limit=2)
    for _ in range(2):
        make(buffer, 1, packs=0)
    assert buffer.packs == 2
    assert buffer.begin_now() is None


@pytest.mark.req("ASYNC-01")
def test_a_batch_that_never_fits_is_the_users_to_solve() -> None:
    buffer = buffer_at(3, limit=4)
    make(buffer, 2)
    with pytest.raises(ContractError) as caught:
        make(buffer, 3, packs=5)
    assert caught.value.where == "rollout_matching.async_rollout.queue_limit"
    assert "the 5 packs of batch 1" in caught.value.found
    assert "batch 0 of version 2 in 1 packs" in caught.value.found
    assert "at least 5" in caught.value.do


@pytest.mark.req("ASYNC-01")
@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (ready(1, 4), "version 4, which nobody has pushed"),
        (Ready(1, [Part(3, []), Part(2, [])]), r"parts of the versions \[3, 2\]"),
        (Ready(1, [Part(3, []), Part(3, [])]), r"parts of the versions \[3, 3\]"),
        (Ready(1, []), r"parts of the versions \[\]"),
    ],
)
def test_what_cannot_be_is_told_with_the_state_of_the_buffer(broken: Ready, found: str) -> None:
    buffer = buffer_at(3)
    make(buffer, 3)
    assert buffer.begin_now() == 1
    with pytest.raises(RunError, match=found) as caught:
        buffer.put(broken)
    assert "batch 0 of version 3 in 1 packs; newest version 3, version_window 2" in str(
        caught.value
    )


@pytest.mark.req("ASYNC-01")
def test_the_newest_version_never_goes_back() -> None:
    with pytest.raises(RunError, match=r"version 2, and before: .* newest version 3"):
        buffer_at(3).refresh(2)


@pytest.mark.req("ASYNC-01", "STEP-02")
def test_what_is_put_and_was_not_begun_is_not_kept() -> None:
    buffer = buffer_at(1)
    buffer.put(ready(0, 1))
    assert not buffer.has_ready()
    assert make(buffer, 1) == 0
    buffer.put(ready(0, 1))
    assert batches_in(buffer) == [0]


@pytest.mark.req("ASYNC-01")
@pytest.mark.parametrize("step", [0, 4])
def test_channel_b_has_nothing_to_train_on_where_nothing_is_ready(step: int) -> None:
    with pytest.raises(RunError, match=f"step {step + 1}, and no batch is ready"):
        buffer_at(1).take(step)


@pytest.mark.req("STEP-02", "RUN-01")
def test_a_run_that_goes_on_has_every_batch_left_that_was_not_trained_on() -> None:
    buffer = buffer_at(1, total=8)
    for _ in range(3):
        make(buffer, 1)
    assert buffer.begin_now() == 3
    assert buffer.take(0).batch == 0
    assert buffer.take_unanswered(1) == 4
    again = RolloutBuffer[Ready](8, 2, 100, 8)
    again.restore(buffer.state())
    again.start(2)
    assert [again.begin_now() for _ in range(7)] == [1, 2, 3, 5, 6, 7, None]


@pytest.mark.req("ASYNC-01")
def test_no_batch_is_begun_that_would_drop_a_ready_one() -> None:
    buffer = buffer_at(1, limit=3, target=3)
    assert buffer.begin() == 0
    buffer.put(ready(0, 1, packs=2))
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(buffer.begin)
        assert not wait([begun], timeout=0.1).done, "two more packs would be four"
        buffer.take(0)
        assert begun.result() == 1


TOTAL, LIMIT, WINDOW, TARGET = 12, 5, 1, 4


class AnyOrder(RuleBasedStateMachine):
    """A buffer between its two threads, whose calls come in any order.

    trained: batches by step. held: (batch, version, packs) in the queue, oldest first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.buffer = buffer_at(1, LIMIT, WINDOW, TARGET, TOTAL)
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
        claimed = {*self.trained, *(batch for batch, _, _ in self.held), self.making}
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
        self.making = self.buffer.begin()
        self.asked_at = self.version
        assert self.making == expected

    @precondition(lambda self: self.making is not None)
    @rule(packs=st.integers(1, LIMIT))
    def put(self, packs: int) -> None:
        assert self.making is not None
        batch, self.making = self.making, None
        self.buffer.put(ready(batch, self.asked_at, packs))
        if batch in self.trained:
            return
        self.largest = max(self.largest, packs)
        if self.asked_at >= self.version - WINDOW:
            while self.packs + packs > LIMIT:
                self.held.pop(0)
            self.held.append((batch, self.asked_at, packs))

    @rule()
    def push(self) -> None:
        self.version += 1
        self.buffer.refresh(self.version)
        self.held = [entry for entry in self.held if entry[1] >= self.version - WINDOW]

    @precondition(lambda self: self.held)
    @rule()
    def channel_b(self) -> None:
        expected, version, _ = self.held.pop(0)
        taken = self.buffer.take(len(self.trained))
        assert (taken.batch, taken.version) == (expected, version)
        assert version >= self.version - WINDOW
        self.trained.append(taken.batch)

    @precondition(lambda self: len(self.trained) < TOTAL)
    @rule()
    def channel_a(self) -> None:
        if self.unclaimed:
            expected: int | None = min(self.unclaimed)
        elif self.held:
            expected = self.held.pop()[0]
        else:
            expected = self.making
        self.trained.append(self.buffer.take_unanswered(len(self.trained)))
        assert self.trained[-1] == expected

    @invariant()
    def no_batch_is_trained_on_twice(self) -> None:
        assert len(set(self.trained)) == len(self.trained)

    @invariant()
    def the_queue_is_bounded(self) -> None:
        assert self.buffer.packs == self.packs <= LIMIT
        assert self.buffer.has_ready() == bool(self.held)

    @invariant()
    def what_is_not_trained_on_is_left_for_a_run_that_goes_on(self) -> None:
        state = self.buffer.state()
        left = {*state["left"], *range(state["next"], TOTAL)}
        assert left == set(range(TOTAL)) - set(self.trained)

    @precondition(lambda self: len(self.trained) == TOTAL)
    @rule()
    def over(self) -> None:
        with pytest.raises(RunError, match="no batch is left for step 13"):
            self.buffer.take_unanswered(TOTAL)


TestAnyOrder = pytest.mark.req("ASYNC-01", "STEP-02")(AnyOrder.TestCase)
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=60)
