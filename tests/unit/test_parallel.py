"""Calls at once: in order, first error first, and nobody is waited for after it."""

import threading
import time

import pytest

from learner.rollout.parallel import in_parallel


def test_results_come_in_the_order_of_the_calls() -> None:
    second_ran = threading.Event()

    def first() -> int:
        assert second_ran.wait(5)
        return 1

    def second() -> int:
        second_ran.set()
        return 2

    assert in_parallel([first, second]) == [1, 2]
    assert in_parallel([]) == []


def test_an_error_is_raised_while_other_calls_still_hang() -> None:
    release = threading.Event()

    def hang() -> None:
        release.wait(30)

    def fail() -> None:
        raise ValueError("no")

    began = time.monotonic()
    with pytest.raises(ValueError, match="no"):
        in_parallel([hang, fail])
    assert time.monotonic() - began < 5
    release.set()
