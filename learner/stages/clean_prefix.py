"""The prefix of an answer without some of its objects: repeated ones, or all false positives.

With `prefix: clean` the objects that repeat an earlier one are removed (CLEAN-01, CLEAN-02):

    answer      {"object_1": {cat, A}, "object_2": {cat, A}, "object_3": {dog, B}}
    duplicate                          "object_2": {cat, A}
    prefix      {"object_1": {cat, A}, "object_2": {dog, B}
    departure                                       ^ "cat", where the target has "dog"

Here `A` and `B` are boxes. The objects behind a removed one move up: their keys are numbered anew,
so that the target has no gap, which a model would learn. All other tokens are the answer's own.
With `prefix: matched` every object is removed that no annotation matches (CLEAN-01).
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
    """The tokenizer cannot spell an answer without its duplicates."""


def repeats(
    objects: Sequence[ParsedObject | GroundTruthObject], least_iou: float, resolution: int
) -> list[int]:
    """Places of the objects that repeat an earlier one of the list.

    Both have the same description and an IoU of at least `least_iou`. It is exact of two boxes, and
    that of masks on a canvas of `resolution` where a polygon is in the pair.
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
    """An answer without the objects that repeat others, and those.

    repeated: places in `parsed.objects`. Else as `without`.
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
    """An answer without some of its objects.

    removed: places in `parsed.objects`. answers: the format that `parsed` was read in. Positions in
    the result count in its own prefix. What the parser refused, and how the answer ended, stays.

    Raises `NotRemovable` where the rest does not read as before.
    """
    places = enumerate(index for _, index in parsed.entry_ends)
    kept = [place for place, index in places if index is None or index not in removed]
    ids = answers.keep(parsed, tokenizer, kept)
    rest = answers.parse(ids, tokenizer, allow_poly=allow_poly)
    expected = [item for index, item in enumerate(parsed.objects) if index not in removed]
    if [_said(item) for item in rest.objects] != [_said(item) for item in expected]:
        raise NotRemovable(f"without {len(removed)} of its objects it reads otherwise")
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
    """An answer with its matched objects alone, and their match; raises as `without`."""
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
    """Where the duplicates depart from a finished target, in order and each place once.

    Of several duplicates in a row only the first counts: the others follow what the target does
    not have. A duplicate departs with its first token whose text the target does not have at this
    place. It has no departure where no token of the target begins there, nor where the target goes
    on with the same words (two equal annotations).
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
    """How many items both begin with."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _said(item: ParsedObject) -> tuple[str, str, list[int]]:
    return item.desc, item.kind, item.coords


def _text(token_ids: Sequence[int], tokenizer: Tokenizer) -> TokenText:
    """Their text, in which a token that is part of a character has its id for a text."""
    pieces = token_table(tokenizer).pieces(token_ids, tokenizer)
    return TokenText(
        [
            f"{HALF_CHARACTER}{token}" if HALF_CHARACTER in piece else piece
            for token, piece in zip(token_ids, pieces, strict=True)
        ]
    )
