"""Reads what is new in a log of JSON lines: by offset, so that a long log costs nothing."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

# Read of a log at once, and of one that is there already where its end is enough.
PIECE = 8 * 2**20
_COMPARED = 512


@dataclass(frozen=True)
class New:
    """What a look at a log found.

    anew: the log is another one than before, or was cut back: `lines` are all there is.
    unreadable: lines that are no JSON objects. more: there are lines still to be read.
    """

    lines: list[dict[str, Any]]
    anew: bool = False
    unreadable: int = 0
    more: bool = False


class Tail:
    """Follows one log, which may grow, be cut back, vanish and come again.

    whole: of one that is there already everything is read, not its end alone.
    """

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        self._path = path
        self._whole = whole
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
                    return self._lines(self._piece(file, size), size, anew=False)
                self._inode = inode
                self._offset = 0 if self._whole else max(0, size - PIECE)
                self._before = b""
                file.seek(self._offset)
                return self._lines(self._from_a_line(self._piece(file, size)), size, anew=True)
        except FileNotFoundError:
            gone = self._inode != -1
            self._inode, self._offset, self._before = -1, 0, b""
            return New([], anew=gone)

    def _piece(self, file: BinaryIO, size: int) -> bytes:
        """From the offset on, with the end of a line in it if there is one."""
        data = b""
        while len(data) < size - self._offset and b"\n" not in data:
            more = file.read(min(PIECE, size - self._offset - len(data)))
            if not more:  # it is being cut back
                break
            data += more
        return data

    def _from_a_line(self, data: bytes) -> bytes:
        """Without the rest of the line that the first read began within."""
        if self._offset == 0:
            return data
        rest = data.find(b"\n") + 1
        self._offset += rest
        return data[rest:]

    def _lines(self, data: bytes, size: int, anew: bool) -> New:
        end = self._offset + len(data)
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._before = (self._before + whole)[-_COMPARED:]
        parsed = [_object(line) for line in whole.splitlines()]
        lines = [line for line in parsed if line is not None]
        more = bool(whole) and end < size
        return New(lines, anew, unreadable=len(parsed) - len(lines), more=more)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
