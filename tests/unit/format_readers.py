"""`objects_array` and `compact` read a second time, plainly, from the words of the format.

Neither reader shares code with `learner.stages.formats`. Below each are the parts that its broken
answers are put together from.
"""

import re
from typing import NamedTuple

from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from learner.stages.formats.objects_array import CLOSING, HEAD
from learner.stages.tokens import COORD_BINS, IM_END, Tokenizer, coord_token, token_table
from learner.types import ParsedRollout
from tests.unit.answers import CAT, DOG, FRAGMENTS, ROOF, damaged, encode, text_of
from tests.unit.reference_parser import WHITE, Found, as_found, read_object, read_symbols

# ---- objects_array -------------------------------------------------------------------

LIST_HEAD = ("{", '"objects"', ":", "[")


class Piece(NamedTuple):
    """One thing between brackets and commas: an object, or a part of something else."""

    start: int
    end: int
    is_object: bool
    well_led: bool = False


def first_of_list(symbols: str) -> int | None:
    """Place behind the bracket that opens the list."""
    at = 0
    for word in LIST_HEAD:
        while symbols[at : at + 1] and symbols[at] in WHITE:
            at += 1
        if not symbols.startswith(word, at):
            return None
        at += len(word)
    return at


def string_end(symbols: str, start: int) -> int | None:
    """Place behind the string that begins here; None where it has no end."""
    at = start + 1
    while at < len(symbols):
        if symbols[at] == '"':
            return at + 1
        at += 2 if symbols[at] == "\\" else 1
    return None


def object_end(symbols: str, start: int) -> int | None:
    depth, at = 0, start
    while at < len(symbols):
        if symbols[at] == '"':
            after = string_end(symbols, at)
            if after is None:
                return None
            at = after
            continue
        depth += {"{": 1, "}": -1}.get(symbols[at], 0)
        at += 1
        if depth == 0:
            return at
    return None


class Walk(NamedTuple):
    """segments: pieces between the commas. unfinished: an object has no end.

    stop: place of the bracket or brace that ends the list, None where there is none.
    """

    segments: list[list[Piece]]
    unfinished: bool
    stop: int | None


def walk(symbols: str, at: int) -> Walk:
    segments: list[list[Piece]] = [[]]
    brackets = 0
    while at < len(symbols):
        char = symbols[at]
        if char in WHITE:
            at += 1
        elif char == '"':
            end = string_end(symbols, at)
            if end is None:
                return Walk(segments, False, None)
            if brackets == 0:
                segments[-1].append(Piece(at, end, False))
            at = end
        elif char == "{":
            end = object_end(symbols, at)
            if end is None:
                return Walk(segments, brackets == 0, None)
            if brackets == 0:
                segments[-1].append(Piece(at, end, True))
            at = end
        elif char == "}" or (char == "]" and brackets == 0):
            return Walk(segments, False, at)
        elif char == "," and brackets == 0:
            segments.append([])
            at += 1
        else:
            brackets += {"[": 1, "]": -1}.get(char, 0)
            segments[-1].append(Piece(at, at + 1, False))
            at += 1
    return Walk(segments, False, None)


def items_of(segments: list[list[Piece]], unfinished: bool) -> tuple[list[Piece], bool]:
    items: list[Piece] = []
    broken = False  # what is wrong before the next item
    for number, pieces in enumerate(segments):
        last = number == len(segments) - 1
        if not pieces:
            broken = True
        plain: list[Piece] = []
        seen = 0  # objects of this segment
        for piece in pieces:
            if piece.is_object:
                led = not (broken or plain or seen)
                items.append(Piece((plain or [piece])[0].start, piece.end, True, led))
                broken, plain, seen = False, [], seen + 1
            elif seen:
                broken = True
            else:
                plain.append(piece)
        if last:
            return items, bool(plain) or unfinished
        if plain:
            items.append(Piece(plain[0].start, plain[-1].end, False, False))
            broken = False
    raise AssertionError("there is a last segment")


def check_list(
    ids: list[int], parsed: ParsedRollout, tokenizer: PreTrainedTokenizerFast, allow_poly: bool
) -> None:
    """Raise `AssertionError` where `parsed` is not what the words of the format say."""
    answer = read_symbols(ids, tokenizer)
    symbols = answer.symbols
    prefix = read_symbols(parsed.prefix_token_ids, tokenizer).symbols
    first = first_of_list(symbols)
    assert parsed.invalid_rollout == (first is None)
    if first is None:
        assert prefix == "".join(LIST_HEAD)
        assert not parsed.objects + parsed.dropped + parsed.entry_ends
        return
    found = walk(symbols, first)
    items, begun = items_of(found.segments, found.unfinished)
    cut = max((item.end for item in items if item.is_object), default=first)
    assert prefix == symbols[:cut]
    closed, garbage = False, False
    if found.stop is not None:
        rest = symbols[found.stop + 1 :].lstrip(WHITE)
        closed = symbols[found.stop] == "]" and rest.startswith("}")
        garbage = not closed and (symbols[found.stop] == "}" or rest != "")
    assert parsed.truncated == (not closed)
    objects: list[Found] = []
    dropped: list[tuple[str, str]] = []
    ends: list[tuple[int, int | None]] = []
    for number, item in enumerate(items, 1):
        key = f"object_{number}"
        judged: Found | str = "key_invalid"
        if item.is_object and item.well_led:
            judged = read_object(answer, key, item.start, item.start, item.end, allow_poly)
        if item.end <= cut:
            position = None if isinstance(judged, str) else len(objects)
            ends.append((answer.owner[item.end - 1], position))
        if isinstance(judged, str):
            dropped.append((key, judged))
        else:
            objects.append(judged)
    if begun or garbage:
        dropped.append((f"object_{len(items) + 1}", "key_invalid"))
    assert parsed.dropped == dropped
    assert parsed.entry_ends == ends
    assert parsed.max_object_index == len(ends)
    assert [as_found(each) for each in parsed.objects] == objects


def list_item(desc: str, *bins: int, kind: str = "bbox_2d") -> str:
    listed = ",".join(f'"{coord_token(k)}"' for k in bins)
    return f'{{"desc":"{desc}","{kind}":[{listed}]}}'


CAT_ITEM = list_item("cat", *CAT.shape.coords)
DOG_ITEM = list_item("red dog", *DOG.shape.coords)
LIST_FRAGMENTS = [
    CAT_ITEM,
    CAT_ITEM.replace(":", ": ").replace(",", ", "),
    list_item("toy 🚀", 5, 6, 7, 8),
    list_item("wrong", 5, 6, 7),
    list_item("turned", 9, 9, 1, 1),
    list_item("roof", *ROOF.shape.coords, kind="poly"),
    f'{{"bbox_2d":[{", ".join(map(coord_token, (1, 2, 3, 4)))}],"desc":"bare"}}',
    '{"objects":[',
    "]}",
    "]",
    "}",
    "5",
    '"a"',
    "[",
    '{"desc":"',
    '{"a": 5}',
    "word",
    "\n",
    IM_END,
]


@st.composite
def broken_lists(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    heads = [HEAD, HEAD, ' {"objects" :\n[ ', "{", "", '{"objects":', '{"object_1":[']
    if draw(st.booleans()):
        text = "".join(draw(st.lists(st.sampled_from([*LIST_FRAGMENTS, *FRAGMENTS]), max_size=10)))
    else:
        text = ",".join(draw(st.lists(st.sampled_from(LIST_FRAGMENTS), max_size=6)))
    ending = draw(st.sampled_from(["", CLOSING, "]", "] }\n", "}", '],"more":1}']))
    return damaged(draw, encode(tokenizer, draw(st.sampled_from(heads)) + text + ending))


# ---- compact -------------------------------------------------------------------------

CAT_LINE = "cat<|coord_10|><|coord_20|><|coord_300|><|coord_400|>\n"
DOG_LINE = "red dog<|coord_500|><|coord_510|><|coord_700|><|coord_710|>\n"

# A coordinate token is one character here, so that its text can be nothing else.
FIRST = 0xE000
COORDS = f"[{chr(FIRST)}-{chr(FIRST + COORD_BINS - 1)}]"
OTHERS = COORDS.replace("[", "[^")
LINE = re.compile(rf"(?P<before>{OTHERS}*)(?P<coords>{COORDS}+)(?P<behind>{OTHERS}*)")

Said = tuple[str, str, list[int]]


def plain(ids: list[int], tokenizer: Tokenizer) -> str:
    """The answer up to its end, with a character for each coordinate token."""
    vocab = token_table(tokenizer).vocab
    text, run = "", list[int]()
    for token in [*ids, vocab.end_id]:
        ends = token in vocab.end_ids
        if ends or token in vocab.bins:
            text += text_of(tokenizer, run)
            run = []
            if ends:
                return text
            text += chr(FIRST + vocab.bins[token])
        else:
            run.append(token)
    raise AssertionError("an answer ends")


def judge(line: str, allow_poly: bool) -> Said | str:
    if not re.search(COORDS, line):
        return "missing_geom"
    found = LINE.fullmatch(line)
    if not found or (found["before"] and found["behind"]):
        return "non_coord_token"
    desc = found["before"] + found["behind"]
    if not desc.strip():
        return "missing_desc"
    bins = [ord(char) - FIRST for char in found["coords"]]
    if len(bins) != 4 and (len(bins) < 6 or len(bins) % 2 == 1):
        return "wrong_arity"
    if len(bins) > 4:
        return (desc, "poly", bins) if allow_poly else "poly_unsupported"
    return "bbox_invalid" if bins[2] < bins[0] or bins[3] < bins[1] else (desc, "bbox_2d", bins)


def check_lines(
    ids: list[int], parsed: ParsedRollout, tokenizer: Tokenizer, allow_poly: bool
) -> None:
    text = plain(ids, tokenizer)
    *lines, rest = text.split("\n")
    judged = [judge(line, allow_poly) for line in lines]
    said = [(o.desc, str(o.kind), o.coords) for o in parsed.objects]
    assert said == [each for each in judged if isinstance(each, tuple)]
    refused = [(n, each) for n, each in enumerate(judged, 1) if isinstance(each, str)]
    refused += [(len(lines) + 1, "key_invalid")] if rest not in ("", ".") else []
    assert parsed.dropped == [(f"object_{n}", why) for n, why in refused]
    assert parsed.invalid_rollout == (not lines and rest not in ("", "."))
    assert parsed.truncated == (rest != "." and not parsed.invalid_rollout)
    kept = max((n for n, line in enumerate(lines, 1) if re.search(COORDS, line)), default=0)
    assert plain(parsed.prefix_token_ids, tokenizer) == "".join(f"{x}\n" for x in lines[:kept])
    assert parsed.max_object_index == kept == len(parsed.entry_ends)
    bins = token_table(tokenizer).vocab.bins
    for found in parsed.objects:
        assert [bins[ids[p]] for p in found.coord_token_indices] == found.coords
        held = text_of(tokenizer, [ids[p] for p in found.desc_token_indices])
        assert found.desc in held
        _, end = found.token_span
        before, whole = (text_of(tokenizer, ids[:stop]).count("\n") for stop in (end - 1, end))
        assert before < found.index <= whole


LINE_FRAGMENTS = [
    CAT_LINE,
    CAT_LINE.removeprefix("cat"),
    DOG_LINE,
    "<|coord_5|><|coord_6|><|coord_7|><|coord_8|>stop!\n",
    "roof" + "".join(map(coord_token, ROOF.shape.coords)) + "\n",
    "turned<|coord_9|><|coord_9|><|coord_1|><|coord_1|>\n",
    "<|coord_7|>",
    "<|coord_8|>",
    "\n",
    "\n\n",
    ".",
    ".\n",
    " ",
    "cat",
    "猫",
    "toy 🚀",
    "🧿",
    '{"object_1": ',
    IM_END,
]


@st.composite
def broken_lines(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    lines = draw(st.lists(st.sampled_from(LINE_FRAGMENTS), max_size=10))
    return damaged(draw, encode(tokenizer, "".join(lines)))
