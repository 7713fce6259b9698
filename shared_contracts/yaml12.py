"""The scalars and mappings of YAML 1.2's core schema, as rules for a loader of PyYAML.

Plain PyYAML follows YAML 1.1, where `eval_strategy: no` is false, `1e-4` a string, `010`
eight and `12:30` seven hundred and fifty. Here they are `"no"`, 0.0001, 10 and `"12:30"`.
Duplicate keys, keys that are not strings and mappings that contain themselves are errors.

The learner and the rollout server read the same files, each with a loader of its own: this
package imports no YAML.
"""

import re
from typing import Any

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


def know_core_scalars(handler: Any) -> None:
    """Have a loader or dumper class tell these plain scalars from text."""
    for name, pattern, first in _SCALARS:
        handler.add_implicit_resolver(
            f"tag:yaml.org,2002:{name}", re.compile(f"^(?:{pattern})$"), first
        )


def use_core_schema(loader: Any, refused: type[Exception]) -> None:
    """Make `loader`, a fresh subclass of PyYAML's SafeLoader, follow this module alone.

    refused: PyYAML's ConstructorError, raised for a bad key with the key's mark.
    """

    def construct_dict(loading: Any, node: Any) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = loading.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise refused(None, None, f"the key {key!r} is not a string", key_node.start_mark)
            if key in mapping:
                raise refused(None, None, f"the key '{key}' is written twice", key_node.start_mark)
            mapping[key] = loading.construct_object(value_node, deep=True)
        return mapping

    loader.yaml_implicit_resolvers = {}
    know_core_scalars(loader)
    loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
    loader.add_constructor("tag:yaml.org,2002:seq", _construct_list)
    loader.add_constructor("tag:yaml.org,2002:map", construct_dict)


def _construct_int(loading: Any, node: Any) -> int:
    text = loading.construct_scalar(node)
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _construct_list(loading: Any, node: Any) -> list[Any]:
    items: list[Any] = loading.construct_sequence(node, deep=True)
    return items
