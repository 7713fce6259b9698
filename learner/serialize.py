"""Objects to text: the one serializer of both channels (APPEND-01).

"object_7": {"desc": "cat", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", ...]}
"""

import json
from collections.abc import Sequence

from learner.coords import coord_token
from learner.scanner import WHITE_SPACE
from learner.types import FieldOrder, GroundTruthObject
from shared_contracts.errors import ContractError


def object_key(index: int) -> str:
    """Key of the object with number `index`."""
    return f"object_{index}"


def serialize_objects(objects: Sequence[GroundTruthObject], field_order: FieldOrder) -> str:
    """A whole answer, `{...}`, with keys from `object_1` on."""
    return "{" + serialize_append("{", objects, 1, field_order)


def serialize_append(
    prefix_text: str,
    objects: Sequence[GroundTruthObject],
    start_index: int,
    field_order: FieldOrder,
) -> str:
    """Text that continues `prefix_text` with `objects` and closes the answer.

    prefix_text: ends (white space aside) in `}`, `{` or `,`; anything else cannot be
        continued and raises `ContractError`, as does a comma with nothing to follow it.
    start_index: number of the first appended object.
    """
    last = prefix_text.rstrip(WHITE_SPACE)[-1:]
    if last not in ("}", "{", ",") or (last == "," and not objects):
        raise ContractError(
            "serialize_append.prefix_text",
            f"it ends in {prefix_text[-20:]!r} and {len(objects)} objects are to follow",
            "Cut it after the `}` of an entry or after the opening `{`",
        )
    entries = ", ".join(
        _entry(start_index + i, item, field_order) for i, item in enumerate(objects)
    )
    separator = ", " if last == "}" and objects else ""
    return separator + entries + "}"


def _entry(index: int, item: GroundTruthObject, field_order: FieldOrder) -> str:
    fields = {
        "desc": item.desc,
        item.shape.kind: [coord_token(k) for k in item.shape.coords],
    }
    if field_order == "geometry_first":
        fields = dict(reversed(fields.items()))
    return f'"{object_key(index)}": {json.dumps(fields, ensure_ascii=False)}'
