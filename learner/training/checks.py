"""A list of checks: of `learner train`, which raises the first failure, and of `learner doctor`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from shared_contracts.errors import ContractErrors

T = TypeVar("T")


@dataclass(frozen=True)
class Check:
    """One start-up check.

    run: returns one line about what holds. Raises ContractError for what stops a run, `Caution`
    for what a run only reports, and `Waiting` if an earlier check did not pass.
    """

    name: str
    run: Callable[[], str]


class Caution(ContractErrors):
    """Problems that do not stop a run."""


class Waiting(Exception):
    """A check cannot run; the message names the earlier check that did not pass."""


def require(result: T | None, check: str) -> T:
    """Return the result of an earlier check; raises `Waiting` if there is none."""
    if result is None:
        raise Waiting(f"waits for {check}")
    return result
