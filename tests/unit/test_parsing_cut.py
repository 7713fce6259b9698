"""The strict parser: where it cuts, where entries end, and numbers (section 8 of the contract)."""

import unicodedata

import pytest
from tokenizers import AddedToken
from tokenizers.normalizers import NFC
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from learner.stages.formats.coord_json import parse_rollout
from learner.stages.tokens import HALF_CHARACTER, IM_END
from learner.types import ParsedRollout
from tests.unit.answers import (
    encode,
    entry,
    parse,
    pieces,
    prefix,
)
from tests.unit.dropped_values import BOX
from tests.unit.toy_bpe import train_toy_tokenizer

# The largest number that counts.
HUGE = 10**639 - 1


@pytest.mark.req("PARSE-05", "PARSE-04")
@pytest.mark.parametrize(
    "tail",
    [
        "",
        ",",
        ", ",
        ', "obj',
        ', "object_9"',
        ', "object_9": {"de',
        ', "object_9": {"desc": "cat", "bbox_2d": ["<|coord_1|>", "',
        ', "object_9": [{"desc": "cat"}',
        ', "object_9": {"desc": "cat", "bbox_2d": [' + "[" * 50,
        " nonsense",
    ],
)
def test_an_unfinished_end_is_cut_after_the_last_complete_object(
    tokenizer: PreTrainedTokenizerFast, tail: str
) -> None:
    kept = "{" + entry(1) + ", " + entry(2)
    parsed = parse(tokenizer, kept + tail)
    assert parsed.truncated
    assert prefix(tokenizer, parsed) == kept
    assert [found.index for found in parsed.objects] == [1, 2]
    assert parsed.max_object_index == 2
    unfinished = [("object_9", "key_invalid")] if '"object_9"' in tail else []
    assert parsed.dropped == unfinished


@pytest.mark.req("PARSE-05")
def test_only_the_token_the_cut_falls_into_is_replaced(
    toy_tokenizer: PreTrainedTokenizerFast, qwen_tokenizer: PreTrainedTokenizerFast
) -> None:
    for tokenizer, fused in ((toy_tokenizer, '"]}}'), (qwen_tokenizer, "}}")):
        ids = encode(tokenizer, "{" + entry(1) + "}")
        assert pieces(tokenizer, ids)[-1] == fused
        parsed = parse_rollout(ids, tokenizer)
        assert parsed.prefix_token_ids[: len(ids) - 1] == ids[:-1]
        rest = parsed.prefix_token_ids[len(ids) - 1 :]
        assert "".join(pieces(tokenizer, rest)) == fused[:-1]
        assert not parsed.truncated


@pytest.mark.req("PARSE-05")
def test_a_comma_fused_to_the_last_brace_is_cut_off(
    toy_tokenizer: PreTrainedTokenizerFast, qwen_tokenizer: PreTrainedTokenizerFast
) -> None:
    for tokenizer, fused in ((toy_tokenizer, '"]},'), (qwen_tokenizer, "},")):
        ids = encode(tokenizer, "{" + entry(1) + ', "object_2": {"desc')
        assert fused in pieces(tokenizer, ids)
        assert prefix(tokenizer, parse_rollout(ids, tokenizer)) == "{" + entry(1)


@pytest.mark.req("PARSE-05")
@pytest.mark.parametrize(
    "text", ["{", "{ ", '{"', '{"object_1', '{"object_1": {"desc": "ca', '{"object_1": 5}']
)
def test_without_a_complete_object_the_first_brace_is_kept(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    parsed = parse(tokenizer, text)
    assert prefix(tokenizer, parsed) == "{"
    assert (parsed.objects, parsed.entry_ends, parsed.max_object_index) == ([], [], 0)
    assert not parsed.invalid_rollout
    assert parsed.truncated == (not text.endswith("}"))


@pytest.mark.req("PARSE-05")
@pytest.mark.parametrize("space", [" ", "\n", " \t\r\n  "])
def test_white_space_before_the_first_brace_is_kept(
    tokenizer: PreTrainedTokenizerFast, space: str
) -> None:
    ids = encode(tokenizer, space) + encode(tokenizer, "{" + entry(1) + "}")
    parsed = parse_rollout(ids, tokenizer)
    assert prefix(tokenizer, parsed) == space + "{" + entry(1)
    assert not parsed.invalid_rollout


@pytest.mark.req("PARSE-05")
@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "no brace",
        "[]",
        "<|coord_1|>",
        "<|im_end|>{}",
        "Sure: {" + entry(1) + "}",
        '"{' + entry(1) + "}",
        "\u00a0{" + entry(1) + "}",
        "\ufeff{" + entry(1) + "}",
    ],
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


@pytest.mark.req("PARSE-05")
@pytest.mark.parametrize(
    ("text", "kept"), [("no brace", "{"), ('{"object_1": {}}', '{"object_1": {}')]
)
def test_a_tokenizer_that_opens_each_text_with_a_token_puts_none_in_the_prefix(
    text: str, kept: str
) -> None:
    toy_tokenizer = train_toy_tokenizer()
    ids = encode(toy_tokenizer, text)
    (opening,) = encode(toy_tokenizer, IM_END)
    toy_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{IM_END} $A", special_tokens=[(IM_END, opening)]
    )
    assert toy_tokenizer.encode("{")[0] == opening
    parsed = parse_rollout(ids, toy_tokenizer)
    assert prefix(toy_tokenizer, parsed) == kept


@pytest.mark.req("PARSE-05", "PARSE-01")
@pytest.mark.parametrize("extra", [[], [HALF_CHARACTER]])
def test_a_cut_inside_a_token_with_part_of_a_character_keeps_the_bytes_of_that_part(
    extra: list[str],
) -> None:
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
def test_a_leading_piece_of_whole_characters_may_need_ids_of_half_ones(
    toy_tokenizer: PreTrainedTokenizerFast,
) -> None:
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


# ---- where entries end ---------------------------------------------------------------


@pytest.mark.req("PARSE-04", "LOSS-01")
@pytest.mark.parametrize(
    "invalid",
    [
        '"object_1"',
        '"object_1":',
        '"object_1" : ',
        '"object_1" none',
        '"object_1": [5] 6',
        '"object_1": 5 "loose"',
    ],
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


# ---- numbering -----------------------------------------------------------------------


@pytest.mark.req("PARSE-06")
@pytest.mark.parametrize(
    ("text", "largest"),
    [
        ("{" + entry(2) + ', "object_9": {"desc": "broken"}}', 9),
        ("{" + entry(9) + ", " + entry(2) + "}", 9),
        ("{" + entry(2) + ', "object_9": {"desc": "unfinished', 2),
        ('{"object_9": 5, ' + entry(2) + "}", 9),
        ("{" + entry(2) + ', "object_9": 5}', 2),
        ('{"object_1": {"object_9": {}}, ' + entry(2) + "}", 9),
        ('{"object_x": {}, "object_": {}, "thing_7": {}}', 0),
        ("{" + entry(1, r"\"object_9\": ") + "}", 1),
        ("{" + entry(10**18) + ", " + entry(2) + "}", 10**18),
        pytest.param("{" + entry(HUGE) + ", " + entry(2) + "}", HUGE, id="639 digits"),
        pytest.param("{" + entry(HUGE + 1) + ", " + entry(2) + "}", 2, id="640 digits"),
        ('{"object_' + "9" * 5000 + '": {}, ' + entry(2) + "}", 2),
        ('{"object_5" \n: {}}', 5),
        ('{"object_5" {}, ' + entry(2) + "}", 5),
        ('{"object_5" 7, ' + entry(2) + "}", 5),
        ("{" + entry(2) + ', "object_5" 7}', 2),
        ('{"object_' + "9" * 640 + '" {}, ' + entry(2) + "}", 2),
    ],
)
def test_the_largest_number_of_any_key_in_the_prefix_counts(
    tokenizer: PreTrainedTokenizerFast, text: str, largest: int
) -> None:
    assert parse(tokenizer, text).max_object_index == largest
