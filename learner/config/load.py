"""From a YAML file to a checked `Config`: extends, retired keys, types. Imports no torch.

    load_mapping   file -> mapping, `extends` merged in
    parse_config   mapping -> Config, or every fault at once
    load_config    both
    dump_resolved  Config -> YAML text that loads to an equal Config

Relative paths inside a file start at the current working directory, except `extends`,
which starts at the file's own folder. Environment variables are not expanded.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from learner.config.moved_keys import IGNORED_KEY, retired_errors
from learner.config.profiles import is_canonical_leaf, leaf_errors
from learner.config.schema import Config
from learner.config.yaml12 import dump_mapping, read_mapping
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.extends import merge_chain, read_chain
from shared_contracts.strict_model import contract_errors


def load_config(path: str | Path) -> Config:
    """The checked config of a YAML file; ContractErrors names every fault in it."""
    return parse_config(load_mapping(path))


def load_mapping(path: str | Path) -> dict[str, Any]:
    """The mapping of a YAML file on top of the files it extends; its values are unchecked."""
    chain, mappings = read_chain(Path(path), read_mapping)
    if is_canonical_leaf(chain[0]) and (errors := list(leaf_errors(mappings[0], chain))):
        raise ContractErrors(errors)
    return merge_chain(mappings)


def parse_config(mapping: dict[str, Any]) -> Config:
    """Check a mapping; every unknown, retired, missing or wrong key at once."""
    errors = list(retired_errors(mapping))
    try:
        config = Config.model_validate(_without_ignored(mapping))
    except ValidationError as error:
        errors += _not_told_yet(contract_errors(error, Config), errors)
        raise ContractErrors(errors) from None
    if errors:
        raise ContractErrors(errors)
    return config


def dump_resolved(config: Config) -> str:
    """YAML text of every key with its effective value."""
    return dump_mapping(config.model_dump())


def _without_ignored(mapping: dict[str, Any]) -> dict[str, Any]:
    """The mapping without the one legacy key that is ignored in silence (RES-13)."""
    section, key = IGNORED_KEY
    if not isinstance(mapping.get(section), dict):
        return mapping
    return {**mapping, section: {k: v for k, v in mapping[section].items() if k != key}}


def _not_told_yet(
    errors: list[ContractError], told: list[ContractError]
) -> Iterator[ContractError]:
    """Errors that are not about a path, a part or a section of a path told already."""
    paths = [error.where for error in told]
    for error in errors:
        if not any(_inside(error.where, path) or _inside(path, error.where) for path in paths):
            yield error


def _inside(path: str, outer: str) -> bool:
    return path == outer or path.startswith((f"{outer}.", f"{outer}["))
