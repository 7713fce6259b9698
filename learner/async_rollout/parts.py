"""Segments of a share -> packs, in a part for each version of the weights. Imports no torch."""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from learner.async_rollout.queue import Part

S = TypeVar("S")
P = TypeVar("P")
S_contra = TypeVar("S_contra", contravariant=True)
P_co = TypeVar("P_co", covariant=True)


class Packs(Protocol[S_contra, P_co]):
    """Makes packs of segments: `StepPacks` does."""

    def chunk(self, segments: Sequence[S_contra], *, last: bool) -> Sequence[P_co]: ...


class Parts(Generic[S, P]):
    """Takes the segments of each round; has the parts when all rounds are over."""

    def __init__(self, packs: Packs[S, P]) -> None:
        self._packs = packs
        self._over: list[Part[P]] = []
        self._version: int | None = None
        self._made: list[P] = []

    def add(self, version: int, segments: Sequence[S]) -> None:
        """A new version finishes the packs of the last one, however full: none mixes them."""
        if self._version not in (None, version):
            self._finish()
        self._version = version
        self._made += self._packs.chunk(segments, last=False)

    def finished(self) -> list[Part[P]]:
        self._finish()
        return self._over

    def _finish(self) -> None:
        assert self._version is not None, "a share has samples"
        self._made += self._packs.chunk([], last=True)
        self._over.append(Part(self._version, self._made))
        self._made = []
