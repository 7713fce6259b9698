"""Calls and collectives that hang; `test_push.py` has those that fail."""

import threading

from learner.rollout.parallel_calls import run_together


def test_at_the_deadline_the_call_is_named_before_the_collective() -> None:
    hung, parts = threading.Event(), []
    for call in (lambda: None, hung.wait):
        broken = run_together(call, hung.wait, 0.3)
        assert broken is not None
        assert isinstance(broken.error, TimeoutError)
        parts.append(broken.part)
    hung.set()
    assert parts == ["collective", "call"]
