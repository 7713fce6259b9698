"""The strict parser on whatever a model may write (PARSE-01 to PARSE-07)."""

import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from learner.stages.formats.coord_json import parse_rollout
from learner.types import ParsedRollout
from tests.unit.answers import (
    BOX,
    DESCRIPTIONS,
    DROPPED,
    braces_in,
    encode,
    entry,
    ground_truths,
    pieces,
    text_of,
)
from tests.unit.reference_parser import Reading, as_found, parse_slowly, read_symbols

FUZZ = settings(suppress_health_check=list(HealthCheck))

# ---- against the reference -----------------------------------------------------------

FAULTY_KEYS = ("thing", "object_", "Object_2", "object_-1", "object_1", "object_007", "")


@st.composite
def written_objects(draw: st.DrawFn) -> str:
    """A valid value, written in one of the ways that are allowed."""
    item = draw(ground_truths(allow_poly=True))
    desc = draw(st.one_of(st.just(item.desc), st.just("at <|coord_5|>"), DESCRIPTIONS))
    comma = draw(st.sampled_from([", ", ",", " ,\n"]))
    tokens = [
        f"<|coord_{k}|>" if draw(st.booleans()) else f'"<|coord_{k}|>"' for k in item.shape.coords
    ]
    fields = [
        f'"desc": {json.dumps(desc, ensure_ascii=draw(st.booleans()))}',
        f'"{item.shape.kind}": [{comma.join(tokens)}]',
    ]
    return "{" + comma.join(draw(st.permutations(fields))) + "}"


@st.composite
def faulty_objects(draw: st.DrawFn) -> str:
    """A value with one character left out, doubled or replaced that still ends where it did."""
    value = draw(written_objects())
    at = draw(st.integers(1, len(value) - 2))
    char = draw(st.sampled_from(["", value[at] * 2, *'{}[]":,\\ x5']))
    faulty = value[:at] + char + value[at + 1 :]
    closed_at = [offset for offset, _, depth in braces_in(faulty) if depth == 0]
    return faulty if closed_at == [len(faulty) - 1] else value


@st.composite
def faulty_answers(draw: st.DrawFn, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids of an answer with faulty entries, whole or broken off."""
    values = st.one_of(written_objects(), faulty_objects(), st.sampled_from(list(DROPPED)))
    entries = []
    for index in range(draw(st.integers(0, 4))):
        key = draw(st.sampled_from([f"object_{index + 1}"] * 5 + ["object_40", *FAULTY_KEYS]))
        entries.append(f'"{key}"{draw(st.sampled_from([": ", ":", " : "]))}{draw(values)}')
    separator = draw(st.sampled_from([", ", ",", "\n, "]))
    ids = encode(tokenizer, "{" + separator.join(entries) + "}")
    return ids[: draw(st.sampled_from([len(ids), draw(st.integers(1, len(ids)))]))]


@pytest.mark.req("PARSE-01", "PARSE-03", "PARSE-04", "PARSE-05", "PARSE-06", "RES-12")
@FUZZ
@given(data=st.data())
def test_a_slow_parser_written_from_the_contract_finds_the_same(
    tokenizer: PreTrainedTokenizerFast, data: st.DataObject
) -> None:
    ids = data.draw(faulty_answers(tokenizer))
    allow_poly = data.draw(st.booleans())
    parsed = parse_rollout(ids, tokenizer, allow_poly=allow_poly)
    assert as_reading(parsed, tokenizer) == parse_slowly(ids, tokenizer, allow_poly=allow_poly)


def as_reading(parsed: ParsedRollout, tokenizer: PreTrainedTokenizerFast) -> Reading:
    if parsed.invalid_rollout:
        return Reading()
    return Reading(
        prefix=read_symbols(parsed.prefix_token_ids, tokenizer).symbols,
        truncated=parsed.truncated,
        max_object_index=parsed.max_object_index,
        objects=[as_found(found) for found in parsed.objects],
        dropped=parsed.dropped,
        entry_ends=parsed.entry_ends,
    )


# ---- tokens of Qwen that hold a closing brace ----------------------------------------


@pytest.mark.req("PARSE-05", "PARSE-01")
@pytest.mark.parametrize(
    ("before", "least"),
    [
        pytest.param(f'{{"bbox_2d": {BOX}, "desc": "cat', 20, id="in a description"),
        pytest.param(f'{{"desc": "cat", "bbox_2d": {BOX[:-2]}', 2, id="in the last coordinate"),
        pytest.param(f'{{"desc": "cat", "bbox_2d": {BOX[:-1]}', 10, id="in the array"),
        pytest.param(f'{{"desc": "cat", "bbox_2d": {BOX}', 50, id="after the array"),
    ],
)
def test_any_token_of_qwen_that_ends_an_object_is_cut_behind_it(
    qwen_tokenizer: PreTrainedTokenizerFast, before: str, least: int
) -> None:
    """least: how many of them make the object a valid one."""
    ids = encode(qwen_tokenizer, '{"object_7": ' + before)
    text = text_of(qwen_tokenizer, ids)
    valid = 0
    for token_id, piece in braces_of(qwen_tokenizer).items():
        end = end_of_last_object(text + piece)
        if end is None:
            continue
        parsed = parse_rollout([*ids, token_id], qwen_tokenizer)
        assert parsed.prefix_token_ids[: len(ids)] == ids, piece
        assert text_of(qwen_tokenizer, parsed.prefix_token_ids) == (text + piece)[: end + 1]
        assert parsed.entry_ends[-1][0] == len(ids)
        assert (parsed.prefix_token_ids[-1] == token_id) == (end == len(text + piece) - 1)
        if parsed.objects:
            valid += 1
    assert valid >= least


def braces_of(tokenizer: PreTrainedTokenizerFast) -> dict[int, str]:
    """Each token with a closing brace, and its text."""
    texts = pieces(tokenizer, list(range(len(tokenizer))))
    return {token_id: piece for token_id, piece in enumerate(texts) if "}" in piece}


def end_of_last_object(text: str) -> int | None:
    """Offset of the last brace that leaves one open, before the outermost closes."""
    end = None
    for offset, brace, depth in braces_in(text):
        if depth == 0:
            break
        if (brace, depth) == ("}", 1):
            end = offset
    return end


# ---- linear time ---------------------------------------------------------------------

# (what comes once, what comes again and again)
HOSTILE = {
    "objects": ("{", entry(1) + ", "),
    "bare coordinates": (
        "{",
        '"object_1": {"desc": "cat", "bbox_2d": ' + BOX.replace('"', "") + "}, ",
    ),
    "objects with part of a character": ("{", entry(1, "🧿 🧿") + ", "),
    "one coordinate array": ('{"object_1": {"desc": "cat", "poly": [', '"<|coord_1|>", '),
    "one description": ('{"object_1": {"desc": "', "cat"),
    "one description of escapes": ('{"object_1": {"desc": "', r"\\\""),
    "one key": ('{"', "object_1"),
    "white space": ("", " "),
    "white space behind a key": ('{"object_1"', " "),
    "escaped quotes": ("{", '\\"'),
    "opening braces": ("", "{"),
    "opening brackets in an object": ('{"object_1": {"desc": "cat", "bbox_2d": ', "["),
    "commas": ("{", ","),
    "garbage": ("{", 'x } "y": ] 5, '),
}


def hostile_ids(tokenizer: PreTrainedTokenizerFast, shape: str, n: int) -> list[int]:
    start, again = (encode(tokenizer, text) for text in HOSTILE[shape])
    return start + again * n


@pytest.mark.req("PARSE-07")
@pytest.mark.parametrize("shape", HOSTILE)
def test_calls_are_linear_in_the_tokens(toy_tokenizer: PreTrainedTokenizerFast, shape: str) -> None:
    once, twice = (hostile_ids(toy_tokenizer, shape, n) for n in (100, 200))
    parse_rollout(twice, toy_tokenizer)
    calls = count_calls(lambda: parse_rollout(once, toy_tokenizer))
    assert count_calls(lambda: parse_rollout(twice, toy_tokenizer)) <= 2 * calls + 10


def count_calls(work: Callable[[], object]) -> int:
    """Calls of functions, those written in C included."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


LEXEMES = [shape for shape in HOSTILE if shape.startswith(("one ", "white ", "escaped", "garb"))]


@pytest.mark.req("PARSE-07")
@pytest.mark.parametrize("shape", LEXEMES)
def test_a_long_lexeme_is_not_read_again(
    toy_tokenizer: PreTrainedTokenizerFast, shape: str
) -> None:
    # Half a million characters: what steps through their square does not come back.
    again = encode(toy_tokenizer, HOSTILE[shape][1])
    n_characters = len("".join(pieces(toy_tokenizer, again)))
    ids = hostile_ids(toy_tokenizer, shape, 500_000 // n_characters)
    assert parse_rollout(ids, toy_tokenizer).prefix_token_ids
