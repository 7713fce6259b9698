"""How SIGTERM and SIGINT end a program: `run_program`, `learner launch` and the server's loop."""

import signal
import subprocess
import sys

import pytest

APP = """
import os, signal
from shared_contracts.cli import run_program

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def app():
    try:
        ACTION
        print("goes on")
    except KeyboardInterrupt:
        print("interrupted")

run_program(app)
"""
LAUNCH = """
import signal
from learner.operate.launch import StopRequested, StopSignals

signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as `run_program` does
for number in (signal.SIGINT, signal.SIGTERM):
    signals = StopSignals()
    try:
        signal.raise_signal(number)
        signals.pause(0)
    except StopRequested as stop:
        print(stop)
"""
SERVER = """
import signal, uvicorn
from rollout_server.serve import DrainingServer
from shared_contracts.cli import ignores_interrupts

# uvicorn restores these handlers and raises the signal again.
signal.signal(signal.SIGTERM, lambda *_: None)
if not ignores_interrupts():
    signal.signal(signal.SIGINT, lambda *_: None)
for number in (signal.SIGINT, signal.SIGTERM):
    server = DrainingServer(uvicorn.Config("none"), None, 0.0)
    with server.capture_signals():
        signal.raise_signal(number)
    if server.should_exit:
        print(number.name)
"""
# Before Python starts: what a shell does to `program &` and `nohup program`.
IGNORE = "trap '' INT TERM HUP; "
OBEY = "trap - INT TERM HUP; "


def run(dispositions: str, program: str) -> tuple[int, str]:
    """Exit code (minus the signal that ended the process) and output of a Python program.

    The first process sets all three signals to their default: this one may ignore SIGINT itself.
    """
    start = "import os, signal, sys; [signal.signal(n, signal.SIG_DFL) for n in (1, 2, 15)]; "
    shell = ["sh", "-c", f'{dispositions} exec "$@"', "sh", sys.executable, "-c", program]
    command = [sys.executable, "-c", f"{start} os.execvp('sh', sys.argv[1:])", *shell]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return done.returncode, done.stdout.strip()


@pytest.mark.req("SRV-05")
@pytest.mark.parametrize(
    ("dispositions", "action", "ended"),
    [
        (OBEY, "signal.raise_signal(signal.SIGINT)", (0, "interrupted")),
        (IGNORE, "signal.raise_signal(signal.SIGINT)", (0, "goes on")),
        (IGNORE, "signal.raise_signal(signal.SIGTERM)", (-signal.SIGTERM, "")),
        # Python drops this KeyboardInterrupt, so no `except` sees it.
        (OBEY, "Finalized()", (-signal.SIGINT, "")),
        (IGNORE, "Finalized()", (0, "goes on")),
    ],
)
def test_sigterm_ends_a_program_and_sigint_unless_ignored(
    dispositions: str, action: str, ended: tuple[int, str]
) -> None:
    assert run(dispositions, APP.replace("ACTION", action)) == ended


@pytest.mark.req("DEP-02", "SRV-05")
@pytest.mark.parametrize("program", [LAUNCH, SERVER], ids=["launch", "server"])
@pytest.mark.parametrize(
    ("dispositions", "stopping"), [(OBEY, "SIGINT\nSIGTERM"), (IGNORE, "SIGTERM")]
)
def test_launch_and_server_obey_one_rule(program: str, dispositions: str, stopping: str) -> None:
    assert run(dispositions, program) == (0, stopping)
