"""What holds of every parsed rollout and of its target, whatever the ids are."""

from learner.stages.tokens import Tokenizer, token_table
from learner.types import (
    ParsedObject,
    ParsedRollout,
)
from tests.unit.answers import encode, pieces, text_of


def check_parsed(ids: list[int], parsed: ParsedRollout, tokenizer: Tokenizer) -> None:
    """Raise `AssertionError` where `parsed` cannot be what a strict parser makes of `ids`.

    Its worth is in what it refuses: see `test_a_fault_is_noticed`.
    """
    ends = [i for i, token_id in enumerate(ids) if token_id in token_table(tokenizer).vocab.end_ids]
    answer = ids[: min(ends, default=len(ids))]
    if parsed.invalid_rollout:
        assert not "".join(pieces(tokenizer, answer)).lstrip(" \t\n\r").startswith("{")
        nothing = ParsedRollout([], [], encode(tokenizer, "{"), 0, False, True, [])
        assert parsed == nothing
        return
    check_prefix(answer, parsed, tokenizer)
    check_order(parsed)
    for found in parsed.objects:
        check_object(answer, found, tokenizer)


def check_prefix(answer: list[int], parsed: ParsedRollout, tokenizer: Tokenizer) -> None:
    """The ids up to the cut, the last of them replaced where the cut falls inside it."""
    kept = parsed.prefix_token_ids
    same = 0
    while same < min(len(kept), len(answer)) and kept[same] == answer[same]:
        same += 1
    if kept[same:]:
        replaced = pieces(tokenizer, answer)[same]
        leading = text_of(tokenizer, kept[same:])
        assert replaced.startswith(leading)
        assert replaced != leading
    text = "".join(pieces(tokenizer, kept))
    assert text[-1] in "{}"
    assert text.lstrip(" \t\n\r")[0] == "{"
    least = max((int(n) for n in map(number_of_key, text.split('"object_')[1:]) if n), default=0)
    # A key without a colon counts where it is the name of an entry.
    names = [number_of_key(key.removeprefix("object_") + '":') for key, _ in parsed.dropped]
    assert least <= parsed.max_object_index <= max([least, *(int(n) for n in names if n)])


def number_of_key(text: str) -> str:
    """The number at the beginning, if a key ends behind it, else nothing."""
    digits, quote, rest = text.partition('"')
    is_key = quote and rest.lstrip(" \t\n\r").startswith(":")
    is_number = digits.isascii() and digits.isdecimal() and len(digits) < 640
    return digits if is_key and is_number else ""


def check_order(parsed: ParsedRollout) -> None:
    """Entries and objects in order of appearance, none of them behind the cut."""
    ends = [end for end, _ in parsed.entry_ends]
    assert ends == sorted(ends)
    assert [i for _, i in parsed.entry_ends if i is not None] == list(range(len(parsed.objects)))
    assert ends[-1:] <= [len(parsed.prefix_token_ids) - 1]
    for end, i in parsed.entry_ends:
        assert i is None or parsed.objects[i].token_span[1] == end + 1
    keys = [found.key for found in parsed.objects]
    assert len(set(keys)) == len(keys)


def check_object(answer: list[int], found: ParsedObject, tokenizer: Tokenizer) -> None:
    bins = token_table(tokenizer).vocab.bins
    assert found.key.removeprefix("object_").lstrip("0") == str(found.index or "")
    assert [bins.get(answer[token]) for token in found.coord_token_indices] == found.coords
    assert found.desc.strip()
    if found.kind == "bbox_2d":
        x1, y1, x2, y2 = found.coords
        assert x1 <= x2
        assert y1 <= y2
    else:
        assert len(found.coords) >= 6
        assert len(found.coords) % 2 == 0
    start, end = found.token_span
    text = pieces(tokenizer, answer)
    assert f'"{found.key}"' in "".join(text[start:end])
    assert '"' in text[start]
    assert "}" in text[end - 1]
    positions = found.coord_token_indices + found.desc_token_indices
    assert set(positions) <= set(range(start, end))
    assert len(set(positions)) == len(positions)
    for tokens in (found.coord_token_indices, found.desc_token_indices):
        assert tokens == sorted(tokens)
    first, last = found.desc_token_indices[0], found.desc_token_indices[-1]
    spoken = [token for token in range(first, last + 1) if text[token]]
    assert found.desc_token_indices == spoken
