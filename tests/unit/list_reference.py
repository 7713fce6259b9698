"""`objects_array` read a second time, plainly, from the words of the format.

It walks over the bytes of an answer one by one, and judges an item as `reference_parser` does; it
shares no code with `learner.stages.formats`.
"""

from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from learner.types import ParsedRollout
from tests.unit.reference_parser import WHITE, Found, read_object, read_symbols

HEAD = ("{", '"objects"', ":", "[")


class Item(NamedTuple):
    start: int
    end: int
    is_object: bool
    well_led: bool


class Piece(NamedTuple):
    """One thing between brackets and commas: an object, or a part of something else."""

    start: int
    end: int
    is_object: bool


def first_of_list(symbols: str) -> int | None:
    """Place behind the bracket that opens the list."""
    at = 0
    for word in HEAD:
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


def items_of(segments: list[list[Piece]], unfinished: bool) -> tuple[list[Item], bool]:
    """The items, and whether one more has begun."""
    items: list[Item] = []
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
                items.append(Item((plain or [piece])[0].start, piece.end, True, led))
                broken, plain, seen = False, [], seen + 1
            elif seen:
                broken = True
            else:
                plain.append(piece)
        if last:
            return items, bool(plain) or unfinished
        if plain:
            items.append(Item(plain[0].start, plain[-1].end, False, False))
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
        assert prefix == "".join(HEAD)
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
    assert [
        Found(
            o.key,
            o.kind,
            o.coords,
            o.desc,
            o.coord_token_indices,
            o.token_span,
            o.desc_token_indices,
        )
        for o in parsed.objects
    ] == objects
