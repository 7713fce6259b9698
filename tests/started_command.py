"""A command in a process of its own, its printed text, and waits for what it does."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

# Matters only to a test that fails.
LIMIT_S = 400.0
# Python handles SIGINT although the tests' own process may ignore it.
LEARNER = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from learner.cli import main; main()",
]


class StartedCommand:
    """A running command in a process group of its own; the end of the block kills it."""

    def __init__(self, command: Sequence[str], log: Path, **environment: str) -> None:
        """log: where it prints to."""
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | environment,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def printed(self) -> str:
        return self._log.read_text()

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Until the condition holds; fails if the command ends before."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, self.printed()
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.05)

    def code(self) -> int:
        """The exit code, once it has ended."""
        return self.process.wait(LIMIT_S)
