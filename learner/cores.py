"""How threads that have nothing to do wait, on cores that others want. Imports no torch."""

import os

# OpenMP threads that wait for work sleep. By default they spin, and a learner that shares its cores
# with a server then takes ten times as long for a step.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}


def share_cores() -> None:
    """Have them sleep in this process, unless its environment says otherwise; before torch is
    imported, which reads that once.
    """
    for name, value in PASSIVE.items():
        os.environ.setdefault(name, value)
