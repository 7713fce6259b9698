"""Common parts of both command-line programs: version, help, printed errors, exit codes."""

import atexit
import os
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version

from shared_contracts.errors import ContractError, RunError
from shared_contracts.machine import BY_BUS, CUDA_ORDER

DISTRIBUTION = "rollmatch"
BAD_INPUT = 2
RUN_FAILED = 1
# Typer settings: `-h` as well as `--help`.
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


def print_version(wanted: bool) -> None:
    """Callback of `--version`: print the version of the installed distribution, and exit."""
    if wanted:
        print(DISTRIBUTION, version(DISTRIBUTION))
        sys.exit()


def run_program(app: Callable[[], object]) -> None:
    """Run a command-line app as the whole of this process (see `run_cli`).

    The process exits with `os._exit` after the `atexit` functions that were registered after this
    call. Otherwise, a daemon thread in native code could abort or block the interpreter's end.

    CUDA numbers GPUs as nvidia-smi does. SIGTERM ends the process. SIGINT (Ctrl-C) does too, unless
    the parent ignored it (see `ignores_interrupts`).
    """
    os.environ[CUDA_ORDER] = BY_BUS
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # also if it was inherited as ignored
    sys.unraisablehook = _report_unraisable
    code = RUN_FAILED

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(leave)
    try:
        run_cli(app)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise


def _report_unraisable(lost: "sys.UnraisableHookArgs") -> None:
    """Report an exception that no code can catch; a KeyboardInterrupt ends the process at once.

    Python drops an exception that is raised in a finalizer or in a callback of a weak reference.
    Children end with the process: each one has a parent-death signal.
    """
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)


def ignores_interrupts() -> bool:
    """Return whether this process ignores SIGINT, as children of `nohup` and a script's `&` do."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def run_cli(app: Callable[[], object]) -> None:
    """Run a command-line app; print its errors on stderr without a traceback.

    A ContractError or PermissionError gives three lines and exit code 2; a RunError gives one line
    and exit code 1.
    """
    try:
        try:
            app()
        except PermissionError as error:
            found = f"the user {os.geteuid()} may not access it ({error.strerror})"
            do = "Give this user access to it and to the folders above it"
            raise ContractError(str(error.filename), found, do) from error
    except (ContractError, RunError) as error:
        print(describe(error), file=sys.stderr)
        sys.exit(exit_code(error))


def describe(error: BaseException) -> str:
    """Return the text of an error; a ContractError has three lines for each of its `errors`."""
    if not isinstance(error, ContractError):
        return printable(f"error: {error}", lines=True)
    message = "\n".join(f"error: {e.where}\n  found: {e.found}\n  do: {e.do}" for e in error.errors)
    return printable(message, lines=True)


def exit_code(error: BaseException) -> int:
    return BAD_INPUT if isinstance(error, ContractError) else RUN_FAILED


def printable(text: object, *, lines: bool = False, most: int | None = None) -> str:
    r"""Return text with escapes for characters that are not printable: `\x1b`, `\t`, `\u200b`.

    lines: keep newlines. most: largest number of characters; None: no limit.
    """
    text = str(text)
    if most is not None and len(text) > most:
        text = text[:most] + "…"
    return "".join(
        c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode()
        for c in text
    )
