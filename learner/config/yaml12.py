"""YAML in and out with the scalars of YAML 1.2's core schema (`shared_contracts.yaml12`)."""

from pathlib import Path, PurePath
from typing import Any

import yaml

from shared_contracts.errors import ContractError
from shared_contracts.yaml12 import know_core_scalars, use_core_schema


class _Loader(yaml.SafeLoader):
    """Knows the scalars of the core schema and no others."""


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that YAML 1.1 or 1.2 would take for another scalar."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


use_core_schema(_Loader, yaml.constructor.ConstructorError)
know_core_scalars(_Dumper)


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # Outside double quotes PyYAML writes these line ends so that they are read as blanks.
    style = '"' if any(end in text for end in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_multi_representer(PurePath, lambda dumper, path: _represent_text(dumper, str(path)))


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping a YAML file holds; ContractError with file and line for anything else."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ContractError(
            str(path), f"cannot be read ({error.strerror})", "Give the path of a YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise ContractError(str(path), "is not UTF-8 text", "Give a YAML file") from error
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise _bad_yaml(path, error) from error
    if not isinstance(value, dict):
        raise ContractError(
            str(path), "does not hold a mapping", "Start it with sections such as `model:`"
        )
    return value


def _bad_yaml(path: Path, error: yaml.YAMLError) -> ContractError:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if mark is None:
        return ContractError(str(path), f"is not YAML ({error})", "Correct the file")
    assert isinstance(error, yaml.MarkedYAMLError)
    where = f"{path}:{mark.line + 1}:{mark.column + 1}"
    return ContractError(where, error.problem or "is not YAML", "Correct this line")


def dump_mapping(mapping: dict[str, Any]) -> str:
    """YAML text that `read_mapping` reads back equal (paths become strings)."""
    text: str = yaml.dump(mapping, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text
