"""YAML in and out with the scalars of YAML 1.2's core schema.

Plain PyYAML follows YAML 1.1, where `eval_strategy: no` is false, `1e-4` a string, `010`
eight and `12:30` seven hundred and fifty. Here they are `"no"`, 0.0001, 10 and `"12:30"`.
Duplicate keys, keys that are not strings and mappings that contain themselves are errors.
"""

import re
from pathlib import Path, PurePath
from typing import Any

import yaml

from shared_contracts.errors import ContractError

_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
)


class _Loader(yaml.SafeLoader):
    """Knows the scalars above and no others."""


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that YAML 1.1 or 1.2 would take for another scalar."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), _first
        )


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _construct_list(loader: _Loader, node: yaml.SequenceNode) -> list[Any]:
    return loader.construct_sequence(node, deep=True)


def _construct_dict(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} is not a string", key_node.start_mark
            )
        if key in mapping:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key '{key}' is written twice", key_node.start_mark
            )
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # Outside double quotes PyYAML writes these line ends so that they are read as blanks.
    style = '"' if any(end in text for end in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:seq", _construct_list)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_dict)
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
