"""The numbers of a step and how processes combine them (MET-01).

    declared    every key the learner may log, once, with its kind and its meaning
    payload     the parts of a step's numbers as they come in
    processes   the parts of all processes: two all-reduces, nothing is gathered
    report      what one optimizer step did

Nothing is carried over from one logged step to the next: each has a payload of its own.
"""

from learner.metrics.payload import Payload
from learner.metrics.report import PhaseClock, StepReport

__all__ = ["Payload", "PhaseClock", "StepReport"]
