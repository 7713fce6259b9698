"""JSON Schema (draft 2020-12) of a training YAML, for editors (CFG-10).

It requires no key: the file in `extends` may have it. It leaves out what only the loader checks,
such as keys that must agree with each other.
"""

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from learner.config.moved_keys import IGNORED_KEY
from learner.config.schema import Config
from learner.config.training import NULL_MEANS_DERIVED

_EXTENDS = {
    "type": "string",
    "minLength": 1,
    "description": "file, relative to this one, whose keys this one adds to or replaces: mappings "
    "merge, all else is replaced whole",
}


class _Partial(GenerateJsonSchema):
    """Schemas without required keys; a union accepts what any member accepts."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        return False

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> dict[str, Any]:
        union = super().tagged_union_schema(schema)
        return {"anyOf": union["oneOf"]}


def schema_text() -> str:
    """Return the schema of the whole file."""
    schema = Config.model_json_schema(schema_generator=_Partial)
    schema["$defs"]["CustomConfig"]["properties"][IGNORED_KEY[1]] = {"description": "ignored"}
    training = schema["$defs"]["TrainingConfig"]["properties"]
    for key in NULL_MEANS_DERIVED:
        training[key] = {"anyOf": [training[key], {"type": "null"}]}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Training YAML",
        "properties": {"extends": _EXTENDS} | schema["properties"],
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
