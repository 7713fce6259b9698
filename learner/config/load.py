"""From a YAML file to a checked `Config`: extends, retired keys, types. Imports no torch.

    read_written   file -> mapping, `extends` merged in, and where each key is written
    load_mapping   file -> that mapping alone
    parse_config   mapping -> Config, or every fault at once
    load_config    all of it: each fault is told with its file and line
    dump_resolved  Config -> YAML text that loads to an equal Config

Relative paths inside a file start at the current working directory, except `extends`,
which starts at the file's own folder. Environment variables are not expanded.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from learner.config.moved_keys import IGNORED_KEY, retired_errors
from learner.config.origins import Origins, find_origins, located
from learner.config.profiles import is_canonical_leaf, leaf_errors
from learner.config.schema import Config
from learner.config.yaml12 import Steps, dump_mapping, read_document
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.extends import merge_chain, read_chain
from shared_contracts.strict_model import contract_errors


class Written(NamedTuple):
    """A training YAML on top of the files it extends; the values are unchecked.

    faults: of a canonical profile (CFG-04).
    """

    mapping: dict[str, Any]
    origins: Origins
    faults: list[ContractError]


def load_config(path: str | Path) -> Config:
    """The checked config of a YAML file; ContractErrors names every fault in it."""
    return check_written(read_written(path))


def check_written(written: Written) -> Config:
    """The checked config; ContractErrors names every fault and the line it is written in."""
    try:
        return _checked(written.mapping, written.faults)
    except ContractErrors as error:
        raise ContractErrors([located(e, written.origins) for e in error.errors]) from None


def load_mapping(path: str | Path) -> dict[str, Any]:
    """The mapping of a YAML file on top of the files it extends; its values are unchecked."""
    written = read_written(path)
    if written.faults:
        raise ContractErrors(written.faults)
    return written.mapping


def read_written(path: str | Path) -> Written:
    """Read a YAML file and the files it extends; ContractError for what is no YAML."""
    lines: list[dict[Steps, int]] = []

    def read(file: Path) -> dict[str, Any]:
        document = read_document(file)
        lines.append(document.lines)
        return document.mapping

    chain, mappings = read_chain(Path(path), read)
    faults = list(leaf_errors(mappings[0], chain)) if is_canonical_leaf(chain[0]) else []
    merged = merge_chain(mappings)
    return Written(merged, find_origins(merged, list(zip(chain, lines, strict=True))), faults)


def parse_config(mapping: dict[str, Any]) -> Config:
    """Check a mapping; every unknown, retired, missing or wrong key at once."""
    return _checked(mapping, [])


def _checked(mapping: dict[str, Any], faults: list[ContractError]) -> Config:
    """The config of a mapping of which these faults are known already."""
    errors = [*faults, *retired_errors(mapping)]
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
