"""Which line of which file decides each value of a training YAML with `extends`.

A path that the merged mapping has is decided by the first file, from the leaf on, that has
it: had a file nearer to the leaf replaced something around it, the path would be gone.
"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from learner.config.yaml12 import Steps
from shared_contracts.errors import ContractError
from shared_contracts.strict_model import joined

# `file:line` of every key and list item: the place that decides, then those it overrides.
Origins = dict[Steps, tuple[str, ...]]

_LAST_STEP = re.compile(r"(\.?[^.\[\]]+|\[\d+\])$")


def find_origins(merged: dict[str, Any], chain: Sequence[tuple[Path, dict[Steps, int]]]) -> Origins:
    """Places of every path of `merged`.

    chain: the files from the leaf to the last base, each with the lines of its keys.
    """
    files = [(_tidy(path), lines) for path, lines in chain]
    return {
        steps: tuple(f"{path}:{lines[steps]}" for path, lines in files if steps in lines)
        for steps in _paths(merged)
    }


def located(error: ContractError, origins: Origins) -> ContractError:
    """The error, saying as well where the key is written, or else the section that lacks it."""
    places = {dotted(steps): places[0] for steps, places in origins.items()}
    path = error.where
    while path and path not in places:
        path = _LAST_STEP.sub("", path)
    if not path:
        return error
    place = places[path] if path == error.where else f"{path}: {places[path]}"
    return ContractError(error.where, f"{error.found} ({place})", error.do)


def dotted(steps: Steps) -> str:
    """`("a", 0, "b")` -> `a[0].b`."""
    path = ""
    for step in steps:
        path = f"{path}[{step}]" if isinstance(step, int) else joined(path, step)
    return path


def _paths(value: Any, at: Steps = ()) -> Iterator[Steps]:
    below: Any = ()
    if isinstance(value, dict):
        below = value.items()
    elif isinstance(value, list):
        below = enumerate(value)
    for step, item in below:
        yield (*at, step)
        yield from _paths(item, (*at, step))


def _tidy(path: Path) -> Path:
    """`prod/../base.yaml` -> `base.yaml`, where no link makes that another file."""
    short = Path(os.path.normpath(path))
    return short if short.exists() and short.samefile(path) else path
