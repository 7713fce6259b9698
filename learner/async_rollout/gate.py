"""Keeps asking and pushing apart (SYNC-09): answers are asked for while the gate is open."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class GateShut(Exception):
    """Nobody is let in any more."""


class Gate:
    """Closed at first. Between the thread that asks and the thread that pushes.

    push_wanted: the asking thread waits for a push, without which nobody can answer it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = True
        self._asking = False
        self._shut = False
        self.push_wanted = False

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Waits for an open gate, which is not closed before the block is over.

        Raises GateShut.
        """
        with self._changed:
            while not self._shut and (self._closed or self.push_wanted):
                self._changed.wait()
            if self._shut:
                raise GateShut
            self._asking = True
        try:
            yield
        finally:
            with self._changed:
                self._asking = False
                self._changed.notify_all()

    def close(self) -> None:
        """Let nobody in, and wait until nobody is inside."""
        with self._changed:
            self._closed = True
            while self._asking:
                self._changed.wait()

    def open(self) -> None:
        with self._changed:
            self._closed = self.push_wanted = False
            self._changed.notify_all()

    def shut(self) -> None:
        """Let nobody in any more; who is inside stays as long as it takes."""
        with self._changed:
            self._shut = True
            self._changed.notify_all()
