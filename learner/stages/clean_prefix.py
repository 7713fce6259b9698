"""The prefix of an answer without some of its objects: repeated ones, or all false positives.

With `prefix: clean` the objects that repeat an earlier one are removed (CLEAN-01, CLEAN-02):

    answer      {"object_1": {cat, A}, "object_2": {cat, A}, "object_3": {dog, B}}
    duplicate                          "object_2": {cat, A}
    prefix      {"object_1": {cat, A}, "object_2": {dog, B}
    departure                                       ^ "cat", where the target has "dog"

Here `A` and `B` are boxes. The objects behind a removed one get new numbers, so that the model does
not learn gaps. All other tokens are those of the answer. `prefix: matched` removes each object that
no annotation matches (CLEAN-01).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np

from learner.stages.formats import AnswerFormat
from learner.stages.matching import exact_iou, same_description
from learner.stages.tokens import HALF_CHARACTER, Tokenizer, TokenText, token_table
from learner.types import (
    Departure,
    Duplicate,
    GroundTruthObject,
    MatchResult,
    ParsedObject,
    ParsedRollout,
)


class NotRemovable(Exception):
    """The tokenizer cannot encode an answer without the removed objects."""


def repeats(
    objects: Sequence[ParsedObject | GroundTruthObject], least_iou: float, resolution: int
) -> list[int]:
    """Return the places of the objects that repeat an earlier one of the list.

    Both have the same description and an `exact_iou` of at least `least_iou`.
    """
    alike = same_description(objects, objects) & (
        exact_iou(objects, objects, resolution) >= least_iou
    )
    places: list[int] = np.flatnonzero(np.tril(alike, -1).any(axis=1)).tolist()
    return places


def clean(
    parsed: ParsedRollout,
    repeated: Sequence[int],
    tokenizer: Tokenizer,
    answers: AnswerFormat,
    *,
    allow_poly: bool,
) -> tuple[ParsedRollout, tuple[Duplicate, ...]]:
    """Return an answer without its repeated objects, and the removed objects.

    repeated: places in `parsed.objects`. Other arguments and errors are those of `without`.
    """
    kept: list[int] = []
    duplicates: list[Duplicate] = []
    before: int | None = None
    for place, (_, index) in enumerate(parsed.entry_ends):
        if index is None or index not in repeated:
            kept.append(place)
        else:
            follows = before in repeated
            stream = None if follows else answers.keep(parsed, tokenizer, [*kept, place])
            duplicates.append(Duplicate(parsed.objects[index], stream))
        before = index
    rest = without(repeated, parsed, tokenizer, answers, allow_poly=allow_poly)
    return rest, tuple(duplicates)


def without(
    removed: Collection[int],
    parsed: ParsedRollout,
    tokenizer: Tokenizer,
    answers: AnswerFormat,
    *,
    allow_poly: bool,
) -> ParsedRollout:
    """Return an answer without some of its objects.

    removed: places in `parsed.objects`. answers: the format of `parsed`. Positions in the result
    are those of its own prefix. Dropped entries, faults and the end of the answer stay.

    Raises `NotRemovable` if the parser reads the other objects differently then.
    """
    places = enumerate(index for _, index in parsed.entry_ends)
    kept = [place for place, index in places if index is None or index not in removed]
    ids = answers.keep(parsed, tokenizer, kept)
    rest = answers.parse(ids, tokenizer, allow_poly=allow_poly)
    expected = [item for index, item in enumerate(parsed.objects) if index not in removed]
    if [_content(item) for item in rest.objects] != [_content(item) for item in expected]:
        raise NotRemovable(f"without {len(removed)} of its objects it is read differently")
    return replace(
        rest,
        dropped=parsed.dropped,
        truncated=parsed.truncated,
        invalid_rollout=parsed.invalid_rollout,
        unaligned=parsed.unaligned,
    )


def without_false_positives(
    parsed: ParsedRollout,
    match: MatchResult,
    tokenizer: Tokenizer,
    answers: AnswerFormat,
    *,
    allow_poly: bool,
) -> tuple[ParsedRollout, MatchResult]:
    """Return an answer with its matched objects alone, and their match; raises as `without`."""
    removed = match.false_positives
    if not removed:
        return parsed, match
    rest = without(removed, parsed, tokenizer, answers, allow_poly=allow_poly)
    kept = [index for index in range(len(parsed.objects)) if index not in removed]
    pairs = [(kept.index(prediction), truth) for prediction, truth in match.pairs]
    mask_iou = match.mask_iou[kept]
    return rest, replace(match, pairs=pairs, false_positives=[], mask_iou=mask_iou)


def departures(
    duplicates: Iterable[Duplicate],
    target_ids: Sequence[int],
    tokenizer: Tokenizer,
) -> list[Departure]:
    """Return where the duplicates depart from a finished target, in order, each place once.

    Of several duplicates in a row only the first counts, because the context of the others is not
    in the target. A duplicate departs with its first token whose text differs from the target. It
    has no departure if no token of the target begins there, or if the target continues with the
    same words (two equal annotations).
    """
    target = _text(target_ids, tokenizer)
    found: dict[int, int] = {}
    for stream in (duplicate.stream for duplicate in duplicates):
        if stream is None:
            continue
        text = _text(stream, tokenizer)
        place = common_length(text.text, target.text)
        if place == len(text.text):
            continue
        token = text.token_at(place)
        position = target.token_at(text.start_of(token))
        if target.start_of(position) == text.start_of(token):
            found.setdefault(position, stream[token])
    return [Departure(*each) for each in sorted(found.items())]


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _content(item: ParsedObject) -> tuple[str, str, list[int]]:
    return item.desc, item.kind, item.coords


def _text(token_ids: Sequence[int], tokenizer: Tokenizer) -> TokenText:
    """Return the text of the ids; a token that is part of a character has its id as text."""
    pieces = token_table(tokenizer).pieces(token_ids, tokenizer)
    return TokenText(
        [
            f"{HALF_CHARACTER}{token}" if HALF_CHARACTER in piece else piece
            for token, piece in zip(token_ids, pieces, strict=True)
        ]
    )
