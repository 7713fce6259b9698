"""Calls and collectives that may hang, and which of their errors is raised."""

import threading

from learner.rollout.parallel_calls import run_together

LIMIT_S = 600.0


def fail(message: str) -> None:
    raise RuntimeError(message)


def test_both_parts_are_waited_for() -> None:
    over, done = threading.Event(), list[str]()

    def call() -> None:
        over.wait()
        done.append("call")

    assert run_together(call, over.set, LIMIT_S) is None
    assert done == ["call"]


def test_an_error_of_the_call_is_returned_while_the_collective_hangs() -> None:
    hung = threading.Event()
    broken = run_together(lambda: fail("refused"), hung.wait, LIMIT_S)
    assert broken is not None
    assert (broken.part, str(broken.error)) == ("call", "refused")
    hung.set()


def test_the_error_of_the_call_is_preferred_to_that_of_the_collective() -> None:
    over = threading.Event()

    def call() -> None:
        over.wait()
        fail("the worker died")

    def collective() -> None:
        over.set()
        fail("connection closed by peer")

    broken = run_together(call, collective, LIMIT_S)
    assert broken is not None
    assert (broken.part, str(broken.error)) == ("call", "the worker died")


def test_the_error_of_the_collective_is_returned_where_the_call_hangs_or_succeeds() -> None:
    hung = threading.Event()
    for call in (lambda: None, hung.wait):
        broken = run_together(call, lambda: fail("broken"), LIMIT_S)
        assert broken is not None
        assert (broken.part, str(broken.error)) == ("collective", "broken")
    hung.set()


def test_at_the_deadline_the_call_is_named_before_the_collective() -> None:
    hung, parts = threading.Event(), []
    for call in (lambda: None, hung.wait):
        broken = run_together(call, hung.wait, 0.3)
        assert broken is not None
        assert isinstance(broken.error, TimeoutError)
        parts.append(broken.part)
    hung.set()
    assert parts == ["collective", "call"]
