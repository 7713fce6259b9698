"""`Y_train`: what the model is taught for one sample, and the role of each of its tokens.

    rollout   {"object_1": {cat}, "object_2": {ghost}}      ground truth: cat, dog
    prefix    {"object_1": {cat}, "object_2": {ghost}       ids taken over as they are
    append                                           , "object_3": {dog}}
    EOS                                                                  <|im_end|>

The roles come from the strict parser, run again over the finished ids: its first entries
are those of the prefix, the rest are the appended objects (APPEND-02). A target that
cannot be read back raises `TargetUnreadable`; such a sample is dropped from supervision and
counted (LOSS-02).

The coordinates of an appended object, and of a box matched to a box, are taught the ground
truth's; where a matched pair has a polygon in it, those of the prediction are taught where a
transport plan projects them (OT-01).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from learner.config.rollout_matching import MatchingConfig
from learner.parsing import parse_rollout
from learner.scanner import Scanner
from learner.serialize import object_key, serialize_append, serialize_objects
from learner.tokens import Tokenizer, TokenText, token_table
from learner.transport_plan import projected_bins
from learner.types import (
    CoordGroup,
    FieldOrder,
    GroundTruthObject,
    MatchResult,
    ParsedObject,
    ParsedRollout,
    Role,
    Target,
)

_DEFAULT_MATCHING = MatchingConfig()


class TargetUnreadable(Exception):
    """The strict parser cannot read a finished target back.

    Its outermost `}` or its EOS cannot be located, or an object that was appended is refused.
    """


class _Lesson(NamedTuple):
    """What one supervised entry of a target teaches; fields as in `CoordGroup`."""

    bins: tuple[float, ...]
    matched: bool
    is_box: bool


class _Entry(NamedTuple):
    """One entry of a finished target.

    span: tokens [start, end), with all that leads up to it.
    desc: tokens that hold a character of its description, where it is taught.
    group: its coordinates, and what they are taught; None for a false positive, all of
        which is passed over.
    """

    span: tuple[int, int]
    desc: list[int]
    group: CoordGroup | None


def build_target(
    parsed: ParsedRollout,
    ground_truth: Sequence[GroundTruthObject],
    match: MatchResult,
    tokenizer: Tokenizer,
    field_order: FieldOrder,
    *,
    matching: MatchingConfig = _DEFAULT_MATCHING,
) -> Target:
    """Prefix of the rollout + every ground truth that was not matched + EOS (channel B).

    matching: its `ot_*` make the transport plans of matched pairs with a polygon.
    Raises `TargetUnreadable`, e.g. for a description that contains `<|im_end|>`.
    """
    missed = [ground_truth[j] for j in match.false_negatives]
    assert len(match.pairs) + len(missed) == len(ground_truth)
    start_index = parsed.max_object_index + 1
    prefix_text = "".join(token_table(tokenizer).pieces(parsed.prefix_token_ids, tokenizer))
    append = serialize_append(prefix_text, missed, start_index, field_order)
    matched = {i: _correction(parsed.objects[i], ground_truth[j], matching) for i, j in match.pairs}
    lessons = [None if i is None else matched.get(i) for _, i in parsed.entry_ends]
    return _supervise(
        [*parsed.prefix_token_ids, *tokenizer.encode(append, add_special_tokens=False)],
        lessons + [_addition(item) for item in missed],
        tokenizer,
        prefix_len=len(parsed.prefix_token_ids),
        fn_keys=[object_key(start_index + i) for i in range(len(missed))],
    )


def build_ground_truth_target(
    ground_truth: Sequence[GroundTruthObject], tokenizer: Tokenizer, field_order: FieldOrder
) -> Target:
    """The whole answer from the ground truth, in its order (channel A).

    Raises `TargetUnreadable`, e.g. for a description that contains `<|im_end|>`.
    """
    return _supervise(
        tokenizer.encode(serialize_objects(ground_truth, field_order), add_special_tokens=False),
        [_addition(item) for item in ground_truth],
        tokenizer,
        prefix_len=0,
        fn_keys=[object_key(i + 1) for i in range(len(ground_truth))],
    )


def locate_closure(token_ids: Sequence[int], tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Positions of the token that closes the outermost brace, and of the EOS after it.

    A scan over the text of each token up to the first EOS counts the braces outside of
    strings. None if there is no EOS, or the outermost brace is still open there.
    """
    table = token_table(tokenizer)
    ids = list(token_ids)
    if table.vocab.im_end_id not in ids:
        return None
    eos = ids.index(table.vocab.im_end_id)
    tokens = TokenText(table.pieces(ids[:eos], tokenizer))
    close_at = Scanner(tokens.text).scan().close_at
    return None if close_at is None else (tokens.token_at(close_at), eos)


def _addition(item: GroundTruthObject) -> _Lesson:
    return _Lesson(item.shape.coords, matched=False, is_box=item.shape.kind == "bbox_2d")


def _correction(
    predicted: ParsedObject, item: GroundTruthObject, matching: MatchingConfig
) -> _Lesson:
    if predicted.kind == item.shape.kind == "bbox_2d":
        return _Lesson(item.shape.coords, matched=True, is_box=True)
    bins = projected_bins(
        predicted.shape, item.shape, matching.ot_cost, matching.ot_epsilon, matching.ot_iters
    )
    return _Lesson(bins, matched=True, is_box=False)


def _supervise(
    answer_ids: list[int],
    lessons: list[_Lesson | None],
    tokenizer: Tokenizer,
    *,
    prefix_len: int,
    fn_keys: list[str],
) -> Target:
    """The target of an answer whose entries teach `lessons`, in order; None teaches nothing."""
    vocab = token_table(tokenizer).vocab
    token_ids = [*answer_ids, vocab.im_end_id]
    closure = locate_closure(token_ids, tokenizer)
    if closure is None:
        raise TargetUnreadable(f"no closing brace before the EOS in {len(token_ids)} tokens")
    entries = _read_entries(token_ids, lessons, tokenizer)
    role = _roles(token_ids, entries, vocab.bins)
    role[list(closure)] = Role.CLOSURE
    return Target(
        token_ids=token_ids,
        prefix_len=prefix_len,
        fn_keys=fn_keys,
        role=role,
        coord_groups=[entry.group for entry in entries if entry.group is not None],
    )


def _read_entries(
    token_ids: list[int], lessons: list[_Lesson | None], tokenizer: Tokenizer
) -> list[_Entry]:
    """The entries that the strict parser finds in a target, each with its lesson."""
    again = parse_rollout(token_ids, tokenizer)
    if len(again.entry_ends) != len(lessons):
        raise _unreadable(again)
    spans = _entry_spans([end for end, _ in again.entry_ends], token_ids, tokenizer)
    entries = []
    for span, (_, index), lesson in zip(spans, again.entry_ends, lessons, strict=True):
        if lesson is None:
            entries.append(_Entry(span, [], None))
        elif index is None:
            raise _unreadable(again)
        else:
            found = again.objects[index]
            group = CoordGroup(tuple(found.coord_token_indices), *lesson)
            entries.append(_Entry(span, found.desc_token_indices, group))
    return entries


def _unreadable(again: ParsedRollout) -> TargetUnreadable:
    return TargetUnreadable(f"the strict parser drops {again.dropped} of a finished target")


def _entry_spans(
    ends: list[int], token_ids: list[int], tokenizer: Tokenizer
) -> list[tuple[int, int]]:
    """Tokens [start, end) of each entry with all that leads up to it.

    ends: the token that holds the last character of each.
    A token whose text goes on behind the end of an entry belongs to the next one too.
    """
    spans = []
    start = 0
    pieces = token_table(tokenizer).pieces([token_ids[end] for end in ends], tokenizer)
    for end, piece in zip(ends, pieces, strict=True):
        spans.append((start, end + 1))
        start = end + 1 if piece.endswith("}") else end
    return spans


def _roles(
    token_ids: list[int], entries: list[_Entry], coord_bins: dict[int, int]
) -> npt.NDArray[np.int8]:
    """Role of each token; where tokens are shared, what is written later here wins."""
    role = np.full(len(token_ids), Role.APPENDED_STRUCTURE, dtype=np.int8)
    for entry in entries:
        if entry.group is not None and entry.group.matched:
            role[slice(*entry.span)] = Role.MATCHED_STRUCTURE
    for entry in entries:
        if entry.group is not None:
            desc = Role.MATCHED_DESC if entry.group.matched else Role.APPENDED_DESC
            role[entry.desc] = desc
    role[[i for i, token_id in enumerate(token_ids) if token_id in coord_bins]] = Role.COORD
    for entry in entries:
        if entry.group is None:
            role[slice(*entry.span)] = Role.FALSE_POSITIVE
    return role
