"""Calls at once: in order, first error first, and nobody is waited for after it."""

import threading
from queue import Empty

import pytest

from learner.rollout.parallel_calls import Calls, in_parallel


def test_results_come_in_the_order_of_the_calls() -> None:
    second_ran = threading.Event()

    def first() -> int:
        assert second_ran.wait(60)
        return 1

    def second() -> int:
        second_ran.set()
        return 2

    assert in_parallel([first, second]) == [1, 2]
    assert in_parallel([]) == []


def test_an_error_is_raised_while_other_calls_still_hang() -> None:
    release = threading.Event()
    released: list[bool] = []

    def hang() -> None:
        released.append(release.wait(60))

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        in_parallel([hang, fail])
    assert released == []
    release.set()


def test_calls_are_taken_in_the_order_in_which_they_end() -> None:
    release = threading.Event()
    calls: Calls[str, bool] = Calls()
    calls.start("slow", lambda: release.wait(60))
    calls.start("quick", lambda: True)
    key, outcome = calls.take()
    assert (key, outcome.result()) == ("quick", True)
    with pytest.raises(Empty):
        calls.take(timeout_s=0.01)
    release.set()
    assert calls.take()[0] == "slow"


def test_a_call_that_fails_is_taken_with_its_error() -> None:
    calls: Calls[int, int] = Calls()
    calls.start(7, lambda: int("seven"))
    key, outcome = calls.take()
    assert key == 7
    assert isinstance(outcome.exception(), ValueError)
