"""Lines of a JSONL file, and the JSON object of each.

Only a newline ends a line; a carriage return before it and a byte-order mark at the start of
the file, which programs on Windows write, are taken as nothing. A line must be one object of
strict JSON: `NaN` and `Infinity` are refused, and so is a key given twice, of which Python
would keep the last one in silence.
"""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from shared_contracts.errors import ContractError

_ONE_OBJECT = "Write one JSON object a line."
_SHOWN = 80
EMPTY_LINE, REPEATED_KEY = "empty line", "repeated key"


class BadLine(Exception):
    """A line that is no JSON object; the parts are those of a `Finding`."""

    def __init__(self, kind: str, found: str, do: str) -> None:
        super().__init__(kind, found, do)
        self.kind = kind
        self.found = found
        self.do = do


def raw_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, without their ends.

    Raises ContractError for a file that is not there, cannot be read or is empty.
    """
    if not path.is_file():
        found = "this is not a file" if path.exists() else "there is no such file"
        raise ContractError(str(path), found, "Name a JSONL file with one sample a line.")
    empty = True
    try:
        with path.open("rb") as file:
            for raw in file:
                line = raw.removeprefix(codecs.BOM_UTF8) if empty else raw
                empty = False
                yield line.removesuffix(b"\n").removesuffix(b"\r")
    except OSError as error:
        raise ContractError(
            str(path), f"it cannot be read ({error.strerror})", "Make it readable."
        ) from error
    if empty:
        raise ContractError(str(path), "the file has no samples", _ONE_OBJECT)


def parse_line(raw: bytes) -> dict[str, Any]:
    """The object of one line; raises `BadLine`."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {error.start + 1} of the line is not UTF-8"
        raise BadLine("not UTF-8", found, "Save the file as UTF-8.") from error
    if not text.strip():
        raise BadLine(EMPTY_LINE, "the line is empty", "Remove it.")
    record = strict_json(text)
    if not isinstance(record, dict):
        raise BadLine("not a JSON object", f"found {brief(record)}", _ONE_OBJECT)
    return record


def strict_json(text: str) -> Any:
    """The value of a text of strict JSON; raises `BadLine`."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        detail = f"{error.msg} at character {error.pos + 1}"
    except RecursionError:
        detail = "nested too deeply"
    except ValueError:  # more digits than Python turns into an int
        detail = "a number is too long"
    start = "".join(c if c.isprintable() else "?" for c in text[:_SHOWN])
    raise BadLine("not JSON", f"not JSON ({detail}): {start}", _ONE_OBJECT)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadLine(
            REPEATED_KEY,
            f"the key {brief(twice)} is given {keys.count(twice)} times in one object",
            "Keep one of them.",
        )
    return record


def _refuse(constant: str) -> NoReturn:
    raise BadLine(
        "not JSON", f"not JSON ({constant} is no number there)", "Write a number, or null."
    )


def brief(value: Any) -> str:
    """A value as JSON, at most 80 characters of it."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "a value nested too deeply"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
