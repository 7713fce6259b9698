"""How long the steps of a run take on given machines, without any of them.

    config + speeds + lengths -> Setting -> simulate() -> Outcome -> tables

Distribution, packing, the agreed number of forwards, the schedule, the order of the samples
and the queue of ready packs are the code that a run runs; engines, learner and transport are
clocks with given speeds. Imports no torch.
"""

from learner.simulate.outcome import Outcome
from learner.simulate.run import Setting, simulate

__all__ = ["Outcome", "Setting", "simulate"]
