"""YAML files read with the scalars of YAML 1.2's core schema, by PyYAML.

read_document   file -> mapping, and the line of every key

Plain PyYAML follows YAML 1.1, where `eval_strategy: no` is false, `1e-4` a string, `010`
eight and `12:30` seven hundred and fifty. Here they are `"no"`, 0.0001, 10 and `"12:30"`.
Duplicate keys, keys that are not strings and mappings that contain themselves are errors, and
so are other tags, integers longer than any key takes, and halves of characters, as JSON escapes
them, that no file can be written with.

The learner and the rollout server read the same files. This package imports no YAML: they pass
the module `yaml`.
"""

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shared_contracts.errors import ContractError

# From the root of a document to a value in it: keys and list indices.
Steps = tuple[str | int, ...]

# What pydantic and PyYAML can write again without running out of stack.
_MOST_LEVELS = 100

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


class Document(NamedTuple):
    """lines: of every key and list item, counted from 1."""

    mapping: dict[str, Any]
    lines: dict[Steps, int]


def read_document(path: Path, yaml: Any) -> Document:
    """Read the mapping of a file with the module `yaml`.

    Raises:
        ContractError: with file, line and column, for anything else than one mapping.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ContractError(
            str(path), f"cannot be read ({error.strerror})", "Give the path of a YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise ContractError(str(path), "is not UTF-8 text", "Give a YAML file") from error
    try:
        loader = core_loader(yaml)(text)
        root = loader.get_single_node()
        value = None if root is None else loader.construct_document(root)
        lines = dict(_lines(root))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        if mark is None:
            raise ContractError(str(path), f"is not YAML ({error})", "Correct the file") from error
        where = f"{path}:{mark.line + 1}:{mark.column + 1}"
        found = getattr(error, "problem", None) or "is not YAML"
        raise ContractError(where, found, "Correct this line") from error
    except (ValueError, OverflowError) as error:  # PyYAML's, of an escape beyond Unicode
        raise ContractError(str(path), f"is not YAML ({error})", "Correct the file") from error
    except RecursionError:
        raise _too_deep(path) from None
    if not isinstance(value, dict):
        raise ContractError(
            str(path), "does not hold a mapping", "Start it with sections such as `model:`"
        )
    if any(len(steps) > _MOST_LEVELS for steps in lines):
        raise _too_deep(path)
    return Document(value, lines)


def children(node: Any) -> Iterator[tuple[str | int, int, Any]]:
    """Key or index, line and node of what is directly below a node of PyYAML, if anything."""
    kind = getattr(node, "id", None)
    if kind == "mapping":
        for key, value in node.value:
            yield key.value, key.start_mark.line + 1, value
    elif kind == "sequence":
        for index, item in enumerate(node.value):
            yield index, item.start_mark.line + 1, item


def _lines(node: Any, at: Steps = ()) -> Iterator[tuple[Steps, int]]:
    for step, line, child in children(node):
        yield (*at, step), line
        yield from _lines(child, (*at, step))


def _too_deep(path: Path) -> ContractError:
    return ContractError(
        str(path), "is nested too deep", f"Write it with at most {_MOST_LEVELS} levels"
    )


def know_core_scalars(handler: Any) -> None:
    """Have a loader or dumper class tell these plain scalars from text."""
    for name, pattern, first in _SCALARS:
        handler.add_implicit_resolver(
            f"tag:yaml.org,2002:{name}", re.compile(f"^(?:{pattern})$"), first
        )


@functools.cache
def core_loader(yaml: Any) -> Any:
    """A subclass of PyYAML's SafeLoader that follows the core schema alone."""
    refused = yaml.constructor.ConstructorError  # takes the mark of the node

    class CoreLoader(yaml.SafeLoader):  # type: ignore[misc]
        """Knows the scalars of the core schema and no others."""

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

        CoreLoader.add_constructor(f"tag:yaml.org,2002:{name}", construct)

    def construct_text(loading: Any, node: Any) -> Any:
        text = loading.construct_scalar(node)
        if half := _HALF_A_CHARACTER.search(text):
            found = f"\\u{ord(half[0]):x} is half a character: write the character itself"
            raise refused(None, None, found, node.start_mark)
        return text

    CoreLoader.yaml_implicit_resolvers = {}
    CoreLoader.yaml_constructors = {None: CoreLoader.yaml_constructors[None]}  # refuses other tags
    know_core_scalars(CoreLoader)
    for name, pattern, _ in _SCALARS:
        scalar(name, pattern, _BUILD[name])
    CoreLoader.add_constructor("tag:yaml.org,2002:str", construct_text)
    CoreLoader.add_constructor(
        "tag:yaml.org,2002:seq", lambda loading, node: loading.construct_sequence(node, deep=True)
    )
    CoreLoader.add_constructor("tag:yaml.org,2002:map", construct_dict)
    return CoreLoader


_BUILD: dict[str, Callable[[str], Any]] = {
    "null": lambda _: None,
    "bool": lambda text: text.lower() == "true",
    "int": lambda text: int(text, 0) if text[:2] in ("0o", "0x") else int(text),
    # .inf and .nan are written with a dot.
    "float": lambda text: float(text.replace(".", "") if text[-1] in "fFnN" else text),
}
