"""Write docs/config.md from the schema; with --check, fail when the file is out of date."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from learner.config.schema import Config
from shared_contracts.strict_model import bare_type, is_model, models_of_union, shown

PAGE = Path(__file__).parent.parent / "docs" / "config.md"

INTRO = """\
# The training configuration

*Written by `scripts/config_reference.py` from the schema; do not edit.*

`learner train --config FILE` reads one YAML file (YAML 1.2 scalars: `no` is text, `1e-4` a
number). `extends: FILE`, relative to the file itself, puts the file on top of another one:
mappings merge, everything else is replaced whole. Files in
`configs/stage2_two_channel/{prod,smoke}/` extend exactly `../base.yaml` and state themselves
the fields listed in `learner/config/profiles.py`. Relative paths start at the current working
directory; environment variables are not expanded.

A key that is not listed here is an error, and so is a value of the wrong type. Keys of older
configurations, and keys of the contract that are not served yet, are refused with what to do
instead (`learner/config/moved_keys.py`). All faults of a file are reported at once.
"""

NAMES = {"int": "integer", "float": "number", "bool": "true, false", "str": "text"}
NAMES |= {"Path": "path", "Decimal": "number", "dict": "mapping"}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


class Row(tuple[str, str, str, str]):
    """key, type, default, meaning."""

    def __str__(self) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in self)} |"


def page() -> str:
    """The whole of docs/config.md."""
    parts, empty = [INTRO], []
    for name, field in Config.model_fields.items():
        rows = list(_rows(name, field))
        title = field.description or ""
        if is_model(bare_type(field.annotation)) and not rows:
            empty.append(f"`{name}`")
            continue
        parts.append(f"## `{name}`\n\n{title[0].upper()}{title[1:]}.\n\n{_table(rows)}")
    parts.append(f"## Sections without keys yet\n\n{', '.join(empty)}: empty or left out.\n")
    return "\n".join(parts)


def _table(rows: list[Row]) -> str:
    head = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *map(str, rows)]) + "\n"


def _rows(path: str, field: FieldInfo) -> Iterator[Row]:
    """One row per key at or below a field."""
    inner = bare_type(field.annotation)
    if get_origin(inner) is tuple and get_args(inner):
        element = bare_type(get_args(inner)[0])
        if is_model(element) or models_of_union(element):
            path, inner = f"{path}[]", element
    if is_model(inner):
        for name, below in inner.model_fields.items():
            yield from _rows(f"{path}.{name}", below)
    elif members := models_of_union(inner):
        yield from _union_rows(path, members)
    else:
        meaning = field.description or ""
        yield Row((f"`{path}`", _type(field), _default(field), meaning))


def _union_rows(path: str, members: tuple[type[BaseModel], ...]) -> Iterator[Row]:
    """Rows of every member; one that not all members share says whose it is."""
    tags = [_tag(member) for member in members]
    choices = [f"`{tag}` ({field.description})" for _, tag, field in tags]
    first = tags[0][2]
    yield Row((f"`{path}.{tags[0][0]}`", "one of", _default(first), ", ".join(choices)))
    tables = [_member_rows(path, member) for member in members]
    told: set[Row] = set()
    for (_, tag, _), table in zip(tags, tables, strict=True):
        for row in table:
            if all(row in other for other in tables):
                if row not in told:
                    yield row
                told.add(row)
            else:
                yield Row((*row[:3], f"`{tag}`: {row[3]}"))


def _member_rows(path: str, member: type[BaseModel]) -> list[Row]:
    discriminator = _tag(member)[0]
    fields = [(n, f) for n, f in member.model_fields.items() if n != discriminator]
    return [row for name, field in fields for row in _rows(f"{path}.{name}", field)]


def _tag(member: type[BaseModel]) -> tuple[str, str, FieldInfo]:
    """Name, value and field of what a member of a union is told by."""
    return next(
        (name, get_args(field.annotation)[0], field)
        for name, field in member.model_fields.items()
        if get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
    )


def _type(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(constraint, name)}"
        for constraint in field.metadata
        for name, sign in SIGNS.items()
        if hasattr(constraint, name)
    ]
    null = " or null" if NoneType in get_args(field.annotation) else ""
    return " ".join([_type_name(field.annotation), *bounds]) + null


def _type_name(annotation: Any) -> str:
    inner = bare_type(annotation)
    if get_origin(inner) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(inner))
    if get_origin(inner) in (tuple, list):
        elements = [a for a in get_args(inner) if a is not Ellipsis]
        return f"list of {_type_name(elements[0])}" if elements else "list"
    if get_origin(inner) is dict:
        return NAMES["dict"]
    if len(members := get_args(inner)) > 1:
        return " or ".join(_type_name(member) for member in members)
    return NAMES[inner.__name__]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    return "derived" if field.default_factory is not None else f"`{shown(field.default)}`"


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        if PAGE.read_text(encoding="utf-8") != page():
            sys.exit(f"{PAGE} is out of date: run scripts/config_reference.py")
    else:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
