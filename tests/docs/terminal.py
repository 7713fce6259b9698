"""A shell that commands are typed into one by one, as a reader would."""

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.contract.running_server import children, wait_until_gone

END_S = 40.0


@dataclass(frozen=True)
class Done:
    """How a command ended. Of a command in the background: how it was started."""

    code: int
    out: str
    err: str

    @property
    def shown(self) -> str:
        """All that a terminal shows."""
        return self.out + self.err


class Terminal:
    """One bash in `folder`; closing it ends whatever it has started.

    logs: a folder for what is typed and printed.
    """

    def __init__(self, folder: Path, logs: Path, environment: dict[str, str]) -> None:
        logs.mkdir(parents=True)
        self._logs = logs
        self._typed = 0
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, text: str) -> Done:
        """Type a command and wait for its end, which pytest's timeout bounds."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._typed += 1
        script, out, err = (self._logs / f"{self._typed}.{kind}" for kind in ("sh", "out", "err"))
        script.write_text(text + "\n")
        self._bash.stdin.write(f"source {script} </dev/null >{out} 2>{err}; echo $?\n")
        self._bash.stdin.flush()
        code = self._bash.stdout.readline()
        assert code, f"the shell ended: {text}"
        return Done(int(code), out.read_text(errors="replace"), err.read_text(errors="replace"))

    def printed(self) -> str:
        """What the last command has printed so far, in the background too."""
        return "".join(
            (self._logs / f"{self._typed}.{kind}").read_text(errors="replace")
            for kind in ("out", "err")
        )

    def below(self) -> list[int]:
        """Pids of what it has started and still runs."""
        return children(self._bash.pid)

    def close(self) -> None:
        below = self.below()
        for pid in below:
            _signal(pid, signal.SIGTERM)
        for pid in wait_until_gone(below, END_S):
            _signal(pid, signal.SIGKILL)
        self._bash.kill()
        self._bash.communicate()


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
