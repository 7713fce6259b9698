"""Which engine takes a request: the one with the fewest outstanding tokens (SRV-01)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar


@dataclass
class Load:
    """What an engine has been given and not yet answered.

    tokens: still to prefill, or that may still be decoded.
    """

    tokens: int = 0
    sequences: int = 0


class Loaded(Protocol):
    """What choosing needs of an engine."""

    @property
    def load(self) -> Load: ...


E = TypeVar("E", bound=Loaded)


def least_loaded(engines: Sequence[E]) -> E:
    """The first of those with the fewest outstanding tokens."""
    return min(engines, key=lambda engine: engine.load.tokens)


@contextmanager
def charged(load: Load, tokens: int, sequences: int) -> Iterator[None]:
    """Count a request as outstanding for as long as the block runs."""
    load.tokens += tokens
    load.sequences += sequences
    try:
        yield
    finally:
        load.tokens -= tokens
        load.sequences -= sequences
