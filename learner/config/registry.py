"""Answer formats and model families by name. Each has one line here: `name: module:object`.

`load_registered` imports the module. The config has the names alone.
"""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from shared_contracts.errors import ContractError

# `custom.answer_format`; each is a `learner.stages.formats.AnswerFormat`. Its entries are in
# `shared_contracts.repeat_guard.ENTRY_CONTEXTS`.
ANSWER_FORMATS = {
    "object_keys": "learner.stages.formats.coord_json:COORD_JSON",
    "objects_array": "learner.stages.formats.objects_array:OBJECTS_ARRAY",
    "compact": "learner.stages.formats.compact:COMPACT",
}

# By `model_type` of a checkpoint's config.json; each is a `learner.models.families.Family`.
MODEL_FAMILIES = {
    "qwen2_vl": "learner.models.families.qwen_vl:QWEN_VL",
    "qwen2_5_vl": "learner.models.families.qwen_vl:QWEN2_5_VL",
    "qwen3_vl": "learner.models.families.qwen_vl:QWEN3_VL",
    "qwen3_vl_moe": "learner.models.families.qwen_vl:QWEN3_VL",
    "qwen3_5": "learner.models.families.qwen_vl:QWEN3_5",
    "qwen3_5_moe": "learner.models.families.qwen_vl:QWEN3_5",
}


def model_family(model_type: str | None, where: str = "model.model") -> Any:
    """Return the `Family` of a `model_type`; raises ContractError for an unknown one."""
    if model_type not in MODEL_FAMILIES:
        found = f"its model_type is {model_type}, which has no family here"
        raise ContractError(where, found, f"Use one of {', '.join(MODEL_FAMILIES)}")
    return load_registered(MODEL_FAMILIES, model_type)


def load_registered(registry: Mapping[str, str], name: str) -> Any:
    return resolve_name(registry[name])
