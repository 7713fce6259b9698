"""Properties of all parsed rollouts and their targets, for any ids."""

from learner.stages.tokens import Tokenizer, token_table
from learner.types import ParsedRollout
from tests.unit.answers import encode, pieces, text_of


def check_parsed(ids: list[int], parsed: ParsedRollout, tokenizer: Tokenizer) -> None:
    """Raise `AssertionError` where `parsed` cannot be what a strict parser makes of `ids`."""
    ends = [i for i, token_id in enumerate(ids) if token_id in token_table(tokenizer).vocab.end_ids]
    answer = ids[: min(ends, default=len(ids))]
    if parsed.invalid_rollout:
        assert not "".join(pieces(tokenizer, answer)).lstrip(" \t\n\r").startswith("{")
        nothing = ParsedRollout([], [], encode(tokenizer, "{"), 0, False, True, [])
        assert parsed == nothing
        return
    check_prefix(answer, parsed, tokenizer)
    check_order(parsed)


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
