"""Write docs/config.md from the schema; with --check, fail when the file is out of date."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from learner.config.schema import Config
from shared_contracts.strict_model import bare_type, is_model, models_of_union, shown, tag_of

PAGE = Path(__file__).parent.parent / "docs" / "config.md"

INTRO = """\
# The training configuration

*Written by `scripts/config_reference.py` from the schema; do not edit.*

The [glossary](method.md#glossary) explains special words.

`learner train FILE` reads one YAML file (YAML 1.2: `no` is text, `1e-4` is a number). With
`extends: FILE` the file extends another one; the path is relative to the file itself. Mappings are
merged, all other values are replaced. Files in the folders `prod` and `smoke` of a trainer variant
must extend `../base.yaml` and must set the fields listed in `learner/config/load.py`. Relative
paths start at the current working directory. A leading `~` is the home folder. A path with `${VAR}`
is refused. Paths in the settings file of a rollout server are read in the same way.

A key that is not listed here is an error, and so is a value of the wrong type. Keys of older
configurations are refused; the error says what to do instead (`learner/config/load.py`). All
faults of a file are reported at once.

- `learner config show FILE` prints every key with its effective value and the origin of the value:
  a `file:line`, `default`, or `derived` from another key. `--all-origins` also names the lines that
  were overridden.
- `learner config check FILE ...` reports every fault of every file: the key, the value found and
  its line, and what to do. The exit code is 2 if there is a fault. It also checks the files that
  the YAML names: the tokenizer and the module names of the checkpoint, the first sample of each
  data file, and whether the run folder can be written. `--keys-only` skips these files, for a YAML
  that is meant for another machine.
- `learner config schema --out FILE` writes the JSON Schema for editors. `configs/schema.json` is
  the schema of this version.
- `learner preflight FILE` prints what a launcher needs, as shell assignments (`deploy/README.md`).

A profile that names rollout servers can also run with a server that the learner starts. Write
`server: null` to remove the servers of the profile:

```yaml
extends: configs/stage2_two_channel/prod/default.yaml
rollout_matching:
  vllm: {mode: colocate, server: null}
```

The first line of a file, `# yaml-language-server: $schema=PATH`, names the schema to editors.
The schema has keys, types and ranges. Only the loader checks that keys agree and none is missing.
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
    index, inner = "", bare_type(field.annotation)
    if get_origin(inner) in (list, tuple):
        index, inner = "[]", bare_type(get_args(inner)[0])
    members = (inner,) if is_model(inner) else models_of_union(inner)
    if len(members) > 1:
        yield from _union_rows(path + index, members)
    elif members:
        for name, below in members[0].model_fields.items():
            yield from _rows(f"{path}{index}.{name}", below)
    else:
        meaning = field.description or ""
        yield Row((f"`{path}`", _type(field), _default(field), meaning))


def _union_rows(path: str, members: tuple[type[BaseModel], ...]) -> Iterator[Row]:
    """Rows of every member; one that not all members share says whose it is."""
    tags = [tag_of(member) for member in members]
    choices = [f"`{tag.value}` ({tag.field.description})" for tag in tags]
    default = _default(tags[0].field)
    yield Row((f"`{path}.{tags[0].key}`", "one of", default, ", ".join(choices)))
    tables = [_member_rows(path, member) for member in members]
    told: set[Row] = set()
    for tag, table in zip(tags, tables, strict=True):
        for row in table:
            if all(row in other for other in tables):
                if row not in told:
                    yield row
                told.add(row)
            else:
                yield Row((*row[:3], f"`{tag.value}`: {row[3]}"))


def _member_rows(path: str, member: type[BaseModel]) -> list[Row]:
    discriminator = tag_of(member).key
    fields = [(n, f) for n, f in member.model_fields.items() if n != discriminator]
    return [row for name, field in fields for row in _rows(f"{path}.{name}", field)]


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args().check:
        if PAGE.read_text(encoding="utf-8") != page():
            sys.exit(f"{PAGE} is out of date: run scripts/config_reference.py")
    else:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
