"""Answers and ground truths to test the pure stages with."""

from collections.abc import Iterator
from copy import deepcopy
from functools import cache

from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from learner.stages.formats.coord_json import parse_rollout
from learner.stages.formats.json_objects import MAX_BRACKETS
from learner.stages.tokens import (
    IM_END,
    PLACEHOLDERS,
    Tokenizer,
    coord_token,
    decode_exactly,
    token_table,
)
from learner.types import GroundTruthObject, ParsedRollout, Role, Shape, Target

CAT = GroundTruthObject("cat", Shape("bbox_2d", (10, 20, 300, 400)))
DOG = GroundTruthObject("red dog", Shape("bbox_2d", (500, 510, 700, 710)))
BIRD = GroundTruthObject("bird!", Shape("bbox_2d", (0, 0, 999, 999)))
ROOF = GroundTruthObject("roof", Shape("poly", (0, 0, 500, 0, 500, 500)))


def coords(*bins: int) -> str:
    return "[" + ", ".join(f'"{coord_token(k)}"' for k in bins) + "]"


def entry(index: int, desc: str = "cat", bins: tuple[int, ...] = (10, 20, 300, 400)) -> str:
    """A valid entry of a box."""
    return f'"object_{index}": {{"desc": "{desc}", "bbox_2d": {coords(*bins)}}}'


BOX = coords(10, 20, 300, 400)
# Values of an entry that the strict parser drops, by the reason (PARSE-04).
_BY_REASON = {
    "key_invalid": [
        # not JSON
        '{"desc": "cat", "bbox_2d": ' + BOX[:-1] + "}",
        f'{{"desc": "cat", "bbox_2d": {BOX},}}',
        f'{{"desc": "cat" "bbox_2d": {BOX}}}',
        f'{{"desc": cat, "bbox_2d": {BOX}}}',
        f'{{"desc": "cat\x00", "bbox_2d": {BOX}}}',
        f'{{"desc": NaN, "bbox_2d": {BOX}}}',
        '{"desc": "cat", "bbox_2d": [<|coord_1|><|coord_2|>, <|coord_3|>, <|coord_4|>]}',
        '{"desc": "cat", "bbox_2d": [5<|coord_1|>, <|coord_2|>, <|coord_3|>, <|coord_4|>]}',
        # not a dict
        BOX,
        "<|coord_1|>",
        "",
        # duplicate, extra or nested keys, more than one geometry
        f'{{"desc": "cat", "desc": "dog", "bbox_2d": {BOX}}}',
        f'{{"desc": "cat", "bbox_2d": {BOX}, "score": 1}}',
        f'{{"desc": "cat", "bbox_2d": {BOX}, "poly": {coords(1, 2, 3, 4, 5, 6)}}}',
        f'{{"desc": {{"text": "cat"}}, "bbox_2d": {BOX}}}',
        '{"desc": "cat", "label": "dog"}',
    ],
    "missing_desc": [
        f'{{"bbox_2d": {BOX}}}',
        f'{{"desc": 5, "bbox_2d": {BOX}}}',
        f'{{"desc": "", "bbox_2d": {BOX}}}',
        f'{{"desc": " \\n\\u3000", "bbox_2d": {BOX}}}',
        f'{{"desc": <|coord_1|>, "bbox_2d": {BOX}}}',
        f'{{"bbox_2d": {BOX}, "desc": <|coord_1|>}}',
        f'{{"desc": "cat \\ud800", "bbox_2d": {BOX}}}',
        "{}",
    ],
    "missing_geom": ['{"desc": "cat"}'],
    "unknown_geom": [f'{{"desc": "cat", "bbox": {BOX}}}'],
    "non_coord_token": [
        '{"desc": "cat", "bbox_2d": [1, 2, 3, 4]}',
        '{"desc": "cat", "bbox_2d": [' + "9" * 5000 + "]}",
        '{"desc": "cat", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", 4]}',
        '{"desc": "cat", "bbox_2d": ["<|coord_1|> ", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}',
        '{"desc": "cat", "bbox_2d": ["<|coord_1|><|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}',
        f'{{"desc": "cat", "bbox_2d": {coords(1000, 2, 3, 4)}}}',
        '{"desc": "cat", "bbox_2d": ' + coords(1, 2, 3, 4).replace("<", "\\u003c", 1) + "}",
        f'{{"desc": "cat", "poly": [{coords(1, 2)}, {coords(3, 4)}, {coords(5, 6)}]}}',
        '{"desc": "cat", "poly": [' + ", ".join(["[]"] * 20) + "]}",
        '{"desc": "cat", "poly": ' + "[" * MAX_BRACKETS + "]" * MAX_BRACKETS + "}",
        '{"desc": "cat", "bbox_2d": "<|coord_1|>"}',
    ],
    "wrong_arity": [
        '{"desc": "cat", "bbox_2d": []}',
        f'{{"desc": "cat", "bbox_2d": {coords(1, 2, 3)}}}',
        f'{{"desc": "cat", "poly": {coords(1, 2, 3, 4)}}}',
        f'{{"desc": "cat", "poly": {coords(1, 2, 3, 4, 5, 6, 7)}}}',
    ],
    "bbox_invalid": [
        f'{{"desc": "cat", "bbox_2d": {coords(5, 2, 3, 4)}}}',
        f'{{"desc": "cat", "bbox_2d": {coords(1, 5, 3, 4)}}}',
    ],
}
DROPPED = {value: reason for reason, values in _BY_REASON.items() for value in values}


def with_value(value: str) -> str:
    return f'{{"object_1": {value}}}'


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    return token_table(tokenizer).pieces(token_ids, tokenizer)


def text_of(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return decode_exactly(tokenizer, token_ids)


def text_in_role(tokenizer: Tokenizer, target: Target, role: Role) -> str:
    pairs = zip(target.token_ids, target.role, strict=True)
    return text_of(tokenizer, [token for token, own in pairs if own == role])


def parse(tokenizer: Tokenizer, text: str, *, allow_poly: bool = True) -> ParsedRollout:
    return parse_rollout(encode(tokenizer, text), tokenizer, allow_poly=allow_poly)


def prefix(tokenizer: Tokenizer, parsed: ParsedRollout) -> str:
    return text_of(tokenizer, parsed.prefix_token_ids)


@cache
def with_placeholders(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A copy that has the tokens of images and videos."""
    copied = deepcopy(tokenizer)
    copied.add_tokens([AddedToken(token, special=True) for token in PLACEHOLDERS])
    return copied


DESCRIPTIONS = st.one_of(
    st.sampled_from(["cat", "stop!", "(car)", 'the "old" door', "a\\b", "猫", "toy 🚀", "🧿"]),
    st.from_regex(r"[a-z{}\[\]:,\"\\ ]{0,8}[a-z!)\]}🚀]", fullmatch=True),
)


@st.composite
def ground_truths(draw: st.DrawFn, allow_poly: bool = False) -> GroundTruthObject:
    bins = st.integers(0, 999)
    if allow_poly and draw(st.booleans()):
        points = draw(st.lists(st.tuples(bins, bins), min_size=3, max_size=5))
        return GroundTruthObject(
            draw(DESCRIPTIONS), Shape("poly", tuple(value for point in points for value in point))
        )
    x1, x2 = sorted((draw(bins), draw(bins)))
    y1, y2 = sorted((draw(bins), draw(bins)))
    return GroundTruthObject(draw(DESCRIPTIONS), Shape("bbox_2d", (x1, y1, x2, y2)))


# What answers are put together from, more or less broken.
FRAGMENTS = [
    *'{}[]":,\\',
    " ",
    "\n",
    ", ",
    "}}",
    '"}, "',
    entry(1),
    entry(2, "toy 🚀"),
    entry(3, "wrong", (5, 6, 7)),
    entry(4, "turned", (9, 9, 1, 1)),
    f'"object_5": {{"bbox_2d": {coords(1, 2, 3, 4)}, "desc": "stop!"}}',
    f'"object_6": {{"poly": {coords(1, 2, 3, 4, 5, 6)}, "desc": "toy 🚀"}}',
    '"object_7": {"desc": "bare", "bbox_2d": [<|coord_1|>, <|coord_2|>, <|coord_3|>, <|coord_4|>]}',
    '"object_8": ',
    '"object_9": 5',
    '"object_10": [{"desc": "cat"}]',
    '"desc": ',
    '"bbox_2d": ',
    "<|coord_7|>",
    '"<|coord_8|>"',
    "null",
    "\x00",
    "\\ud800",
    "word",
    "🚀",
    IM_END,
]


@st.composite
def rollouts(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Ids of an answer that is more or less broken."""
    if draw(st.booleans()):
        parts = draw(st.lists(st.sampled_from(FRAGMENTS), max_size=12))
        text = draw(st.sampled_from(["{", " {", ""])) + "".join(parts)
    else:
        entries = [part for part in FRAGMENTS if "object" in part]
        parts = draw(st.lists(st.sampled_from(entries), max_size=6))
        text = "{" + ", ".join(parts) + "}"
    return damaged(draw, encode(tokenizer, text))


def damaged(draw: st.DrawFn, ids: list[int]) -> list[int]:
    """Ids of which up to two are missing, or also the second half."""
    for _ in range(draw(st.integers(0, 2))):
        if ids:
            del ids[draw(st.integers(0, len(ids) - 1))]
    return ids[: draw(st.sampled_from([len(ids), len(ids) // 2]))]


def braces_in(text: str) -> Iterator[tuple[int, str, int]]:
    """Each brace outside of strings: where it is, which one, and how many are open after it."""
    depth, in_string, escaped = 0, False, False
    for offset, char in enumerate(text):
        if in_string:
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            in_string = True
        elif char in "{}":
            depth += 1 if char == "{" else -1
            yield offset, char, depth
