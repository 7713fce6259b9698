"""How both commands end when they cannot do what they were asked: a plain message."""

import sys
from collections.abc import Callable

from shared_contracts.errors import ContractError, ContractErrors, RunError

BAD_INPUT = 2
RUN_FAILED = 1


def run_cli(app: Callable[[], object]) -> None:
    """Run a command-line app; errors meant for a person are told without a traceback.

    A ContractError is three lines on stderr and exit code 2, a RunError one and exit code 1.
    """
    try:
        app()
    except ContractError as error:
        print(describe(error), file=sys.stderr)
        sys.exit(BAD_INPUT)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(RUN_FAILED)


def describe(error: ContractError) -> str:
    """The message of an error, or of each of several."""
    errors = error.errors if isinstance(error, ContractErrors) else [error]
    return "\n".join(f"error: {e.where}\n  found: {e.found}\n  do: {e.do}" for e in errors)
