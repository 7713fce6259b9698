"""The strict parser: objects and drop reasons (section 8 of the contract)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from learner.stages.formats.coord_json import parse_rollout
from learner.stages.formats.json_scanner import MAX_BRACKETS
from learner.stages.tokens import PLACEHOLDERS, token_table
from tests.unit.answers import (
    coords,
    encode,
    entry,
    parse,
    pieces,
    prefix,
    text_of,
    with_placeholders,
    with_value,
)
from tests.unit.dropped_values import BOX, DROPPED

# ---- valid answers -------------------------------------------------------------------


@pytest.mark.req("PARSE-01", "PARSE-03", "ARCH-02")
def test_a_box_comes_with_its_description_and_the_positions_of_its_tokens(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = encode(tokenizer, "{" + entry(7, "red dog", (1, 2, 3, 4)) + "}")
    parsed = parse_rollout(ids, tokenizer)
    (found,) = parsed.objects
    assert (found.key, found.index, found.kind, found.desc) == (
        "object_7",
        7,
        "bbox_2d",
        "red dog",
    )
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


@pytest.mark.req("PARSE-01")
@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor])
def test_ids_may_come_as_an_array_or_a_tensor(
    tokenizer: PreTrainedTokenizerFast, kind: Callable[[list[int]], Any]
) -> None:
    ids = encode(tokenizer, "{" + entry(1) + ", " + entry(2) + "}")
    parsed = parse_rollout(kind(ids), tokenizer)
    assert parsed == parse_rollout(ids, tokenizer)
    assert len(parsed.objects) == 2
    assert {type(token_id) for token_id in parsed.prefix_token_ids} == {int}


@pytest.mark.req("PARSE-03")
@pytest.mark.parametrize("n_coords", [6, 8, 40])
def test_a_polygon_has_an_even_number_of_six_or_more_coordinates(
    tokenizer: PreTrainedTokenizerFast, n_coords: int
) -> None:
    bins = list(range(1, n_coords + 1))
    parsed = parse(tokenizer, with_value(f'{{"desc": "roof", "poly": {coords(*bins)}}}'))
    (found,) = parsed.objects
    assert (found.kind, found.coords) == ("poly", bins)
    assert len(found.coord_token_indices) == n_coords


@pytest.mark.req("PARSE-03", "PARSE-01")
@pytest.mark.scenario("Dict keys are not sorted for matching order")
def test_objects_keep_the_order_of_their_appearance(tokenizer: PreTrainedTokenizerFast) -> None:
    parsed = parse(tokenizer, "{" + entry(10) + ", " + entry(2) + "}")
    assert [found.index for found in parsed.objects] == [10, 2]


@pytest.mark.req("PARSE-04")
@pytest.mark.scenario("geometry-first object remains valid under strict parse")
def test_field_order_does_not_matter(tokenizer: PreTrainedTokenizerFast) -> None:
    desc_first = parse(tokenizer, with_value(f'{{"desc": "stop!", "bbox_2d": {BOX}}}'))
    geometry_first = parse(tokenizer, with_value(f'{{"bbox_2d": {BOX}, "desc": "stop!"}}'))
    assert desc_first.objects[0].shape == geometry_first.objects[0].shape
    assert desc_first.objects[0].desc == geometry_first.objects[0].desc == "stop!"


@pytest.mark.req("RES-12", "PARSE-04")
@pytest.mark.parametrize(
    "array",
    [
        "[<|coord_1|>, <|coord_2|>, <|coord_3|>, <|coord_4|>]",
        '[<|coord_1|>, "<|coord_2|>", <|coord_3|>,"<|coord_4|>"]',
    ],
)
def test_bare_coordinate_tokens_are_accepted(
    tokenizer: PreTrainedTokenizerFast, array: str
) -> None:
    parsed = parse(tokenizer, with_value(f'{{"desc": "cat", "bbox_2d": {array}}}'))
    assert [found.coords for found in parsed.objects] == [[1, 2, 3, 4]]


@pytest.mark.req("RES-12", "PARSE-01")
@pytest.mark.parametrize("desc", ["🧿", "🧿 cat 🧿🧿", "猫🧀"])
def test_bare_coordinate_tokens_are_found_behind_characters_in_several_tokens(
    tokenizer: PreTrainedTokenizerFast, desc: str
) -> None:
    array = "[<|coord_1|>, <|coord_2|>,<|coord_3|> , <|coord_4|>]"
    parsed = parse(tokenizer, with_value(f'{{"desc": "{desc}", "bbox_2d": {array}}}'))
    assert [(found.desc, found.coords) for found in parsed.objects] == [(desc, [1, 2, 3, 4])]


@pytest.mark.req("PARSE-03")
@pytest.mark.parametrize("order", [0, 1])
def test_coordinate_tokens_in_a_description_are_no_coordinates(
    tokenizer: PreTrainedTokenizerFast, order: int
) -> None:
    fields = ['"desc": "at <|coord_5|>, [<|coord_6|>]"', f'"bbox_2d": {coords(1, 2, 3, 4)}']
    parsed = parse(tokenizer, with_value("{" + ", ".join(fields[:: 1 - 2 * order]) + "}"))
    (found,) = parsed.objects
    assert found.coords == [1, 2, 3, 4]
    assert found.desc == "at <|coord_5|>, [<|coord_6|>]"


@pytest.mark.req("PARSE-01")
@pytest.mark.parametrize("desc", ["toy 🚀", "🧿🧿", "a🚀", "é猫", "🚀🧿!"])
@pytest.mark.parametrize("order", ["desc_first", "geometry_first"])
def test_characters_in_several_tokens_keep_text_and_positions(
    tokenizer: PreTrainedTokenizerFast, desc: str, order: str
) -> None:
    fields = [f'"desc": "{desc}"', f'"bbox_2d": {coords(1, 2, 3, 4)}']
    if order == "geometry_first":
        fields.reverse()
    text = with_value("{" + ", ".join(fields) + "}")[:-1] + ", " + entry(2) + "}"
    ids = encode(tokenizer, text)
    parsed = parse_rollout(ids, tokenizer)
    assert [found.desc for found in parsed.objects] == [desc, "cat"]
    for found in parsed.objects:
        bins = [token_table(tokenizer).vocab.bins[ids[i]] for i in found.coord_token_indices]
        assert bins == found.coords


@pytest.mark.req("PARSE-01")
@pytest.mark.parametrize("order", ["desc_first", "geometry_first"])
def test_the_tokens_of_an_entry_and_of_its_description_end_where_they_do(
    tokenizer: PreTrainedTokenizerFast, order: str
) -> None:
    fields = [['"desc":', " ", '"', "c", "a", "t", '"'], [f'"bbox_2d": {BOX}']]
    if order == "geometry_first":
        fields.reverse()
    parts = ["{", '"object_1"', ":", " {", *fields[0], ",", *fields[1], "}", " ", "}"]
    ids = [encode(tokenizer, part) for part in parts]
    (found,) = parse_rollout([token for part in ids for token in part], tokenizer).objects
    begin = [sum(map(len, ids[:k])) for k in range(len(parts))]
    assert found.token_span == (begin[1], begin[-2])
    assert found.desc_token_indices == [begin[parts.index(letter)] for letter in "cat"]


@pytest.mark.req("PARSE-01")
def test_escapes_in_a_description_are_read(tokenizer: PreTrainedTokenizerFast) -> None:
    parsed = parse(tokenizer, with_value(rf'{{"desc": "a \"}}\" \\\u00e9", "bbox_2d": {BOX}}}'))
    assert parsed.objects[0].desc == 'a "}" \\é'


@pytest.mark.req("PARSE-05")
@pytest.mark.parametrize("text", ["{}", "{ }", " {\n}"])
def test_an_empty_object_is_a_valid_empty_answer(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    parsed = parse(tokenizer, text)
    assert (parsed.objects, parsed.dropped, parsed.max_object_index) == ([], [], 0)
    assert not parsed.invalid_rollout
    assert not parsed.truncated
    assert prefix(tokenizer, parsed) == text[: text.index("{") + 1]


@pytest.mark.req("PARSE-02")
def test_im_end_ends_the_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    whole = "{" + entry(1) + "}"
    parsed = parse(tokenizer, whole + "<|im_end|>" + ", " + entry(2) + "}")
    assert [found.index for found in parsed.objects] == [1]
    cut_off = parse(tokenizer, "{" + entry(1) + "<|im_end|>, " + entry(2) + "}")
    assert [found.index for found in cut_off.objects] == [1]
    assert cut_off.truncated


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
    assert parsed.truncated
    assert prefix(seeing, parsed) == kept
    blind = parse(tokenizer, text)
    assert blind.objects[-1].desc == f"a {placeholder}"


@pytest.mark.req("PARSE-02")
def test_the_first_of_the_tokens_that_end_an_answer_counts(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    seeing = with_placeholders(tokenizer)
    ends = ["<|im_end|>", *PLACEHOLDERS]
    for first in ends:
        tail = "".join(f"{end}, {entry(i + 3)}" for i, end in enumerate([first, *ends]))
        parsed = parse(seeing, "{" + entry(1) + ", " + entry(2) + tail + "}")
        assert [found.index for found in parsed.objects] == [1, 2]


def test_text_after_the_closing_brace_is_trimmed(tokenizer: PreTrainedTokenizerFast) -> None:
    parsed = parse(tokenizer, "{" + entry(1) + "} {" + entry(2) + "} and so on")
    assert [found.index for found in parsed.objects] == [1]
    assert not parsed.truncated
    assert prefix(tokenizer, parsed) == "{" + entry(1)


# ---- drop reasons --------------------------------------------------------------------


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
@pytest.mark.parametrize("behind", ["", "[]", "[[]]"])
def test_brackets_too_deep_to_be_coordinates_count_as_nested(
    tokenizer: PreTrainedTokenizerFast, behind: str
) -> None:
    deep = "[" * (MAX_BRACKETS + 1) + "]" * (MAX_BRACKETS + 1)
    values = ", ".join(filter(None, [deep, behind]))
    text = "{" + entry(1) + f', "object_2": {{"desc": "cat", "poly": [{values}]}}, ' + entry(3)
    parsed = parse(tokenizer, text)
    assert parsed.dropped == [("object_2", "key_invalid")]
    assert [found.index for found in parsed.objects] == [1, 3]


@pytest.mark.req("PARSE-04")
def test_degenerate_boxes_are_valid(tokenizer: PreTrainedTokenizerFast) -> None:
    parsed = parse(tokenizer, "{" + entry(1, bins=(5, 6, 5, 6)) + "}")
    assert [found.coords for found in parsed.objects] == [[5, 6, 5, 6]]


@pytest.mark.req("PARSE-04", "RES-02")
def test_a_polygon_is_dropped_in_the_two_channel_variant(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = with_value(f'{{"desc": "roof", "poly": {coords(1, 2, 3, 4, 5, 6)}}}')
    assert parse(tokenizer, text, allow_poly=False).dropped == [("object_1", "poly_unsupported")]
    short = with_value(f'{{"desc": "roof", "poly": {coords(1, 2)}}}')
    assert parse(tokenizer, short, allow_poly=False).dropped == [("object_1", "wrong_arity")]


@pytest.mark.req("PARSE-04")
def test_text_that_spells_a_coordinate_token_in_other_tokens_is_none(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
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


@pytest.mark.req("PARSE-04")
@pytest.mark.parametrize(
    "key", ["cat", "object", "object_", "object_x", "Object_2", " object_2", "object_-2", ""]
)
def test_a_key_that_is_not_object_n_is_invalid(
    tokenizer: PreTrainedTokenizerFast, key: str
) -> None:
    text = "{" + entry(1) + ", " + entry(2).replace("object_2", key) + ", " + entry(3) + "}"
    parsed = parse(tokenizer, text)
    assert parsed.dropped == [(key, "key_invalid")]
    assert [found.index for found in parsed.objects] == [1, 3]


@pytest.mark.req("PARSE-04")
@pytest.mark.parametrize("first", [entry(1), '"object_1": {"desc": "cat"}', '"object_1": 5'])
def test_a_repeated_key_is_invalid(tokenizer: PreTrainedTokenizerFast, first: str) -> None:
    parsed = parse(tokenizer, "{" + first + ", " + entry(1, "dog") + "}")
    assert parsed.dropped[-1] == ("object_1", "key_invalid")
    assert [found.desc for found in parsed.objects] == (["cat"] if first == entry(1) else [])


@pytest.mark.req("PARSE-04")
@pytest.mark.parametrize(
    "between", [" ", ",,", ", 5,", ", nonsense ", ": ", ', "loose" ', ", 🚀", ", ] "]
)
def test_an_object_that_is_not_led_up_to_by_one_comma_and_a_key_is_invalid(
    tokenizer: PreTrainedTokenizerFast, between: str
) -> None:
    parsed = parse(tokenizer, "{" + entry(1) + between + entry(2) + ", " + entry(3) + "}")
    assert parsed.dropped == [("object_2", "key_invalid")]
    assert [found.index for found in parsed.objects] == [1, 3]


@pytest.mark.req("PARSE-04")
@pytest.mark.parametrize("between", ["", " ", "::", ": 5 ", ': "loose" ', ": , ", ", "])
def test_an_object_that_does_not_follow_its_key_and_one_colon_is_invalid(
    tokenizer: PreTrainedTokenizerFast, between: str
) -> None:
    apart = f'"object_2"{between}{{"desc": "cat", "bbox_2d": {BOX}}}'
    parsed = parse(tokenizer, "{" + entry(1) + ", " + apart + ", " + entry(3) + "}")
    assert ("object_2", "key_invalid") in parsed.dropped
    assert [found.index for found in parsed.objects] == [1, 3]


@pytest.mark.req("PARSE-04")
def test_an_object_without_a_key_is_invalid(tokenizer: PreTrainedTokenizerFast) -> None:
    parsed = parse(tokenizer, "{" + entry(1) + f', {{"desc": "cat", "bbox_2d": {BOX}}}' + "}")
    assert parsed.dropped == [("", "key_invalid")]
