"""Reads what is new in a log of JSON lines: by offset, so that a long log costs nothing."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read of a log that is there already; what is shown is of the last steps.
FIRST_READ = 8 * 2**20
_COMPARED = 512


@dataclass(frozen=True)
class New:
    """What a look at a log found.

    anew: the log is another one than before, or was cut back: `lines` are all there is.
    unreadable: lines that are no JSON objects.
    """

    lines: list[dict[str, Any]]
    anew: bool = False
    unreadable: int = 0


class Tail:
    """Follows one log, which may grow, be cut back, vanish and come again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = -1
        self._offset = 0
        self._before = b""  # the last bytes before the offset: others there are another log

    def read(self) -> New:
        """Whole lines since the last call; one that is being written is left for the next."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                inode = self._path.stat().st_ino
                file.seek(max(0, self._offset - len(self._before)))
                same = inode == self._inode and size >= self._offset
                if same and file.read(len(self._before)) == self._before:
                    return self._lines(file.read(size - self._offset), anew=False)
                self._inode, self._offset = inode, max(0, size - FIRST_READ)
                self._before = b""
                file.seek(self._offset)
                return self._lines(self._from_a_line(file.read(size - self._offset)), anew=True)
        except FileNotFoundError:
            gone = self._inode != -1
            self._inode, self._offset, self._before = -1, 0, b""
            return New([], anew=gone)

    def _from_a_line(self, data: bytes) -> bytes:
        """Without the rest of the line that the first read began within."""
        if self._offset == 0:
            return data
        rest = data.find(b"\n") + 1
        self._offset += rest
        return data[rest:]

    def _lines(self, data: bytes, anew: bool) -> New:
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._before = (self._before + whole)[-_COMPARED:]
        parsed = [_object(line) for line in whole.splitlines()]
        lines = [line for line in parsed if line is not None]
        return New(lines, anew, unreadable=len(parsed) - len(lines))


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
