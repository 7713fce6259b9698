"""YAML in and out (`shared_contracts.yaml12` has the rules and the reader).

read_mapping   file -> mapping
read_document  file -> mapping, and the line of every key
dump_mapping   mapping -> text that `read_mapping` reads back equal
dump_annotated the same, with a comment beside each value
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

import yaml

from shared_contracts import yaml12
from shared_contracts.yaml12 import Document, Steps, know_core_scalars

_WIDTH = 88
_COMMENT_COLUMN = 60


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that YAML 1.1 or 1.2 would take for another scalar."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


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
    return yaml12.read_document(path, yaml)


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
    root = yaml.compose(text, yaml12.core_loader(yaml))
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
        for step, _, child in yaml12.children(node):
            yield from _ends(child, (*at, step))
    elif isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
        yield at, node.start_mark.line
    else:
        yield at, node.end_mark.line
