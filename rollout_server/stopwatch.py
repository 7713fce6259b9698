"""Seconds of what is done in phases, added up by phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

Phase = TypeVar("Phase", bound=str)


@contextmanager
def timed(seconds: dict[Phase, float], phase: Phase) -> Iterator[None]:
    """Add the seconds of a `with` block, also of one that fails, to `seconds[phase]`."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[phase] = seconds.get(phase, 0.0) + time.monotonic() - began
