"""The ranks of the learner, which wait for each other as `learner.peers` has them."""

from collections.abc import Generator
from typing import Any

from simpy import Environment, Event


class Gathering:
    """`share`: every rank says something, and goes on when all have."""

    def __init__(self, env: Environment, count: int) -> None:
        self.count = count
        self._env = env
        self._said: dict[int, Any] = {}
        self._complete = env.event()

    def share(self, rank: int, value: Any = None) -> Generator[Event, Any, list[Any]]:
        """What each rank said, in their order."""
        assert rank not in self._said, "ranks make the same calls in the same order"
        self._said[rank] = value
        complete = self._complete
        if len(self._said) == self.count:
            said, self._said = self._said, {}
            self._complete = self._env.event()
            complete.succeed([said[rank] for rank in range(self.count)])
        result: list[Any] = yield complete
        return result
