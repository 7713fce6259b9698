"""Values of an entry that the strict parser drops, and why (PARSE-04)."""

from learner.stages.formats.json_objects import MAX_BRACKETS
from tests.unit.answers import coords

BOX = coords(10, 20, 300, 400)

DROPPED = {
    # not JSON
    '{"desc": "cat", "bbox_2d": ' + BOX[:-1] + "}": "key_invalid",
    f'{{"desc": "cat", "bbox_2d": {BOX},}}': "key_invalid",
    f'{{"desc": "cat" "bbox_2d": {BOX}}}': "key_invalid",
    f'{{"desc": cat, "bbox_2d": {BOX}}}': "key_invalid",
    f'{{"desc": "cat\x00", "bbox_2d": {BOX}}}': "key_invalid",
    f'{{"desc": NaN, "bbox_2d": {BOX}}}': "key_invalid",
    '{"desc": "cat", "bbox_2d": [<|coord_1|><|coord_2|>, <|coord_3|>, <|coord_4|>]}': (
        "key_invalid"
    ),
    '{"desc": "cat", "bbox_2d": [5<|coord_1|>, <|coord_2|>, <|coord_3|>, <|coord_4|>]}': (
        "key_invalid"
    ),
    # not a dict
    BOX: "key_invalid",
    "<|coord_1|>": "key_invalid",
    "": "key_invalid",
    # duplicate, extra or nested keys, more than one geometry
    f'{{"desc": "cat", "desc": "dog", "bbox_2d": {BOX}}}': "key_invalid",
    f'{{"desc": "cat", "bbox_2d": {BOX}, "score": 1}}': "key_invalid",
    f'{{"desc": "cat", "bbox_2d": {BOX}, "poly": {coords(1, 2, 3, 4, 5, 6)}}}': "key_invalid",
    f'{{"desc": {{"text": "cat"}}, "bbox_2d": {BOX}}}': "key_invalid",
    '{"desc": "cat", "label": "dog"}': "key_invalid",
    # description
    f'{{"bbox_2d": {BOX}}}': "missing_desc",
    f'{{"desc": 5, "bbox_2d": {BOX}}}': "missing_desc",
    f'{{"desc": "", "bbox_2d": {BOX}}}': "missing_desc",
    f'{{"desc": " \\n\\u3000", "bbox_2d": {BOX}}}': "missing_desc",
    f'{{"desc": <|coord_1|>, "bbox_2d": {BOX}}}': "missing_desc",
    f'{{"bbox_2d": {BOX}, "desc": <|coord_1|>}}': "missing_desc",
    f'{{"desc": "cat \\ud800", "bbox_2d": {BOX}}}': "missing_desc",
    "{}": "missing_desc",
    # geometry
    '{"desc": "cat"}': "missing_geom",
    f'{{"desc": "cat", "bbox": {BOX}}}': "unknown_geom",
    # coordinates
    '{"desc": "cat", "bbox_2d": [1, 2, 3, 4]}': "non_coord_token",
    '{"desc": "cat", "bbox_2d": [' + "9" * 5000 + "]}": "non_coord_token",
    '{"desc": "cat", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", 4]}': (
        "non_coord_token"
    ),
    '{"desc": "cat", "bbox_2d": ["<|coord_1|> ", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}': (
        "non_coord_token"
    ),
    '{"desc": "cat", "bbox_2d": ["<|coord_1|><|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}': (
        "non_coord_token"
    ),
    '{"desc": "cat", "bbox_2d": ["<|coord_1000|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}': (
        "non_coord_token"
    ),
    '{"desc": "cat", "bbox_2d": ["\\u003c|coord_1|>", "<|coord_2|>", "<|coord_3|>", '
    '"<|coord_4|>"]}': "non_coord_token",
    '{"desc": "cat", "poly": [["<|coord_1|>", "<|coord_2|>"], ["<|coord_3|>", "<|coord_4|>"], '
    '["<|coord_5|>", "<|coord_6|>"]]}': "non_coord_token",
    '{"desc": "cat", "poly": [' + ", ".join(["[]"] * 20) + "]}": "non_coord_token",
    '{"desc": "cat", "poly": ' + "[" * MAX_BRACKETS + "]" * MAX_BRACKETS + "}": "non_coord_token",
    '{"desc": "cat", "bbox_2d": "<|coord_1|>"}': "non_coord_token",
    # arity and order
    '{"desc": "cat", "bbox_2d": []}': "wrong_arity",
    f'{{"desc": "cat", "bbox_2d": {coords(1, 2, 3)}}}': "wrong_arity",
    f'{{"desc": "cat", "poly": {coords(1, 2, 3, 4)}}}': "wrong_arity",
    f'{{"desc": "cat", "poly": {coords(1, 2, 3, 4, 5, 6, 7)}}}': "wrong_arity",
    f'{{"desc": "cat", "bbox_2d": {coords(5, 2, 3, 4)}}}': "bbox_invalid",
    f'{{"desc": "cat", "bbox_2d": {coords(1, 5, 3, 4)}}}': "bbox_invalid",
}
