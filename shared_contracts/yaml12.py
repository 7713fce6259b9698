"""YAML 1.2 files with one mapping and the line of every key, and `extends: FILE` (CFG-04).

Keys must be unique strings. Dates, merges and defaults of YAML 1.1 are plain strings. This package
imports only pydantic (ARCH-01): callers pass the module `ruamel.yaml`, or a reader.

`extends`: mappings merge key by key; other values are replaced. FILE is relative to the extending
file.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shared_contracts.errors import ContractError
from shared_contracts.strict_model import Refusal, shown

# From the root of a document to a value in it: keys and list indices.
Steps = tuple[str | int, ...]

_MOST_LEVELS = 100  # below the recursion limit of the dumper
_TEXT = "tag:yaml.org,2002:str"
_TEXT_IN_1_2 = tuple(f"tag:yaml.org,2002:{name}" for name in ("timestamp", "merge", "value"))


class Document(NamedTuple):
    """lines: of every key and list item, counted from 1."""

    mapping: dict[str, Any]
    lines: dict[Steps, int]


def read_document(path: Path, yaml: Any) -> Document:
    """Read the mapping of a file with the module `ruamel.yaml`.

    Raises ContractError, with file, line and column, for other content.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        found = f"cannot be read ({error.strerror})"
        raise ContractError(str(path), found, "Give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ContractError(str(path), "is not UTF-8 text", "Give a YAML file") from error
    return parse_document(path, text, yaml)


def parse_document(path: Path, text: str, yaml: Any) -> Document:
    """Parse text as `read_document` does; `path` is for errors."""
    reader = yaml.YAML(typ="safe", pure=True)
    try:
        root = reader.compose(text)
        lines = {} if root is None else dict(_lines(path, root))
        value = None if root is None else reader.constructor.construct_document(root)
    except yaml.error.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}"
        found = error.problem.partition(" with value")[0]  # the two values of a duplicate key
        raise ContractError(where, found, "Correct this line") from error
    except (yaml.error.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise ContractError(str(path), f"is not YAML ({error})", "Correct the file") from error
    if not isinstance(value, dict):
        do = "Start it with sections such as `model:`"
        raise ContractError(str(path), "does not hold a mapping", do)
    return Document(value, lines)


def _lines(path: Path, node: Any, at: Steps = ()) -> Iterator[tuple[Steps, int]]:
    """Yield the line of each key and item below a node; changes tags to those of YAML 1.2."""
    if len(at) > _MOST_LEVELS:
        raise RecursionError(f"more than {_MOST_LEVELS} levels")
    if node.tag in _TEXT_IN_1_2:
        node.tag = _TEXT
    entries: Any = ()
    if node.id == "mapping":
        entries = [(_key(path, key), key, value) for key, value in node.value]
    elif node.id == "sequence":
        entries = [(index, item, item) for index, item in enumerate(node.value)]
    else:
        node.value.encode()  # UnicodeEncodeError for an unpaired surrogate
    for step, place, value in entries:
        yield (*at, step), place.start_mark.line + 1
        yield from _lines(path, value, (*at, step))


def _key(path: Path, node: Any) -> str:
    if node.tag in _TEXT_IN_1_2:
        node.tag = _TEXT
    if node.tag != _TEXT:
        where = f"{path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
        raise ContractError(where, "the key is not a string", "Write it in quotes")
    return str(node.value)


def read_chain(
    path: Path, read: Callable[[Path], dict[str, Any]]
) -> tuple[list[Path], list[dict[str, Any]]]:
    """Return the file and the files that it extends, in this order, and their raw mappings.

    Raises:
        ContractError: `extends` is no file, or the chain is a circle; and the errors of `read`.
    """
    chain, mappings = [path], [read(path)]
    while "extends" in mappings[-1]:
        where = f"{chain[-1]}: extends"
        try:
            parent = chain[-1].parent / written_path(mappings[-1]["extends"])
        except Refusal as refusal:
            raise ContractError(where, refusal.found, refusal.do) from None
        if not os.path.isfile(parent):  # False without permission
            raise ContractError(where, f"there is no file {parent}", "Correct the path")
        if parent.resolve() in [known.resolve() for known in chain]:
            found = f"the chain is a circle: {' -> '.join(map(str, [*chain, parent]))}"
            raise ContractError(where, found, "Break the circle")
        chain.append(parent)
        mappings.append(read(parent))
    return chain, mappings


def merge_chain(mappings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the mappings of a chain, without `extends`; earlier ones override later ones."""
    merged: dict[str, Any] = {}
    for mapping in reversed(mappings):
        merged = merge(merged, {k: v for k, v in mapping.items() if k != "extends"})
    return merged


def merge(mapping: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return a new mapping; nested mappings merge key by key, other values are replaced."""
    merged = dict(mapping)
    for key, value in overrides.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            value = merge(below, value)
        merged[key] = value
    return merged


_VARIABLE = re.compile(r"\$\{\w*\}?|(?:^|/)\$\w")


def written_path(value: Any) -> Path:
    """Return a path from a file; expands a leading `~` or `~user`, keeps relative paths.

    Raises Refusal for other values and for variables such as `${VAR}`.
    """
    if not isinstance(value, str | Path) or not str(value).strip():
        raise Refusal(f"{shown(value)} is not a path", "Give the path of a file or folder")
    if variable := _VARIABLE.search(str(value)):
        found = f"{shown(str(value))} has {variable[0].strip('/')}, and variables are not expanded"
        raise Refusal(found, "Write the path out; ~ is the home folder")
    return Path(os.path.expanduser(value))  # an unknown user stays as it is
