"""How long the steps of a run take on given machines, without any of them.

    config + speeds + lengths -> Setting -> simulate() -> Outcome -> tables

Distribution, packing, the agreed number of forwards, the schedule, the order of the samples
and the buffer of rollouts are the code that a run runs; engines, learner and transport are
clocks with given speeds. Imports no torch.
"""

from learner.operate.simulate.inputs import Setting
from learner.operate.simulate.outcome import Outcome
from learner.operate.simulate.run import simulate

__all__ = ["Outcome", "Setting", "simulate"]
