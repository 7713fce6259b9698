"""Who has which share of a run: every one is trained on exactly once (STEP-02).

unclaimed -> being made or ready -> trained on
    ^                  |
    +--- given back ---+
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shared_contracts.errors import RunError


class Shares:
    """The shares `first` to `total - 1` of one process, by number.

    returned: numbers before `first` that are yet to be trained on.
    """

    def __init__(self, first: int, total: int, returned: Sequence[int] = ()) -> None:
        self._next = first
        self._total = total
        self._returned = sorted(returned)
        self._claimed: set[int] = set()

    def claim(self) -> int | None:
        """The first share that nobody has; None when none is left."""
        if self._returned:
            share = self._returned.pop(0)
        elif self._next < self._total:
            share, self._next = self._next, self._next + 1
        else:
            return None
        self._claimed.add(share)
        return share

    def give_back(self, share: int) -> None:
        """It is not trained on by whom it was claimed for."""
        self._release(share)
        self._returned = sorted([*self._returned, share])

    def trained(self, share: int) -> None:
        """It is over with a step."""
        self._release(share)

    def state(self) -> dict[str, Any]:
        """JSON: from which on all shares, and which ones before, are not trained on yet."""
        return {"next": self._next, "left": sorted([*self._returned, *self._claimed])}

    @classmethod
    def restored(cls, state: Mapping[str, Any], total: int) -> "Shares":
        return cls(state["next"], total, state["left"])

    def _release(self, share: int) -> None:
        if share not in self._claimed:
            raise RunError(f"share {share} is given back or trained on, and nobody had it")
        self._claimed.remove(share)
