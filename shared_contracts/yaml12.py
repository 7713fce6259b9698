"""The scalars and mappings of YAML 1.2's core schema, as rules for a loader of PyYAML.

Plain PyYAML follows YAML 1.1, where `eval_strategy: no` is false, `1e-4` a string, `010`
eight and `12:30` seven hundred and fifty. Here they are `"no"`, 0.0001, 10 and `"12:30"`.
Duplicate keys, keys that are not strings and mappings that contain themselves are errors, and
so are other tags, integers longer than any key takes, and halves of characters, as JSON escapes
them, that no file can be written with.

The learner and the rollout server read the same files, each with a loader of its own: this
package imports no YAML.
"""

import re
from collections.abc import Callable
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

# Python writes no integer of more than 4,300 digits, and 1,000 in base 16 are 1,204.
_MOST_DIGITS = 1000
_SHOWN = 40
_HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")


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

    def scalar(name: str, pattern: str, build: Callable[[str], Any]) -> None:
        known = re.compile(pattern)

        def construct(loading: Any, node: Any) -> Any:
            text = loading.construct_scalar(node)
            if not known.fullmatch(text):  # only a tag makes it one
                found = f"'{text[:_SHOWN]}' is not of the type {name}"
                raise refused(None, None, found, node.start_mark)
            if name == "int" and len(text) > _MOST_DIGITS:
                found = f"an integer of {len(text)} digits, longer than any key takes"
                raise refused(None, None, found, node.start_mark)
            return build(text)

        loader.add_constructor(f"tag:yaml.org,2002:{name}", construct)

    def construct_text(loading: Any, node: Any) -> Any:
        text = loading.construct_scalar(node)
        if half := _HALF_A_CHARACTER.search(text):
            found = f"\\u{ord(half[0]):x} is half a character: write the character itself"
            raise refused(None, None, found, node.start_mark)
        return text

    loader.yaml_implicit_resolvers = {}
    loader.yaml_constructors = {None: loader.yaml_constructors[None]}  # refuses other tags
    know_core_scalars(loader)
    for name, pattern, _ in _SCALARS:
        scalar(name, pattern, _BUILD[name])
    loader.add_constructor("tag:yaml.org,2002:str", construct_text)
    loader.add_constructor("tag:yaml.org,2002:seq", _construct_list)
    loader.add_constructor("tag:yaml.org,2002:map", construct_dict)


def _int(text: str) -> int:
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _float(text: str) -> float:
    return float(text.replace(".", "") if text[-1] in "fFnN" else text)  # .inf and .nan


_BUILD: dict[str, Callable[[str], Any]] = {
    "null": lambda _: None,
    "bool": lambda text: text.lower() == "true",
    "int": _int,
    "float": _float,
}


def _construct_list(loading: Any, node: Any) -> list[Any]:
    items: list[Any] = loading.construct_sequence(node, deep=True)
    return items
