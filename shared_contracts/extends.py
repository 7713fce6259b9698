"""Paths and `extends: FILE` in a training YAML, for learner and server (CFG-04).

Mappings merge key by key; other values are replaced. FILE is relative to the extending file.
Callers pass the function that reads a file.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shared_contracts.errors import ContractError
from shared_contracts.strict_model import Refusal, shown


def read_chain(
    path: Path, read: Callable[[Path], dict[str, Any]]
) -> tuple[list[Path], list[dict[str, Any]]]:
    """Return the file and the files that it extends, in this order, and their raw mappings.

    Raises:
        ContractError: `extends` is no file, or the chain is a circle; and the errors of `read`.
    """
    chain, mappings = [path], [read(path)]
    while "extends" in mappings[-1]:
        parent = _extended(chain[-1], mappings[-1]["extends"])
        if not os.path.isfile(parent):  # False without permission
            found = f"there is no file {parent}"
            raise ContractError(f"{chain[-1]}: extends", found, "Correct the path")
        if parent.resolve() in [known.resolve() for known in chain]:
            found = f"the chain is a circle: {' -> '.join(map(str, [*chain, parent]))}"
            raise ContractError(f"{chain[-1]}: extends", found, "Break the circle")
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


def _extended(path: Path, extends: Any) -> Path:
    try:
        return path.parent / written_path(extends)
    except Refusal as refusal:
        raise ContractError(f"{path}: extends", refusal.found, refusal.do) from None


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
