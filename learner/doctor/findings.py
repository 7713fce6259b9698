"""What a check has found, in the words of a `ContractError`."""

from dataclasses import dataclass
from typing import Literal

from shared_contracts.errors import ContractError, ContractErrors

Status = Literal["ok", "warn", "fail", "skipped"]

# Errors of one check that are shown one by one.
MOST_SHOWN = 5


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    check: a few words, the same in every run. about: a server, a file or a key; may be empty.
    found: what is there; of a check that was skipped, what it waits for.
    do: empty where nothing is to be done.
    """

    check: str
    about: str
    status: Status
    found: str
    do: str = ""


def ok(check: str, found: str, about: str = "") -> Finding:
    return Finding(check, about, "ok", found)


def skipped(check: str, why: str, about: str = "", do: str = "") -> Finding:
    return Finding(check, about, "skipped", why, do)


def of_error(
    check: str, error: ContractError, about: str = "", status: Status = "fail"
) -> list[Finding]:
    """A finding for each error, up to `MOST_SHOWN`; `about` takes the place of its `where`."""
    errors = error.errors if isinstance(error, ContractErrors) else [error]
    shown = [Finding(check, about or e.where, status, e.found, e.do) for e in errors[:MOST_SHOWN]]
    if len(errors) > MOST_SHOWN:
        found = f"{len(errors) - MOST_SHOWN} more of {len(errors)}"
        shown.append(Finding(check, about, status, found, "Mend these first"))
    return shown
