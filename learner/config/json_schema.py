"""JSON Schema (draft 2020-12) of a training YAML as people write it, for editors (CFG-10).

The models are the one source. A file may leave to the one it `extends` whatever stands in
mappings, so those require nothing themselves; a file without `extends` is held against
`_required` as well. Lists are replaced whole: their entries are always complete.

What only the loader knows, such as keys that must agree with each other, is not in it.
"""

import json
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from learner.config.moved_keys import IGNORED_KEY
from learner.config.schema import Config
from shared_contracts.strict_model import models_below, shown, tag_of

Schema = dict[str, Any]
_Members = tuple[type[BaseModel], ...]

_EXTENDS: Schema = {
    "type": "string",
    "minLength": 1,
    "description": "`extends`: file, relative to this one, that this one is put on top of: "
    "mappings merge, all else is replaced whole.",
}


def schema_text() -> str:
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def json_schema() -> Schema:
    """The schema of the whole file."""
    schema = _mapping(Config, complete=False)
    schema["properties"] = {"extends": _EXTENDS} | schema["properties"]
    section, key = IGNORED_KEY
    schema["properties"][section]["properties"][key] = {"description": f"`{key}`: ignored."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Training YAML",
        **schema,
        "if": {"not": {"required": ["extends"]}},
        "then": _required(Config),
    }


def _mapping(model: type[BaseModel], complete: bool) -> Schema:
    """A mapping with the keys of a model and no others; `complete`: it stands in a list."""
    fields = model.model_fields
    schema: Schema = {
        "type": "object",
        "properties": {name: _key(name, field, complete) for name, field in fields.items()},
        "additionalProperties": False,
    }
    required = _required_keys(model)
    return schema | {"required": required} if complete and required else schema


def _key(name: str, field: FieldInfo, complete: bool) -> Schema:
    """What may stand at a key, and what an editor says of it."""
    index, members = models_below(field.annotation)
    if not members:
        schema = _scalar(field)
    elif index:
        schema = {"type": "array", "items": _one_of(members, complete=True)}
    else:
        schema = _one_of(members, complete)
    if _takes_null(field):
        if "enum" in schema:
            schema = schema | {"enum": [*schema["enum"], None]}
        if "const" in schema or "type" not in schema:
            schema = {"anyOf": [schema, {"type": "null"}]}
        else:
            schema = schema | {"type": [schema["type"], "null"]}
    schema["description"] = f"`{name}`: {field.description}. {_left_out(field)}"
    if not field.is_required() and _is_plain(field.default):
        schema["default"] = field.default
    return schema


def _one_of(members: _Members, complete: bool) -> Schema:
    """A mapping that is one of several models, told by a key that each has a value of."""
    if len(members) == 1:
        return _mapping(members[0], complete)
    tags = [tag_of(member) for member in members]
    key = tags[0].key
    meanings = "; ".join(f"`{tag.value}`: {tag.field.description}" for tag in tags)
    names = {"enum": [tag.value for tag in tags], "description": f"{meanings}."}
    untold: Schema = {"required": [key]}
    if not complete:
        untold = {"properties": {}, "additionalProperties": False}
        for member in members:
            untold["properties"] |= _mapping(member, complete)["properties"]
    cases = [(tag_of(member).value, _mapping(member, complete)) for member in members]
    return {"type": "object", "properties": {key: names}, "allOf": _cases(key, cases, untold)}


def _cases(key: str, cases: Iterable[tuple[str, Schema]], untold: Schema) -> list[Schema]:
    """What holds for each value of a key, and where it is left out."""
    told = {"required": [key]}
    return [
        *({"if": told | {"properties": {key: {"const": v}}}, "then": then} for v, then in cases),
        {"if": {"not": told}, "then": untold},
    ]


def _required(model: type[BaseModel]) -> Schema:
    """What a mapping without a base states: the keys without a default, at every depth."""
    below = {}
    for name, field in model.model_fields.items():
        index, members = models_below(field.annotation)
        if members and not index and (schema := _required_of(members)):
            below[name] = schema
    required = _required_keys(model)
    return ({"required": required} if required else {}) | ({"properties": below} if below else {})


def _required_of(members: _Members) -> Schema:
    if len(members) == 1:
        return _required(members[0])
    key = tag_of(members[0]).key
    untold: Schema = {"required": [key]}
    for member in members:
        if not tag_of(member).field.is_required():  # what it is, unless another is named
            untold = {"propertyNames": {"enum": list(member.model_fields)}} | _required(member)
    cases = [(tag_of(member).value, _required(member)) for member in members]
    return {"allOf": _cases(key, cases, untold)}


def _required_keys(model: type[BaseModel]) -> list[str]:
    return [name for name, field in model.model_fields.items() if field.is_required()]


def _scalar(field: FieldInfo) -> Schema:
    """pydantic's schema of a value that holds no models."""
    schema = TypeAdapter(field.rebuild_annotation()).json_schema()
    for key in ("default", "title"):
        schema.pop(key, None)
    choices = schema.get("anyOf", [])
    if {"type": "null"} in choices and len(choices) == 2:
        return next(choice for choice in choices if choice != {"type": "null"})
    return schema


def _takes_null(field: FieldInfo) -> bool:
    """Whether the loader takes null for a key: as a value, as empty, or as left out."""
    if field.default_factory_takes_validated_data:
        return True
    try:
        TypeAdapter(field.rebuild_annotation()).validate_python(None)
    except ValidationError:
        return False
    return True


def _left_out(field: FieldInfo) -> str:
    """What holds where a file and its bases leave the key out."""
    if field.is_required():
        return "Required."
    if field.default_factory_takes_validated_data:
        return "Default: derived."
    if not _is_plain(field.default):
        return "May be left out."
    text = isinstance(field.default, str)
    return f"Default: `{field.default if text else shown(field.default)}`."


def _is_plain(default: Any) -> bool:
    return default is None or isinstance(default, bool | int | float | str)
