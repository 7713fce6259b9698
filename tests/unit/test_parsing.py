"""The strict parser: objects, drop reasons, cuts and numbers (section 8 of the contract)."""

import re
import unicodedata

import pytest
from tokenizers import AddedToken
from tokenizers.normalizers import NFC
from transformers import PreTrainedTokenizerFast

from learner.stages.formats import AnswerFormat
from learner.stages.formats.coord_json import COORD_JSON, parse_rollout
from learner.stages.formats.json_objects import MAX_BRACKETS
from learner.stages.formats.objects_array import OBJECTS_ARRAY
from learner.stages.tokens import HALF_CHARACTER, PLACEHOLDERS, token_table
from learner.types import ParsedRollout
from tests.unit.answers import (
    BOX,
    CAT,
    DROPPED,
    encode,
    entry,
    parse,
    pieces,
    prefix,
    text_of,
    with_placeholders,
    with_value,
)
from tests.unit.toy_bpe import train_toy_tokenizer


@pytest.mark.req("PARSE-01", "PARSE-03", "ARCH-02")
def test_a_box_has_its_description_and_token_positions(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode(tokenizer, "{" + entry(7, "red dog", (1, 2, 3, 4)) + "}")
    parsed = parse_rollout(ids, tokenizer)
    (found,) = parsed.objects
    assert (found.key, found.index, found.kind, found.desc) == ("object_7", 7, "bbox_2d", "red dog")
    assert found.coords == [1, 2, 3, 4]
    coord_ids = token_table(tokenizer).vocab.ids
    assert [ids[i] for i in found.coord_token_indices] == [coord_ids[k] for k in (1, 2, 3, 4)]
    text = pieces(tokenizer, ids)
    assert "".join(text[i] for i in found.desc_token_indices).strip(' "') == "red dog"
    start, end = found.token_span
    assert "".join(text[start:end]).startswith(('"object_7"', '{"object_7"'))
    assert not parsed.truncated
    assert not parsed.invalid_rollout
    assert parsed.dropped == []
    assert parsed.entry_ends == [(end - 1, 0)]


@pytest.mark.req("RES-12", "PARSE-01", "PARSE-04")
@pytest.mark.parametrize("desc", ["cat", "🧿 cat 🧿🧿"])
def test_bare_coordinate_tokens_are_accepted(tokenizer: PreTrainedTokenizerFast, desc: str) -> None:
    array = '[<|coord_1|>, "<|coord_2|>", <|coord_3|>,<|coord_4|> ]'
    parsed = parse(tokenizer, with_value(f'{{"desc": "{desc}", "bbox_2d": {array}}}'))
    assert [(found.desc, found.coords) for found in parsed.objects] == [(desc, [1, 2, 3, 4])]


@pytest.mark.req("PARSE-02", "PARSE-05")
@pytest.mark.parametrize("placeholder", PLACEHOLDERS)
@pytest.mark.parametrize("kept", ["{", "{" + entry(1)])
def test_the_token_of_an_image_ends_the_answer_as_it_is_no_text(
    tokenizer: PreTrainedTokenizerFast, placeholder: str, kept: str
) -> None:
    last = entry(2, f"a {placeholder}") + "}"
    text = kept + (", " if kept.endswith("}") else "") + last
    seeing = with_placeholders(tokenizer)
    parsed = parse(seeing, text)
    assert parsed == parse(seeing, text.replace(placeholder, "<|im_end|>"))
    assert parsed == parse(seeing, text.replace(placeholder, placeholder + "<|im_end|>"))
    assert parsed.truncated
    assert prefix(seeing, parsed) == kept
    blind = parse(tokenizer, text)
    assert blind.objects[-1].desc == f"a {placeholder}"


@pytest.mark.req("PARSE-04")
@pytest.mark.parametrize(("value", "reason"), DROPPED.items())
def test_an_invalid_object_is_dropped_with_its_reason_and_the_others_stay(
    tokenizer: PreTrainedTokenizerFast, value: str, reason: str
) -> None:
    text = "{" + entry(1) + f', "object_2": {value}, ' + entry(3) + "}"
    parsed = parse(tokenizer, text)
    assert parsed.dropped == [("object_2", reason)]
    assert [found.index for found in parsed.objects] == [1, 3]
    assert [i for _, i in parsed.entry_ends] == [0, None, 1]
    assert parsed.max_object_index == 3
    assert prefix(tokenizer, parsed) == text[:-1]


@pytest.mark.req("PARSE-04", "PARSE-07")
@pytest.mark.parametrize("behind", ["", "[]"])
def test_brackets_too_deep_count_as_nested(tokenizer: PreTrainedTokenizerFast, behind: str) -> None:
    deep = "[" * (MAX_BRACKETS + 1) + "]" * (MAX_BRACKETS + 1)
    values = ", ".join(filter(None, [deep, behind]))
    text = "{" + entry(1) + f', "object_2": {{"desc": "cat", "poly": [{values}]}}, ' + entry(3)
    parsed = parse(tokenizer, text)
    assert parsed.dropped == [("object_2", "key_invalid")]
    assert [found.index for found in parsed.objects] == [1, 3]


@pytest.mark.req("PARSE-04")
def test_a_coordinate_spelled_in_other_tokens_is_none(tokenizer: PreTrainedTokenizerFast) -> None:
    spelled = [
        token
        for part in ("<", "|", "coord", "_", "1", "|", ">")
        for token in encode(tokenizer, part)
    ]
    ids = [
        *encode(tokenizer, '{"object_1": {"desc": "cat", "bbox_2d": ["'),
        *spelled,
        *encode(tokenizer, '", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}}'),
    ]
    assert '["<|coord_1|>", "<|coord_2|>"' in text_of(tokenizer, ids)
    assert parse_rollout(ids, tokenizer).dropped == [("object_1", "non_coord_token")]


ESCAPED = entry(2).replace("<|coord_", "<|c\\u006ford_")


@pytest.mark.req("PARSE-03", "MET-02")
@pytest.mark.scenario(
    "Ambiguous coord-slot alignment excludes object from self-context supervision"
)
@pytest.mark.parametrize(
    ("second", "unaligned"),
    [
        (ESCAPED, 1),
        (ESCAPED.replace("<|c\\u006ford_10|>", "<|coord_10|>"), 1),
        (ESCAPED.replace('"cat"', '" "'), 0),
        (entry(2), 0),
        (entry(2).replace('"<|coord_10|>"', "10"), 0),
        (entry(2).replace("<|coord_10|>", "left"), 0),
    ],
)
@pytest.mark.parametrize("answers", [COORD_JSON, OBJECTS_ARRAY])
def test_objects_whose_coordinates_are_spelled_in_other_tokens_have_a_count_of_their_own(
    tokenizer: PreTrainedTokenizerFast, answers: AnswerFormat, second: str, unaligned: int
) -> None:
    text = "{" + entry(1) + ", " + second + "}"
    if answers is OBJECTS_ARRAY:
        text = re.sub(r'"object_\d": ', "", f'{{"objects":[{text[1:-1]}]}}')
    parsed = answers.parse(encode(tokenizer, text), tokenizer)
    assert parsed.unaligned == unaligned
    assert [why for _, why in parsed.dropped].count("non_coord_token") >= unaligned


KEYS = ["cat", "object", "object_", "object_x", "Object_2", " object_2", "object_-2", ""]
COMMAS = [" ", ",,", ", 5,", ", nonsense ", ": ", ', "loose" ', ", 🚀", ", ] "]
COLONS = ["", " ", "::", ": 5 ", ': "loose" ', ": , ", ", "]


@pytest.mark.req("PARSE-04")
@pytest.mark.parametrize(
    ("second", "dropped"),
    [
        *((", " + entry(2).replace("object_2", key), key) for key in KEYS),
        *((comma + entry(2), "object_2") for comma in COMMAS),
        *((", " + entry(2).replace(": {", colon + "{", 1), "object_2") for colon in COLONS),
        (", " + entry(2).partition(": ")[2], ""),
    ],
)
def test_an_object_without_one_comma_a_key_object_n_and_one_colon_before_it_is_invalid(
    tokenizer: PreTrainedTokenizerFast, second: str, dropped: str
) -> None:
    parsed = parse(tokenizer, "{" + entry(1) + second + ", " + entry(3) + "}")
    assert (dropped, "key_invalid") in parsed.dropped
    assert {reason for _, reason in parsed.dropped} == {"key_invalid"}
    assert [found.index for found in parsed.objects] == [1, 3]


# ---- where an answer is cut ----------------------------------------------------------

# The largest number that counts.
HUGE = 10**639 - 1

ONE, BOTH = "{" + entry(1), "{" + entry(1) + ", " + entry(2)
TURNED = "{" + entry(10) + ", " + entry(2)
NINE = [("object_9", "key_invalid")]
GEOMETRY_FIRST = f'{{"object_1": {{"bbox_2d": {BOX}, "desc": "cat"}}'
Drops = list[tuple[str, str]]

# (answer, what is kept of it, numbers of its objects, what is dropped, whether it is truncated)
READ: list[tuple[str, str, list[int], Drops, bool]] = [
    (TURNED + "}", TURNED, [10, 2], [], False),
    (GEOMETRY_FIRST + "}", GEOMETRY_FIRST, [1], [], False),
    (" \t\r\n  " + ONE + "}", " \t\r\n  " + ONE, [1], [], False),
    # Behind its end.
    (ONE + "}<|im_end|>, " + entry(2) + "}", ONE, [1], [], False),
    (ONE + "<|im_end|>, " + entry(2) + "}", ONE, [1], [], True),
    # Unfinished: cut after the last complete object.
    *((BOTH + tail, BOTH, [1, 2], [], True) for tail in ("", ",", ", ", ', "obj', " nonsense")),
    *(
        (BOTH + ', "object_9"' + tail, BOTH, [1, 2], NINE, True)
        for tail in (
            "",
            ': {"de',
            ': {"desc": "cat", "bbox_2d": ["<|coord_1|>", "',
            ': [{"desc": "cat"}',
            ': {"desc": "cat", "bbox_2d": [' + "[" * 50,
        )
    ),
    # Without a complete object the first brace is kept.
    *((text, "{", [], [], True) for text in ("{", "{ ", '{"', '{"object_1')),
    *((text, "{", [], [], False) for text in ("{}", "{ }")),
    ('{"object_9": {"desc": "ca', "{", [], NINE, True),
    ('{"object_9": 5}', "{", [], NINE, False),
]


@pytest.mark.req("PARSE-01", "PARSE-02", "PARSE-03", "PARSE-04", "PARSE-05")
@pytest.mark.scenario(
    "Dict keys are not sorted for matching order",
    "geometry-first object remains valid under strict parse",
)
@pytest.mark.parametrize(("text", "kept", "numbers", "dropped", "truncated"), READ)
def test_an_answer_is_read_in_order_and_cut_behind_its_last_complete_object(
    tokenizer: PreTrainedTokenizerFast,
    text: str,
    kept: str,
    numbers: list[int],
    dropped: Drops,
    truncated: bool,
) -> None:
    parsed = parse(tokenizer, text)
    assert prefix(tokenizer, parsed) == kept
    assert [found.index for found in parsed.objects] == numbers
    assert {(found.desc, found.shape) for found in parsed.objects} <= {(CAT.desc, CAT.shape)}
    assert [place for _, place in parsed.entry_ends] == list(range(len(numbers)))
    assert parsed.max_object_index == max(numbers, default=0)
    assert (parsed.dropped, parsed.truncated) == (dropped, truncated)
    assert not parsed.invalid_rollout


@pytest.mark.req("PARSE-05")
@pytest.mark.parametrize(
    "text",
    ["", " \n", "no brace", "<|im_end|>{}", "Sure: {" + entry(1) + "}", "\u00a0{" + entry(1) + "}"],
)
def test_an_answer_that_does_not_start_with_a_brace_is_invalid_and_becomes_a_brace(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    assert parse(tokenizer, text) == ParsedRollout(
        objects=[],
        dropped=[],
        prefix_token_ids=encode(tokenizer, "{"),
        max_object_index=0,
        truncated=False,
        invalid_rollout=True,
        entry_ends=[],
    )


@pytest.mark.req("PARSE-05", "PARSE-01")
@pytest.mark.parametrize("extra", [[], [HALF_CHARACTER]])
def test_a_cut_inside_a_token_keeps_the_bytes_of_a_part_of_a_character(extra: list[str]) -> None:
    # Where the replacement character is a token, ids could spell the broken text.
    toy_tokenizer = train_toy_tokenizer()
    toy_tokenizer.add_tokens(extra)
    last = f'"object_2": {{"bbox_2d": {BOX}, "desc": "toy 🧀"}}'
    ids = encode(toy_tokenizer, "{" + entry(1) + ", " + last + "}")
    fused = pieces(toy_tokenizer, ids)[-1]
    assert HALF_CHARACTER in fused
    assert fused.endswith("}}")
    parsed = parse_rollout(ids, toy_tokenizer)
    assert parsed.prefix_token_ids[: len(ids) - 1] == ids[:-1]
    assert prefix(toy_tokenizer, parsed) == "{" + entry(1) + ", " + last
    assert [found.desc for found in parsed.objects] == ["cat", "toy 🧀"]
    assert parsed.dropped == []


@pytest.mark.req("PARSE-05", "PARSE-01")
def test_whole_characters_may_need_ids_of_half_ones(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    text = f'{{"object_1": {{"bbox_2d": {BOX}, "desc": "toy 🚀"}}'
    ids = encode(toy_tokenizer, text + ",")
    assert pieces(toy_tokenizer, ids)[-1] == ' 🚀"},'
    parsed = parse_rollout(ids, toy_tokenizer)
    assert parsed.prefix_token_ids[: len(ids) - 1] == ids[:-1]
    assert HALF_CHARACTER in pieces(toy_tokenizer, parsed.prefix_token_ids)[len(ids) - 1]
    assert prefix(toy_tokenizer, parsed) == text


@pytest.mark.req("PARSE-05", "PARSE-04")
def test_where_no_ids_spell_a_leading_piece_the_cut_falls_back_to_the_object_before() -> None:
    toy_tokenizer = train_toy_tokenizer()
    toy_tokenizer.backend_tokenizer.normalizer = NFC()
    decomposed = unicodedata.normalize("NFD", 'é"}}')
    toy_tokenizer.add_tokens([AddedToken(decomposed, normalized=False)])
    last = f'"object_2": {{"bbox_2d": {BOX}, "desc": "caf{decomposed}'
    ids = encode(toy_tokenizer, "{" + entry(1) + ", " + last)
    assert pieces(toy_tokenizer, ids)[-1] == decomposed
    parsed = parse_rollout(ids, toy_tokenizer)
    assert prefix(toy_tokenizer, parsed) == "{" + entry(1)
    assert [found.index for found in parsed.objects] == [1]
    assert parsed.dropped == [("object_2", "key_invalid")]
    assert not parsed.truncated


@pytest.mark.req("PARSE-04", "LOSS-01")
@pytest.mark.parametrize(
    "invalid", ['"object_1"', '"object_1":', '"object_1" none', '"object_1": 5 "loose"']
)
def test_all_there_is_before_the_comma_belongs_to_an_entry_without_an_object(
    tokenizer: PreTrainedTokenizerFast, invalid: str
) -> None:
    ids = encode(tokenizer, "{" + invalid)
    written = len(ids)
    ids += encode(tokenizer, " ") + encode(tokenizer, ",") + encode(tokenizer, entry(2) + "}")
    parsed = parse_rollout(ids, tokenizer)
    last = pieces(tokenizer, ids[:written])[-1].isspace()
    assert [end for end, i in parsed.entry_ends if i is None] == [written - 1 - last]
    assert parsed.dropped == [("object_1", "key_invalid")]
    assert [found.index for found in parsed.objects] == [2]


@pytest.mark.req("PARSE-06")
@pytest.mark.parametrize(
    ("text", "largest"),
    [
        ("{" + entry(2) + ', "object_9": {"desc": "broken"}}', 9),
        ("{" + entry(2) + ', "object_9": {"desc": "unfinished', 2),
        ('{"object_9": 5, ' + entry(2) + "}", 9),
        ("{" + entry(2) + ', "object_9": 5}', 2),
        ('{"object_1": {"object_9": {}}, ' + entry(2) + "}", 9),
        ('{"object_x": {}, "object_": {}, "thing_7": {}}', 0),
        ("{" + entry(1, r"\"object_9\": ") + "}", 1),
        pytest.param("{" + entry(HUGE) + ", " + entry(2) + "}", HUGE, id="639 digits"),
        pytest.param("{" + entry(HUGE + 1) + ", " + entry(2) + "}", 2, id="640 digits"),
        ('{"object_5" \n: {}}', 5),
        ('{"object_5" {}, ' + entry(2) + "}", 5),
        ("{" + entry(2) + ', "object_5" 7}', 2),
    ],
)
def test_the_largest_number_of_any_key_in_the_prefix_counts(
    tokenizer: PreTrainedTokenizerFast, text: str, largest: int
) -> None:
    assert parse(tokenizer, text).max_object_index == largest
