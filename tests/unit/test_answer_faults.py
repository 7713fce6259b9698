"""Answers that are not read as their format, or not to their end, have their reason (RES-32)."""

import pytest
from transformers import PreTrainedTokenizerFast

from learner.config.registry import ANSWER_FORMATS, load_registered
from learner.stages.formats import AnswerFormat
from tests.unit.answers import encode

BOX = '["<|coord_10|>", "<|coord_20|>", "<|coord_300|>", "<|coord_400|>"]'
OBJECT = f'{{"desc": "cat", "bbox_2d": {BOX}}}'
KEYS = f'{{"object_1": {OBJECT}}}'
ARRAY = f'{{"objects": [{OBJECT}]}}'
LINE = "cat<|coord_10|><|coord_20|><|coord_300|><|coord_400|>\n"
QWEN = f'[{{"bbox_2d": {BOX}, "label": "cat"}}]'


@pytest.mark.req("RES-32", "IO-01")
@pytest.mark.parametrize(
    ("name", "text", "objects", "fault"),
    [
        ("object_keys", KEYS, 1, None),
        ("object_keys", "{}", 0, None),
        ("object_keys", KEYS + " \n", 1, None),
        ("object_keys", KEYS + KEYS, 1, "text_behind"),
        ("object_keys", KEYS + "}", 1, "text_behind"),
        ("object_keys", "{" + KEYS[1:-1] + f'}}, "object_2": {OBJECT}}}', 1, "text_behind"),
        ("object_keys", "{" + KEYS[1:-1] + f'], "object_2": {OBJECT}}}', 1, "wrong_container"),
        ("object_keys", f'{{"object_1": [{OBJECT}]}}', 0, "wrong_container"),
        ("object_keys", ARRAY, 0, "other_format"),
        ("object_keys", ARRAY[:14], 0, "other_format"),
        ("object_keys", QWEN, 0, "other_format"),
        ("object_keys", f"```json\n{KEYS}\n```", 0, "fenced"),
        ("object_keys", f"Here: {KEYS}", 0, "prose_before"),
        ("object_keys", "I see a cat.", 0, None),
        ("object_keys", LINE, 0, None),
        ("objects_array", ARRAY, 1, None),
        ("objects_array", '{"objects": []}', 0, None),
        ("objects_array", '{"obj', 0, None),
        ("objects_array", ARRAY + ARRAY, 1, "text_behind"),
        ("objects_array", f'{{"objects": [[{OBJECT}]]}}', 0, "wrong_container"),
        ("objects_array", f'{{"objects": [{OBJECT}]]}}', 1, "wrong_container"),
        ("objects_array", f'{{"objects": [{OBJECT}}}', 1, "wrong_container"),
        ("objects_array", f'{{"objects": {OBJECT}}}', 0, "other_format"),
        ("objects_array", KEYS, 0, "other_format"),
        ("objects_array", QWEN, 0, "other_format"),
        ("compact", LINE + ".", 1, None),
        ("compact", ".", 0, None),
        ("compact", KEYS, 0, "other_format"),
        ("compact", QWEN.replace(", ", ",\n"), 0, "other_format"),
        ("compact", f"```json\n{KEYS}\n```", 0, "fenced"),
    ],
)
def test_the_reason_of_each_unread_answer(
    tokenizer: PreTrainedTokenizerFast, name: str, text: str, objects: int, fault: str | None
) -> None:
    answers: AnswerFormat = load_registered(ANSWER_FORMATS, name)
    parsed = answers.parse(encode(tokenizer, text), tokenizer)
    assert (len(parsed.objects), parsed.fault) == (objects, fault)
