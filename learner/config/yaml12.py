"""YAML in and out (`shared_contracts.yaml12` has the rules of reading).

read_mapping   file -> mapping
read_document  file -> mapping, and the line of every key
dump_mapping   mapping -> text that `read_mapping` reads back equal, each value in one line
dump_annotated the same, with a comment beside each value
"""

from collections.abc import Callable
from io import StringIO
from pathlib import Path, PurePath
from typing import Any

from ruamel import yaml

from shared_contracts import yaml12
from shared_contracts.yaml12 import Document, Steps

_COMMENT_COLUMN = 50
_NO_WRAPS = 2**31
# Other programs read a run's files as YAML 1.1.
_YAML_1_1 = yaml.resolver.VersionedResolver(version="1.1")


class _Representer(yaml.representer.SafeRepresenter):
    """Lists of scalars in one line; scalars that YAML 1.1 and 1.2 read alike."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, value: object) -> Any:
        text = str(value)
        tag = _YAML_1_1.resolve(yaml.nodes.ScalarNode, text, (True, False))
        plain = tag == _YAML_1_1.DEFAULT_SCALAR_TAG and text.isprintable()
        plain = plain and text[0] != ":" and "?" not in text  # the writer quotes too few of these
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')

    def number(self, number: float) -> Any:
        node = self.represent_float(number)
        if "." not in node.value:
            node.value = node.value.replace("e", ".0e")
        return node

    def items(self, items: list[Any] | tuple[Any, ...]) -> Any:
        nested = any(isinstance(item, dict | list | tuple) for item in items)
        return self.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=not nested)


_Representer.add_representer(str, _Representer.text)
_Representer.add_multi_representer(PurePath, _Representer.text)
_Representer.add_representer(float, _Representer.number)
_Representer.add_representer(list, _Representer.items)
_Representer.add_representer(tuple, _Representer.items)


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping of a YAML file; raises ContractError with file and line for another."""
    return read_document(path).mapping


def read_document(path: Path) -> Document:
    """Return the mapping of a YAML file and the lines of its keys; raises as `read_mapping`."""
    return yaml12.read_document(path, yaml)


def dump_mapping(mapping: dict[str, Any]) -> str:
    """Return YAML text that `read_mapping` reads back equal (paths become strings)."""
    writer: Any = yaml.YAML(typ="safe", pure=True)
    writer.Representer = _Representer
    writer.default_flow_style, writer.width = False, _NO_WRAPS
    writer.sort_base_mapping_type_on_output = False
    text = StringIO()
    writer.dump(mapping, text)
    return text.getvalue()


def dump_annotated(mapping: dict[str, Any], note: Callable[[Steps], str]) -> str:
    """Return YAML text with the comment `note(steps)` beside each value."""
    text = dump_mapping(mapping)
    rows = text.split("\n")
    for steps, line in yaml12.parse_document(Path(), text, yaml).lines.items():
        row = rows[line - 1]
        if isinstance(steps[-1], str) and not row.endswith(":"):
            rows[line - 1] = f"{row.ljust(_COMMENT_COLUMN)}  # {note(steps)}"
    return "\n".join(rows)
