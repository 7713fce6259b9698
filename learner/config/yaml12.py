"""YAML in and out with the scalars of YAML 1.2's core schema (`shared_contracts.yaml12`).

read_mapping   file -> mapping
read_document  file -> mapping, and the line of every key
dump_mapping   mapping -> text that `read_mapping` reads back equal
dump_annotated the same, with a comment beside each value
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import yaml

from shared_contracts.errors import ContractError
from shared_contracts.yaml12 import know_core_scalars, use_core_schema

# From the root of a document to a value in it: keys and list indices.
Steps = tuple[str | int, ...]

# What pydantic and PyYAML can write again without running out of stack.
_MOST_LEVELS = 100
_WIDTH = 88
_COMMENT_COLUMN = 60


class Document(NamedTuple):
    """lines: of every key and list item, counted from 1."""

    mapping: dict[str, Any]
    lines: dict[Steps, int]


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


class _ReadableDumper(_Dumper):
    """Lists of scalars in one line, long text folded, text of several lines as a block."""


def _represent_items(dumper: _Dumper, items: list[Any] | tuple[Any, ...]) -> yaml.SequenceNode:
    nested = any(isinstance(item, dict | list | tuple) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=not nested)


def _represent_prose(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    if _PROSE.fullmatch(text) and ("\n" in text or len(text) > _COMMENT_COLUMN):
        style = "|" if "\n" in text else ">"
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)
    return _represent_text(dumper, text)


# Lines of words: what a block scalar holds without any indicator of its own.
_PROSE = re.compile(r"\S+( \S+)*(\n+\S+( \S+)*)*")

_ReadableDumper.add_representer(list, _represent_items)
_ReadableDumper.add_representer(tuple, _represent_items)
_ReadableDumper.add_representer(str, _represent_prose)


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping a YAML file holds; ContractError with file and line for anything else."""
    return read_document(path).mapping


def read_document(path: Path) -> Document:
    """The mapping a YAML file holds and the lines of its keys; raises as `read_mapping`."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ContractError(
            str(path), f"cannot be read ({error.strerror})", "Give the path of a YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise ContractError(str(path), "is not UTF-8 text", "Give a YAML file") from error
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        value = None if root is None else loader.construct_document(root)
        lines = dict(_lines(root))
    except yaml.YAMLError as error:
        raise _bad_yaml(path, error) from error
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


def _children(node: yaml.Node | None) -> Iterator[tuple[str | int, int, yaml.Node]]:
    """Key or index, line and node of what is directly below a node."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key.value, key.start_mark.line + 1, value
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield index, item.start_mark.line + 1, item


def _lines(node: yaml.Node | None, at: Steps = ()) -> Iterator[tuple[Steps, int]]:
    for step, line, child in _children(node):
        yield (*at, step), line
        yield from _lines(child, (*at, step))


def _bad_yaml(path: Path, error: yaml.YAMLError) -> ContractError:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if mark is None:
        return ContractError(str(path), f"is not YAML ({error})", "Correct the file")
    assert isinstance(error, yaml.MarkedYAMLError)
    where = f"{path}:{mark.line + 1}:{mark.column + 1}"
    return ContractError(where, error.problem or "is not YAML", "Correct this line")


def _too_deep(path: Path) -> ContractError:
    return ContractError(
        str(path), "is nested too deep", f"Write it with at most {_MOST_LEVELS} levels"
    )


def dump_mapping(mapping: dict[str, Any]) -> str:
    """YAML text that `read_mapping` reads back equal (paths become strings)."""
    text: str = yaml.dump(mapping, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def dump_annotated(mapping: dict[str, Any], note: Callable[[Steps], str]) -> str:
    """YAML text with the comment `note(steps)` beside each value, in one column."""
    text = yaml.dump(
        mapping, Dumper=_ReadableDumper, sort_keys=False, allow_unicode=True, width=_WIDTH
    )
    lines = text.split("\n")
    root = yaml.compose(text, _Loader)
    assert root is not None
    notes = {line: note(steps) for steps, line in _ends(root)}
    short = [len(lines[line]) for line in notes if len(lines[line]) < _COMMENT_COLUMN]
    column = max(short, default=0) + 2
    for line, comment in notes.items():
        lines[line] = f"{lines[line].ljust(column - 2)}  # {comment}"
    return "\n".join(lines)


def _ends(node: yaml.Node, at: Steps = ()) -> Iterator[tuple[Steps, int]]:
    """Every value that stands in lines of its own, and the line, from 0, a comment may end."""
    if isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
        for step, _, child in _children(node):
            yield from _ends(child, (*at, step))
    elif isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
        yield at, node.start_mark.line
    else:
        yield at, node.end_mark.line
