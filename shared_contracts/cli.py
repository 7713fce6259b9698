"""What both commands share: their version, their help, what they print, and how they end."""

import atexit
import os
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from shared_contracts.errors import ContractError, RunError
from shared_contracts.machine import BY_BUS, CUDA_ORDER

DISTRIBUTION = "rollmatch"
BAD_INPUT = 2
RUN_FAILED = 1
# For typer: `-h` wherever `--help` is.
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


def print_version(wanted: bool) -> None:
    """Callback of `--version`: print that of the installed distribution, and end."""
    if wanted:
        print(DISTRIBUTION, version(DISTRIBUTION))
        sys.exit()


def without_flag_types(command: Any, parent: Any = None) -> Any:
    """The same command of typer; its help, and that of all below it, shows no type for a flag.

    Typer prints `<bool>` there, as if a flag took a value.
    """
    context = command.context_class(command, parent=parent, **command.context_settings)
    for parameter in command.get_params(context):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for below in getattr(command, "commands", {}).values():
        without_flag_types(below, context)
    return command


def run_program(app: Callable[[], object]) -> None:
    """Run a command-line app as the whole of this process (see `run_cli`).

    The process ends as soon as everything registered with `atexit` after this call has run. A
    daemon thread that still computes would otherwise abort or block the end of the interpreter:
    it needs the interpreter's lock, and native code cannot lose its thread.

    CUDA counts GPUs as nvidia-smi and the driver's folder do. SIGTERM ends the process. SIGINT
    (Ctrl-C) does too, unless the process inherited it as ignored (see `ignores_interrupts`).
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
    """Whether this process ignores SIGINT, as `nohup` and a script's `&` make a child do."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def run_cli(app: Callable[[], object]) -> None:
    """Run a command-line app; these errors are printed without a traceback.

    A ContractError is three lines on stderr and exit code 2, and so is a file that this user may
    not access. A RunError is one line and exit code 1.
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
    """The text of an error, or of each of several: three lines of a ContractError."""
    if not isinstance(error, ContractError):
        return printable(f"error: {error}", lines=True)
    message = "\n".join(f"error: {e.where}\n  found: {e.found}\n  do: {e.do}" for e in error.errors)
    return printable(message, lines=True)


def exit_code(error: BaseException) -> int:
    """What a process that cannot go on because of `error` ends with."""
    return BAD_INPUT if isinstance(error, ContractError) else RUN_FAILED


def printable(text: object, *, lines: bool = False, most: int | None = None) -> str:
    r"""What would steer the terminal or is not seen, as Python writes it: `\x1b`, `\t`, `\u200b`.

    lines: ends of lines stay. most: so many characters of the text are shown; None: all.
    """
    text = str(text)
    if most is not None and len(text) > most:
        text = text[:most] + "…"
    return "".join(
        c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode()
        for c in text
    )
