r"""A list of objects in JSON, without spaces and without keys for the objects.

    {"objects":[{"desc":"cat","bbox_2d":["<|coord_10|>",...]},{"desc":"red dog",...}]}<|im_end|>

The parser reads any JSON of this form: white space anywhere, either order of the fields, bare
coordinate tokens. Nothing is repaired. An item that breaks a rule is dropped with the first reason
that applies (PARSE-04). An item has no key of its own; logs number them from `object_1` on.

Written without spaces, the quotes and commas between two coordinates are one token of Qwen's
tokenizer (`","`), and those between two objects are one, too (`},{"`). So a box takes 18 to 20
tokens. Bare coordinates would take as many, and the answer would be no valid JSON (RES-12).

    cut      the end of the last complete item, or the opening bracket
    prefix   {"objects":[{...},{...}     append continues it with ,{...} and closes with ]}

An answer that does not begin with `{"objects":[` has no objects; its target is the annotation
(`invalid_rollout`). After the list only the outermost brace may follow. The reading stops at a
brace where the list is still open.
"""

import re
from collections.abc import Sequence

from learner.stages.formats import WHITE_SPACE, Scan
from learner.stages.formats.json_objects import JsonFormat, object_text
from learner.types import AnswerFault, FieldOrder, GroundTruthObject, ParsedObject
from shared_contracts.errors import ContractError

HEAD, CLOSING = '{"objects":[', "]}"
SEPARATORS = (",", ":")
_NO_LIST = re.compile(r'\s*\{\s*"objects"\s*:')


class ObjectsArray(JsonFormat):
    is_list = True
    opening = HEAD

    def fault(self, scan: Scan, text: str, objects: Sequence[ParsedObject]) -> AnswerFault | None:
        """Return None for a text that ends within the head; else as in `AnswerFormat`."""
        if scan.open_at is None and HEAD.startswith("".join(text.split())):
            return None
        if scan.open_at is None and _NO_LIST.match(text):
            return "wrong_container"
        return super().fault(scan, text, objects)

    def append(
        self,
        prefix_text: str,
        objects: Sequence[GroundTruthObject],
        start_index: int,
        field_order: FieldOrder,
    ) -> str:
        last = prefix_text.rstrip(WHITE_SPACE)[-1:]
        if last not in ("}", "["):
            raise ContractError(
                "append.prefix_text",
                f"it ends in {prefix_text[-20:]!r}",
                "Cut it after the `}` of an item or after the opening `[`",
            )
        items = ",".join(object_text(item, field_order, SEPARATORS) for item in objects)
        return ("," if last == "}" and items else "") + items + CLOSING


OBJECTS_ARRAY = ObjectsArray()
