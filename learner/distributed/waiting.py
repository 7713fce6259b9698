"""What a process waits for, told every so often for as long as it lasts.

    reporting_waits(say)       around a program: what is waited for within is told
    waiting_for("a push")    around what may take long

A line says what is waited for, since when, and what is known of it. Where waits are inside of one
another, it is about the innermost one of each thread. Outside of `reporting_waits` nothing is told.
`use_passive_wait` is about idle OpenMP threads. Imports no torch.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

EVERY_S = 20.0


@dataclass(eq=False)
class _Wait:
    """now: what is known of it at the moment. told: when it was last told, or began."""

    what: str
    now: Callable[[], str]
    thread: int = field(default_factory=threading.get_ident)
    clock: str = field(default_factory=lambda: time.strftime("%H:%M:%S"))
    began: float = field(default_factory=time.monotonic)
    told: float = field(default_factory=time.monotonic)

    def line(self) -> str:
        waited = time.monotonic() - self.began
        known = self.now()
        said = f"Waiting for {self.what} since {self.clock} ({waited:.0f} s)"
        return f"{said}: {known}" if known else said


_waits: list[_Wait] = []  # of all threads, in the order in which they began


@contextmanager
def waiting_for(what: str, now: Callable[[], str] = str) -> Iterator[None]:
    """Name what the block waits for.

    now: called from another thread whenever it is told; what more is known, or nothing.
    """
    wait = _Wait(what, now)
    _waits.append(wait)
    try:
        yield
    finally:
        _waits.remove(wait)


@contextmanager
def reporting_waits(say: Callable[[str], object], every_s: float | None = None) -> Iterator[None]:
    """Tell, by `say` in a thread of its own, of every wait that lasts `every_s` and longer.

    every_s: seconds; EVERY_S where it is left out.
    """
    pause_s = EVERY_S if every_s is None else every_s
    over = threading.Event()

    def tell() -> None:
        while not over.wait(pause_s / 10):
            innermost = {wait.thread: wait for wait in tuple(_waits)}
            for wait in innermost.values():
                if time.monotonic() - wait.told >= pause_s:
                    wait.told = time.monotonic()
                    say(wait.line())

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


# Idle threads sleep. By default they spin, and a learner that uses the same cores as a server then
# takes ten times as long for a step.
PASSIVE_WAIT = {"OMP_WAIT_POLICY": "PASSIVE"}


def use_passive_wait() -> None:
    """Let the idle threads of this process sleep, unless its environment sets something else.

    Call it before torch is imported, which reads the variable once.
    """
    for name, value in PASSIVE_WAIT.items():
        os.environ.setdefault(name, value)
