"""A command in a terminal of its own: what it draws there, frame by frame."""

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HOME, OTHER_SCREEN, USUAL_SCREEN = "\x1b[H", "\x1b[?1049h", "\x1b[?1049l"
SHOW_CURSOR = "\x1b[?25h"
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_WAIT_S = 60.0
_LONG = 2048


class Terminal:
    """The other end of a command's terminal."""

    def __init__(self, pid: int, end: int) -> None:
        self._pid = pid
        self._end = end
        self.output = ""
        # Ctrl-C empties the terminal's queue, perhaps in the middle of a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.status: int | None = None  # of waitpid, once it has ended

    def resize(self, width: int, height: int) -> None:
        """The kernel tells the command with SIGWINCH."""
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._pid, number)

    def until(self, seen: Callable[["Terminal"], bool]) -> None:
        """Read on until `seen`, or fail with what there is."""
        deadline = time.monotonic() + _WAIT_S
        while not seen(self):
            assert time.monotonic() < deadline, self.output[-4000:]
            if not self._read():
                assert seen(self), self.output[-4000:]
                return

    def until_it_waits(self) -> None:
        """Read nothing until the command waits for that, in the middle of a long write."""
        queued, before = 0, -1
        deadline = time.monotonic() + _WAIT_S
        while queued < _LONG or queued > before:
            assert time.monotonic() < deadline, queued
            time.sleep(0.05)
            before, queued = queued, self._queued()

    def _queued(self) -> int:
        """Bytes that are not read yet."""
        (count,) = struct.unpack("i", fcntl.ioctl(self._end, termios.FIONREAD, bytes(4)))
        return int(count)

    def exit_code(self) -> int:
        """Read to the end, which comes."""
        self.until(lambda terminal: not terminal._read())
        if self.status is None:
            self.status = os.waitpid(self._pid, 0)[1]
        return os.waitstatus_to_exitcode(self.status)

    @property
    def frames(self) -> list[list[str]]:
        """Whole screens, as lines without styles."""
        screens = self.output.partition(USUAL_SCREEN)[0].split(HOME)[1:]
        return [_STYLE.sub("", screen).split("\r\n") for screen in screens if screen.strip()]

    @property
    def last(self) -> str:
        """The newest screen that is whole, as another one has begun; or the only one."""
        frames = self.frames
        return "\n".join(frames[-1]) if frames else ""

    def _read(self) -> bool:
        """False once the command has ended."""
        ready, _, _ = select.select([self._end], [], [], 0.2)
        if not ready:
            return True
        try:
            new = os.read(self._end, 2**16)
        except OSError:  # Linux: nobody has the other end any more
            return False
        self.output += self._decoder.decode(new)
        return bool(new)


@contextmanager
def watching(
    folder: Path, size: tuple[int, int], *options: str, **environment: str
) -> Iterator[Terminal]:
    """`learner watch` in a terminal of (width, height); ended with the block.

    environment: variables beside those of the tests.
    """
    program = "from learner.cli import main; main()"
    command = [sys.executable, "-c", program, "watch", str(folder), *options]
    own = {"TERM": "xterm-256color", "LANG": "C.UTF-8", "COLUMNS": "33", **environment}
    pid, end = pty.fork()
    if pid == 0:
        time.sleep(0.05)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
        os.execve(sys.executable, command, {**os.environ, **own})
    terminal = Terminal(pid, end)
    terminal.resize(*size)
    try:
        yield terminal
    finally:
        if terminal.status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(end)
