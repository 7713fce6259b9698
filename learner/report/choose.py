"""Which answers a page shows, where there are more than it can hold.

Two thirds are the worst ones, one third is drawn from the rest with a seed. Of a run, each third
of its logged steps has the same share of the worst, since all of the worst would be of its first
steps; the rest is of its first, middle and last step.
"""

import random
from collections.abc import Sequence
from typing import Generic, TypeVar

from learner.report.outcomes import badness
from learner.rollout_log import LoggedAnswer

MOST = 200
_PARTS = 3
_WORST_SHARE = 2 / 3
_SEED = 0

A = TypeVar("A", bound=LoggedAnswer)


def choose(answers: Sequence[A], most: int = MOST) -> list[A]:
    """At most so many of them, the worst first."""
    ordered = sorted(answers, key=badness)
    if len(ordered) <= most:
        return ordered
    worst = round(most * _WORST_SHARE)
    return sorted(ordered[:worst] + _drawn(ordered[worst:], most - worst), key=badness)


class Chooser(Generic[A]):
    """Chooses from a run that is read step by step, and holds no more than it may choose.

    steps: all that will be offered, in order.
    """

    def __init__(self, steps: Sequence[int], most: int = MOST) -> None:
        self._part = {step: place * _PARTS // len(steps) for place, step in enumerate(steps)}
        self._drawn_from = {steps[0], steps[len(steps) // 2], steps[-1]} if steps else set()
        self._most = most
        self._worst_of_a_part = round(most * _WORST_SHARE / _PARTS)
        self._all: list[A] = []
        self._worst: list[list[A]] = [[] for _ in range(_PARTS)]
        self._pool: list[A] = []
        self.offered = 0

    def offer(self, step: int, answers: Sequence[A]) -> None:
        self.offered += len(answers)
        self._all = [*self._all, *answers] if self.offered <= self._most else []
        part = self._part[step]
        self._worst[part] = sorted([*self._worst[part], *answers], key=badness)
        del self._worst[part][self._worst_of_a_part :]
        if step in self._drawn_from:
            self._pool += _drawn(answers, self._most)

    def chosen(self) -> list[A]:
        """The worst first."""
        if self.offered <= self._most:
            return sorted(self._all, key=badness)
        worst = [answer for part in self._worst for answer in part]
        known = {id(answer) for answer in worst}
        rest = [answer for answer in self._pool if id(answer) not in known]
        return sorted(worst + _drawn(rest, self._most - len(worst)), key=badness)


def _drawn(answers: Sequence[A], count: int) -> list[A]:
    """So many of them, the same ones each time; all where there are not so many."""
    return random.Random(_SEED).sample(answers, min(count, len(answers)))
