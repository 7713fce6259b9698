"""Reports of long waits. Imports no torch.

reporting_waits(say)     around a program: reports each wait inside from time to time
waiting_for("a push")    around a block that may take long; the innermost one is reported
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
    """now: returns its current state. reported: when it was last reported, or began."""

    what: str
    now: Callable[[], str]
    thread: int = field(default_factory=threading.get_ident)
    clock: str = field(default_factory=lambda: time.strftime("%H:%M:%S"))
    began: float = field(default_factory=time.monotonic)
    reported: float = field(default_factory=time.monotonic)

    def line(self) -> str:
        waited = time.monotonic() - self.began
        state = self.now()
        line = f"Waiting for {self.what} since {self.clock} ({waited:.0f} s)"
        return f"{line}: {state}" if state else line


_waits: list[_Wait] = []  # of all threads, by start


@contextmanager
def waiting_for(what: str, now: Callable[[], str] = str) -> Iterator[None]:
    """Name what the block waits for. now: returns its state, in another thread; may be empty."""
    wait = _Wait(what, now)
    _waits.append(wait)
    try:
        yield
    finally:
        _waits.remove(wait)


@contextmanager
def reporting_waits(say: Callable[[str], object], every_s: float = EVERY_S) -> Iterator[None]:
    """Call `say` in a thread for every wait of at least `every_s` seconds."""
    over = threading.Event()

    def report() -> None:
        while not over.wait(every_s / 10):
            innermost = {wait.thread: wait for wait in tuple(_waits)}
            for wait in innermost.values():
                if time.monotonic() - wait.reported >= every_s:
                    wait.reported = time.monotonic()
                    say(wait.line())

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        over.set()
        reporter.join()


# Idle OpenMP threads sleep. By default they spin, and a step of a learner that shares cores with a
# server takes ten times as long.
PASSIVE_WAIT = {"OMP_WAIT_POLICY": "PASSIVE"}


def use_passive_wait() -> None:
    """Let idle OpenMP threads of this process sleep, unless its environment says otherwise.

    Call it before torch is imported, which reads the variable once.
    """
    for name, value in PASSIVE_WAIT.items():
        os.environ.setdefault(name, value)
