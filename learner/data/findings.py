"""What is wrong, or doubtful, in a data file."""

from dataclasses import dataclass

from shared_contracts.errors import ContractError, ContractErrors

MAX_SHOWN_ERRORS = 20


@dataclass(frozen=True)
class Finding:
    """One problem of a data file, or one warning.

    kind: a few words under which a summary counts it.
    where, found, do: as in `ContractError`; `where` is `file:line`.
    warning: a run takes the line as it is.
    """

    kind: str
    where: str
    found: str
    do: str
    warning: bool = False

    def error(self) -> ContractError:
        return ContractError(self.where, self.found, self.do)


def capped(where: str, errors: list[ContractError]) -> ContractErrors:
    """The first errors, and how many more there are."""
    hidden = len(errors) - MAX_SHOWN_ERRORS
    if hidden <= 0:
        return ContractErrors(errors)
    more = ContractError(
        where,
        f"{hidden} more problems ({len(errors)} in all)",
        "Mend these first, then rerun.",
    )
    return ContractErrors([*errors[:MAX_SHOWN_ERRORS], more])
