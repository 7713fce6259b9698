"""Typed settings from files: strict models, and their faults as contract errors.

StrictModel        frozen, unknown keys forbidden, no silent conversion of types
FreeOnResume       marks a field that may change when a run is resumed
Refusal            raised by a validator: the fault and the remedy
refuse_all         raises several refusals at once
contract_errors    a pydantic ValidationError -> one ContractError for each fault
"""

import difflib
import json
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from shared_contracts.errors import ContractError

_NO_KEYS = "Remove it: there are no keys here"
# Remedy by pydantic's error type.
_WRITE = {
    **dict.fromkeys(("bool_type", "bool_parsing"), "Write true or false"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "Write a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "Write a number"),
    "string_type": "Write text, in quotes where it looks like a number",
}


class StrictModel(BaseModel):
    """A section of a settings file: no unknown keys, no conversion of values.

    A field's description is its `description`, or the docstring below it.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split()) or None

    def disagreements(self) -> Iterable["Refusal"]:
        """Return the faults between keys that are valid by themselves."""
        return ()

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        refuse_all(self.disagreements())
        return self


class EmptySection(StrictModel):
    """A section without keys."""


_Value = TypeVar("_Value")
FREE_ON_RESUME = "free on resume"
# The type of a field whose value, or any key below it, may change when a run is resumed.
FreeOnResume = Annotated[_Value, FREE_ON_RESUME]


class Refusal(ValueError):
    """A validator's fault and remedy; `contract_errors` adds the path.

    key: path of the faulty key below the validated value, e.g. `decoding.temperature`; empty for
        the value itself.
    """

    def __init__(self, found: str, do: str, key: str = "") -> None:
        super().__init__(found, do, key)
        self.found = found
        self.do = do
        self.key = key


def refuse_all(refusals: Iterable[Refusal]) -> None:
    """Raise all refusals of a validator at once, if there are any.

    pydantic adds the faults of a ValidationError raised in a validator to its own.
    """
    faults: list[Any] = [
        {"type": "value_error", "input": None, "ctx": {"error": each}} for each in refusals
    ]
    if faults:
        raise ValidationError.from_exception_data("refused", faults)


def contract_errors(
    error: ValidationError, model: type[BaseModel], at: str = ""
) -> list[ContractError]:
    """Translate the faults that pydantic found in data for `model`, in its order.

    Paths start with `at` and have list indices (`servers[0].unknown_flag`). The advice on an
    unknown key names the nearest known key. Faults with equal paths are merged.
    """
    errors: dict[str, ContractError] = {}
    for item in error.errors(include_url=False):
        if item["type"] == "default_factory_not_called":  # only follows from another fault
            continue
        converted = _convert(_locate(model, item["loc"], at), item)
        first = errors.setdefault(converted.where, converted)
        if converted.do not in first.do:
            do = f"{first.do}, or {converted.do[:1].lower()}{converted.do[1:]}"
            errors[converted.where] = ContractError(first.where, first.found, do)
    return list(errors.values())


@dataclass
class _Spot:
    """The place of a fault."""

    path: str  # dotted, with list indices
    annotation: Any  # type at the path; None for an unknown key
    owner: type[BaseModel] | None = None  # the model of the last key
    union: tuple[type[BaseModel], ...] = ()  # the union that contains `owner`
    description: str = ""  # of the field at the path


def _locate(model: type[BaseModel], loc: tuple[int | str, ...], at: str) -> _Spot:
    """Follow a pydantic location through the types; union tags are no part of the path."""
    spot = _Spot(at, model)
    union: tuple[type[BaseModel], ...] = ()
    for step in loc:
        here = bare_type(spot.annotation)
        if is_model(here):
            field = here.model_fields.get(str(step))
            spot.path = joined(spot.path, str(step))
            spot.owner, spot.union, union = here, union, ()
            spot.annotation = field.annotation if field else None
            spot.description = (field.description or "") if field else ""
        elif get_origin(here) is tuple and isinstance(step, int):
            spot.path = f"{spot.path}[{step}]"
            spot.annotation = get_args(here)[0]
        elif union := models_of_union(here):
            spot.annotation = next(member for member in union if tag_of(member).value == step)
        else:
            break
    return spot


def joined(path: str, key: str) -> str:
    """Join paths: `a.b` and `c` -> `a.b.c`, `a.b` and `[0].c` -> `a.b[0].c`; both may be empty."""
    dot = "." if path and key and not key.startswith("[") else ""
    return f"{path}{dot}{key}"


def bare_type(annotation: Any) -> Any:
    """Return a type without `Annotated` and `| None`."""
    if get_origin(annotation) is Annotated:
        return bare_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        if len(members) == 1:
            return bare_type(members[0])
    return annotation


def is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def models_of_union(annotation: Any) -> tuple[type[BaseModel], ...]:
    """Return the members of a union of models; empty for other types."""
    members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ()
    return members if all(is_model(member) for member in members) else ()


class Tag(NamedTuple):
    """The key that identifies a member of a union, and its value."""

    key: str
    value: str
    field: FieldInfo


def tag_of(member: type[BaseModel]) -> Tag:
    """Return the first one-valued Literal field of a member of a union."""
    return next(
        Tag(key, get_args(field.annotation)[0], field)
        for key, field in member.model_fields.items()
        if get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
    )


def _convert(spot: _Spot, item: Any) -> ContractError:
    context = item.get("ctx", {})
    match item["type"]:
        case "extra_forbidden":
            return _unknown_key(spot, str(item["loc"][-1]))
        case "missing":
            do = f"Set it: {spot.description}" if spot.description else "Set it"
            return ContractError(spot.path, "this key is required and missing", do)
        case "union_tag_not_found":
            where = joined(spot.path, context["discriminator"].strip("'"))
            members = models_of_union(bare_type(spot.annotation))
            known = ", ".join(sorted(tag_of(member).value for member in members))
            return ContractError(where, "this key is required and missing", f"Use one of: {known}")
        case "union_tag_invalid":
            where = joined(spot.path, context["discriminator"].strip("'"))
            do = f"Use one of: {context['expected_tags']}"
            return ContractError(where, f"'{context['tag']}' is not known", do)
        case "literal_error":
            return ContractError(spot.path, _refused(item), f"Use {context['expected']}")
        case "value_error" if isinstance(context["error"], Refusal):
            refusal = context["error"]
            return ContractError(joined(spot.path, refusal.key), refusal.found, refusal.do)
        case "model_type" | "model_attributes_type":
            section = bare_type(spot.annotation)
            known = ", ".join(section.model_fields) if is_model(section) else "its keys"
            do = f"Give a mapping of {known}" if known else _NO_KEYS
            return ContractError(spot.path, f"{shown(item['input'])} is not a mapping", do)
        case "tuple_type" | "list_type":
            given = item["input"]
            example = f", such as [{given}]" if isinstance(given, str) else ""
            return ContractError(spot.path, _refused(item), f"Write a list{example}")
        case kind if kind in _WRITE:
            return ContractError(spot.path, _refused(item), _WRITE[kind])
    do = item["msg"].replace("Input should be", "It should be").removeprefix("Value error, ")
    return ContractError(spot.path, _refused(item), do)


def _refused(item: Any) -> str:
    return f"{shown(item['input'])} is not accepted"


def _unknown_key(spot: _Spot, key: str) -> ContractError:
    assert spot.owner is not None
    for member in spot.union:
        if key in member.model_fields:
            found = f"this key belongs to '{tag_of(member).value}' only"
            return ContractError(spot.path, found, f"Remove it from '{tag_of(spot.owner).value}'")
    known = [*spot.owner.model_fields]
    do = f"Remove it, or use one of the keys here: {', '.join(known)}" if known else _NO_KEYS
    if near := difflib.get_close_matches(key, known, n=1):
        do = f"The nearest known key is '{near[0]}'; correct or remove it"
    return ContractError(spot.path, "unknown key", do)


def shown(value: Any) -> str:
    """Return a value as JSON, cut to 80 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return "a value nested too deeply"
    return text if len(text) <= 80 else f"{text[:77]}..."
