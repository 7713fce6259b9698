"""Reports of long waits.

    reporting_waits(say)     around a program: reports each wait inside from time to time
    waiting_for("a push")    around a block that may take long

A line names the wait, its start and its state; of nested waits, the innermost one of each thread.
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
    """now: its state at the moment. reported: when it was last reported, or began."""

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


_waits: list[_Wait] = []  # of all threads, in the order in which they began


@contextmanager
def waiting_for(what: str, now: Callable[[], str] = str) -> Iterator[None]:
    """Name what the block waits for. now: its state, called in another thread; may be empty."""
    wait = _Wait(what, now)
    _waits.append(wait)
    try:
        yield
    finally:
        _waits.remove(wait)


@contextmanager
def reporting_waits(say: Callable[[str], object], every_s: float | None = None) -> Iterator[None]:
    """Report every wait that lasts `every_s` seconds or longer, by `say` in a thread.

    every_s: None: EVERY_S.
    """
    pause_s = EVERY_S if every_s is None else every_s
    over = threading.Event()

    def report() -> None:
        while not over.wait(pause_s / 10):
            innermost = {wait.thread: wait for wait in tuple(_waits)}
            for wait in innermost.values():
                if time.monotonic() - wait.reported >= pause_s:
                    wait.reported = time.monotonic()
                    say(wait.line())

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        over.set()
        reporter.join()


# Idle threads sleep. By default they spin, and a learner that uses the same cores as a server then
# takes ten times as long for a step.
PASSIVE_WAIT = {"OMP_WAIT_POLICY": "PASSIVE"}


def use_passive_wait() -> None:
    """Let the idle threads of this process sleep, unless its environment sets something else.

    Call it before torch is imported, which reads the variable once.
    """
    for name, value in PASSIVE_WAIT.items():
        os.environ.setdefault(name, value)
