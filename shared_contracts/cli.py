"""How both commands end on bad input: a plain message and exit code 2."""

import sys
from collections.abc import Callable

from shared_contracts.errors import ContractError, ContractErrors

BAD_INPUT = 2


def run_cli(app: Callable[[], object]) -> None:
    """Run a command-line app; a ContractError becomes three lines on stderr and exit code 2."""
    try:
        app()
    except ContractError as error:
        print(describe(error), file=sys.stderr)
        sys.exit(BAD_INPUT)


def describe(error: ContractError) -> str:
    """The message of an error, or of each of several."""
    errors = error.errors if isinstance(error, ContractErrors) else [error]
    return "\n".join(f"error: {e.where}\n  found: {e.found}\n  do: {e.do}" for e in errors)
