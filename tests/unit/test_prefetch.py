"""What comes next is made while what is there is used, one ahead."""

import threading
from collections.abc import Generator

import pytest

from learner.training.synchronous_rollouts import prefetch


class Counted:
    """Yields 0, 1, ... and lets a test wait for each to be begun."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.begun = 0
        self._changed = threading.Condition()
        self.thread: threading.Thread | None = None

    def __iter__(self) -> Generator[int, None, None]:
        self.thread = threading.current_thread()
        for number in range(self.count):
            with self._changed:
                self.begun += 1
                self._changed.notify_all()
            yield number

    def wait_until_begun(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.begun >= count, timeout=60)


@pytest.mark.req("STEP-03")
@pytest.mark.parametrize("count", [0, 1, 5])
def test_all_items_come_in_order(count: int) -> None:
    with prefetch(number for number in range(count)) as items:
        assert list(items) == list(range(count))
        assert list(items) == []


@pytest.mark.req("STEP-03", "FULL-08")
def test_one_item_is_made_ahead_and_no_more() -> None:
    made = Counted(9)
    with prefetch(iter(made)) as items:
        made.wait_until_begun(2)
        for used in range(4):
            assert next(items) == used
            made.wait_until_begun(used + 3)
            assert made.begun <= used + 3  # one waits, one more is made


@pytest.mark.req("STEP-03", "DDP-01")
def test_an_error_is_raised_in_the_place_of_the_item() -> None:
    def failing() -> Generator[int, None, None]:
        yield 0
        yield 1
        raise ValueError("no server")

    with prefetch(failing()) as items:
        assert [next(items), next(items)] == [0, 1]
        with pytest.raises(ValueError, match="no server"):
            next(items)


@pytest.mark.req("STEP-03")
@pytest.mark.parametrize("fails", [False, True])
def test_after_the_block_no_item_is_begun_and_the_thread_ends(fails: bool) -> None:
    made = Counted(9)
    try:
        with prefetch(iter(made)) as items:
            assert next(items) == 0
            made.wait_until_begun(2)
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    assert made.thread is not None
    made.thread.join(60)
    assert not made.thread.is_alive()
    assert made.begun <= 3
