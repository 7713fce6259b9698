"""Differences of the engine's and the trainer's log-probabilities of answer tokens (LOGP-01).

The teacher-forced forward has the tokens that the target keeps in the same contexts. Both sides use
the model's own logits, at temperature 1. Rounding, other kernels or other weights cause
differences.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from learner.types import Role

Array = npt.NDArray[np.float64]

# Kinds of compared tokens, by the name in the metrics.
ALL = "all"
TOKEN_KINDS = {
    ALL: "all compared tokens",
    "structure": "the structure of matched objects",
    "description": "descriptions of matched objects",
    "coordinate": "coordinates of matched objects",
    "false_positive": "all tokens of objects that are not matched or are dropped",
}
_KIND_OF: dict[Role, str] = {
    Role.MATCHED_STRUCTURE: "structure",
    Role.MATCHED_DESC: "description",
    Role.FALSE_POSITIVE: "false_positive",
    # Here a first `{` without a complete object behind it; an experiment may keep more.
    Role.APPENDED_STRUCTURE: "structure",
    Role.APPENDED_DESC: "description",
    Role.COORD: "coordinate",
    Role.CLOSURE: "structure",
}


class Mismatch(NamedTuple):
    """Kept tokens of a pack, or of a step.

    roles: (R,) values of `Role`. nats: (R,) absolute differences of the two log-probabilities.
    """

    roles: npt.NDArray[np.int8]
    nats: Array

    @classmethod
    def joined(cls, parts: Sequence["Mismatch"]) -> "Mismatch":
        """Concatenate the tokens of `parts`, which may be empty."""
        roles = [np.zeros(0, np.int8), *(part.roles for part in parts)]
        return cls(np.concatenate(roles), np.concatenate([np.zeros(0), *(p.nats for p in parts)]))

    def by_kind(self) -> Iterator[tuple[str, Array]]:
        """Yield the differences of each of `TOKEN_KINDS` that has a token."""
        for kind in TOKEN_KINDS:
            roles = [role for role, own in _KIND_OF.items() if kind in (own, ALL)]
            nats = self.nats[np.isin(self.roles, roles)]
            if len(nats):
                yield kind, nats
