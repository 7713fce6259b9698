"""What both commands share: their version, and how they end when they cannot do as asked."""

import sys
from collections.abc import Callable
from importlib.metadata import version

from shared_contracts.errors import ContractError, ContractErrors, RunError
from shared_contracts.printable import printable

DISTRIBUTION = "rollmatch"
BAD_INPUT = 2
RUN_FAILED = 1


def print_version(wanted: bool) -> None:
    """Callback of `--version`: print that of the installed distribution, and end."""
    if wanted:
        print(DISTRIBUTION, version(DISTRIBUTION))
        sys.exit()


def run_cli(app: Callable[[], object]) -> None:
    """Run a command-line app; errors meant for a person are told without a traceback.

    A ContractError is three lines on stderr and exit code 2, a RunError one and exit code 1.
    """
    try:
        app()
    except (ContractError, RunError) as error:
        print(describe(error), file=sys.stderr)
        sys.exit(exit_code(error))


def describe(error: BaseException) -> str:
    """The message of an error, or of each of several, as a terminal may be shown it.

    A ContractError is told in three lines, any other error in its own words.
    """
    if not isinstance(error, ContractError):
        return printable(f"error: {error}", lines=True)
    errors = error.errors if isinstance(error, ContractErrors) else [error]
    message = "\n".join(f"error: {e.where}\n  found: {e.found}\n  do: {e.do}" for e in errors)
    return printable(message, lines=True)


def exit_code(error: BaseException) -> int:
    """What a process that cannot go on because of `error` ends with."""
    return BAD_INPUT if isinstance(error, ContractError) else RUN_FAILED
