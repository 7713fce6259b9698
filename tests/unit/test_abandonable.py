"""Calls and collectives that may hang, and what is made of their ends."""

import threading
import time

import pytest

from learner.rollout.parallel_calls import REASON_GRACE_S, run_together, run_within


def fail(message: str) -> None:
    raise RuntimeError(message)


def test_two_that_end_well_are_waited_for() -> None:
    done: list[str] = []

    def late() -> None:
        time.sleep(0.1)
        done.append("a")

    assert run_together(late, lambda: None, 5.0) is None
    assert done == ["a"]


def test_the_first_error_is_returned_without_waiting_for_a_hung_collective() -> None:
    hung = threading.Event()
    broken = run_together(lambda: fail("refused"), lambda: hung.wait(20.0), 600.0)
    assert not hung.is_set()
    assert broken is not None
    assert (broken.part, str(broken.error)) == ("call", "refused")
    hung.set()


def test_the_calls_reason_is_preferred_to_the_broken_collective() -> None:
    over = threading.Event()

    def call() -> None:
        over.wait()
        time.sleep(0.1)
        fail("the worker died")

    def collective() -> None:
        over.set()
        fail("connection closed by peer")

    broken = run_together(call, collective, 10.0)
    assert broken is not None
    assert (broken.part, str(broken.error)) == ("call", "the worker died")


def test_a_broken_collective_is_returned_when_the_call_hangs_or_succeeds() -> None:
    hung = threading.Event()
    for call in (lambda: None, lambda: hung.wait(REASON_GRACE_S + 20.0)):
        broken = run_together(call, lambda: fail("broken"), 600.0)
        assert broken is not None
        assert (broken.part, str(broken.error)) == ("collective", "broken")
    hung.set()


def test_what_has_not_ended_at_the_deadline_is_named_the_call_first() -> None:
    hung = threading.Event()
    parts = []
    for call in (lambda: None, lambda: hung.wait(20.0)):
        broken = run_together(call, lambda: hung.wait(20.0), 0.3)
        assert broken is not None
        assert isinstance(broken.error, TimeoutError)
        parts.append(broken.part)
    hung.set()
    assert parts == ["collective", "call"]


def test_one_call_has_its_answer_its_error_or_its_deadline() -> None:
    assert run_within(lambda: 7, 5.0) == 7
    with pytest.raises(RuntimeError, match="refused"):
        run_within(lambda: fail("refused"), 5.0)
    hung = threading.Event()
    with pytest.raises(TimeoutError, match=r"0\.2 s"):
        run_within(lambda: hung.wait(20.0), 0.2)
    hung.set()
