"""`Y_train`: the target of one sample, and the role of each of its tokens.

    rollout   {"object_1": {cat}, "object_2": {ghost}}      ground truth: cat, dog
    prefix    {"object_1": {cat}, "object_2": {ghost}       ids taken over as they are
    append                                           , "object_3": {dog}}
    EOS                                                                  <|im_end|>

The strict parser reads the finished ids again and gives the roles: its first entries are those of
the prefix, the rest are the appended objects (APPEND-02). A target that it cannot read raises
`TargetUnreadable`; such a sample is left out and counted (LOSS-02).

Target coordinates are those of the ground truth for an appended object, and for a box matched to a
box. If one shape of a matched pair is a polygon, a transport plan gives the target of each
coordinate of the prediction (OT-01).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from learner.config.rollout_matching import MatchingConfig
from learner.config.schema import Config
from learner.stages.clean_prefix import (
    NotRemovable,
    clean,
    common_length,
    departures,
    repeats,
    without_false_positives,
)
from learner.stages.formats import AnswerFormat, ReadBack, answer_format, object_key
from learner.stages.formats.coord_json import COORD_JSON
from learner.stages.matching import match_objects
from learner.stages.rewards import with_rewards
from learner.stages.tokens import CoordVocab, Tokenizer, encode_answer, token_table
from learner.stages.transport_plan import projected_bins
from learner.types import (
    AssessedRollout,
    CoordGroup,
    Duplicate,
    FieldOrder,
    GroundTruthObject,
    MatchResult,
    ParsedObject,
    ParsedRollout,
    Role,
    RolloutOutput,
    Sample,
    Target,
)

_DEFAULT_MATCHING = MatchingConfig()


class TargetUnreadable(Exception):
    """The strict parser cannot read a finished target.

    Its outermost `}` or its EOS cannot be located, or an appended object is refused.
    """


class _Entry(NamedTuple):
    """One entry of a finished target.

    span: tokens [start, end), with separator and key.
    desc: tokens with a character of its description, if it is supervised.
    group: its coordinates and their targets; None for a false positive, which is not supervised.
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
    answers: AnswerFormat = COORD_JSON,
    duplicates: Sequence[Duplicate] = (),
) -> Target:
    """Return prefix of the rollout + unmatched ground truths + EOS (channel B).

    matching: its `ot_*` set the transport plans of matched pairs with a polygon.
    answers: the format that `parsed` was read in.
    duplicates: removed from the prefix of `parsed` (CLEAN-01).
    Raises `TargetUnreadable`, e.g. for a description that contains `<|im_end|>`.
    """
    missed = [ground_truth[j] for j in match.false_negatives]
    assert len(match.pairs) + len(missed) == len(ground_truth)
    start_index = parsed.max_object_index + 1
    table = token_table(tokenizer)
    prefix_text = "".join(table.pieces(parsed.prefix_token_ids, tokenizer))
    append = answers.append(prefix_text, missed, start_index, field_order)
    matched = _corrected([(parsed.objects[i], ground_truth[j]) for i, j in match.pairs], matching)
    groups = {i: group for (i, _), group in zip(match.pairs, matched, strict=True)}
    kept = [None if i is None else groups.get(i) for _, i in parsed.entry_ends]
    target = _supervise(
        [*parsed.prefix_token_ids, *encode_answer(tokenizer, append)],
        kept + [_appended(item) for item in missed],
        tokenizer,
        answers,
        prefix_len=len(parsed.prefix_token_ids),
        fn_keys=[object_key(start_index + i) for i in range(len(missed))],
    )
    if not duplicates:
        return target
    return replace(target, departures=departures(duplicates, target.token_ids, tokenizer))


def build_ground_truth_target(
    ground_truth: Sequence[GroundTruthObject],
    tokenizer: Tokenizer,
    field_order: FieldOrder,
    answers: AnswerFormat = COORD_JSON,
) -> Target:
    """Return the answer with all ground truths, in their order (channel A).

    Raises `TargetUnreadable`, e.g. for a description that contains `<|im_end|>`.
    """
    return _supervise(
        encode_answer(tokenizer, answers.write(ground_truth, field_order)),
        [_appended(item) for item in ground_truth],
        tokenizer,
        answers,
        prefix_len=0,
        fn_keys=[object_key(i + 1) for i in range(len(ground_truth))],
    )


def _appended(item: GroundTruthObject) -> CoordGroup:
    """Return the target of an appended object; `_read_entries` adds its positions."""
    return CoordGroup((), item.shape.coords, matched=False, is_box=item.shape.kind == "bbox_2d")


def _corrected(
    pairs: Sequence[tuple[ParsedObject, GroundTruthObject]], matching: MatchingConfig
) -> list[CoordGroup]:
    """Return the targets of matched predictions; `_read_entries` adds their positions."""
    shapes = [(predicted.shape, item.shape) for predicted, item in pairs]
    are_boxes = [predicted.kind == truth.kind == "bbox_2d" for predicted, truth in shapes]
    projected = iter(
        projected_bins(
            [pair for pair, is_box in zip(shapes, are_boxes, strict=True) if not is_box],
            matching.ot_cost,
            matching.ot_epsilon,
            matching.ot_iters,
        )
    )
    return [
        CoordGroup((), truth.coords if is_box else next(projected), matched=True, is_box=is_box)
        for (_, truth), is_box in zip(shapes, are_boxes, strict=True)
    ]


def _supervise(
    answer_ids: list[int],
    groups: list[CoordGroup | None],
    tokenizer: Tokenizer,
    answers: AnswerFormat,
    *,
    prefix_len: int,
    fn_keys: list[str],
) -> Target:
    """Return the target of an answer. groups: one per entry; None: it is not supervised."""
    vocab = token_table(tokenizer).vocab
    token_ids = [*answer_ids, vocab.end_id]
    found = answers.read_back(token_ids, tokenizer)
    if found is None:
        raise TargetUnreadable(f"no closing brace before the EOS in {len(token_ids)} tokens")
    entries = _read_entries(found, groups)
    role = _roles(token_ids, entries, vocab)
    role[list(found.closure)] = Role.CLOSURE
    return Target(
        token_ids=token_ids,
        prefix_len=prefix_len,
        fn_keys=fn_keys,
        role=role,
        coord_groups=[entry.group for entry in entries if entry.group is not None],
    )


def _read_entries(target: ReadBack, groups: list[CoordGroup | None]) -> list[_Entry]:
    again = target.parsed
    unreadable = TargetUnreadable(f"the strict parser drops {again.dropped} of a finished target")
    if len(again.entry_ends) != len(groups):
        raise unreadable
    entries = []
    for span, (_, index), group in zip(target.spans, again.entry_ends, groups, strict=True):
        if group is None:
            entries.append(_Entry(span, [], None))
        elif index is None:
            raise unreadable
        else:
            found = again.objects[index]
            group = group._replace(positions=tuple(found.coord_token_indices))
            entries.append(_Entry(span, found.desc_token_indices, group))
    return entries


def _roles(token_ids: list[int], entries: list[_Entry], vocab: CoordVocab) -> npt.NDArray[np.int8]:
    """Return the role of each token. If several rules fit a token, the later one counts.

    So a token with a character of a false positive is FALSE_POSITIVE, and one with a character of a
    trained description is description. `_supervise` writes `CLOSURE` last.
    """
    role = np.full(len(token_ids), Role.APPENDED_STRUCTURE, dtype=np.int8)
    for entry in entries:
        if entry.group is not None and entry.group.matched:
            role[slice(*entry.span)] = Role.MATCHED_STRUCTURE
    for entry in entries:
        if entry.group is not None:
            desc = Role.MATCHED_DESC if entry.group.matched else Role.APPENDED_DESC
            role[entry.desc] = desc
    role[vocab.coords_of(token_ids)] = Role.COORD
    for entry in entries:
        if entry.group is None:
            role[slice(*entry.span)] = Role.FALSE_POSITIVE
    return role


def whole_answer(
    rollout: RolloutOutput,
    parsed: ParsedRollout,
    match: MatchResult,
    tokenizer: Tokenizer,
) -> Target:
    """Return the answer as the model wrote it, with EOS if the model ended it (GROUP-02).

    Nothing is appended and no coordinate has a target: the reward trains the answer. Tokens behind
    the last entry are closure, or false positives if the answer is truncated. An image placeholder
    ends the answer, as in the parser, because a forward cannot have one there.

    Raises `TargetUnreadable` for an answer without a token.
    """
    vocab = token_table(tokenizer).vocab
    whole = rollout.response_token_ids
    response = list(takewhile(lambda token: token not in vocab.end_ids, whole))
    ended = rollout.finish_reason == "stop" and not rollout.repeat_terminated
    token_ids = [*response, vocab.end_id] if ended and len(response) == len(whole) else response
    if not token_ids:
        raise TargetUnreadable("the answer has no token")
    entries, start = list[_Entry](), 0
    described: dict[int | None, list[int]] = {
        i: parsed.objects[i].desc_token_indices for i, _ in match.pairs
    }
    for end, index in parsed.entry_ends:
        group = CoordGroup((), (), matched=True, is_box=False) if index in described else None
        entries.append(_Entry((start, end + 1), described.get(index, []), group))
        start = end + 1
    role = _roles(token_ids, entries, vocab)
    role[start:] = Role.FALSE_POSITIVE if parsed.truncated else Role.CLOSURE
    return Target(token_ids, len(response), [], role, [])


Match = Callable[[Sequence[ParsedObject], Sequence[GroundTruthObject]], MatchResult]


def assess(
    sample: Sample,
    rollout: RolloutOutput,
    tokenizer: Tokenizer,
    match: Match,
    *,
    allow_poly: bool,
    answers: AnswerFormat = COORD_JSON,
    duplicate_iou: float | None = None,
) -> AssessedRollout:
    """Parse an answer and match its objects to the ground truth; the result has no target.

    allow_poly: false in the two-channel variant, where polygons are dropped.
    duplicate_iou: objects that repeat an earlier one with at least this IoU are removed before
        they are matched (CLEAN-01); None: nothing is removed.
    """
    parsed = answers.parse(rollout.response_token_ids, tokenizer, allow_poly=allow_poly)
    ended = rollout.finish_reason == "stop" and not rollout.repeat_terminated
    if parsed.truncated and ended and parsed.fault is None:  # its last bracket is lost
        parsed = replace(parsed, fault="wrong_container")
    duplicates: tuple[Duplicate, ...] | None = None
    left_out = None
    if duplicate_iou is not None:
        duplicates = ()
        repeated = repeats(parsed.objects, duplicate_iou, _DEFAULT_MATCHING.maskiou_resolution)
        try:
            if repeated:
                parsed, duplicates = clean(
                    parsed, repeated, tokenizer, answers, allow_poly=allow_poly
                )
        except NotRemovable as error:
            left_out = str(error)
    matched = match(parsed.objects, sample.objects)
    return AssessedRollout(
        sample, rollout, parsed, matched, left_out=left_out, duplicates=duplicates
    )


def with_target(assessed: AssessedRollout, tokenizer: Tokenizer, config: Config) -> AssessedRollout:
    """Return `assessed` with `Y_train`, or with the reason why there is none."""
    if assessed.left_out is not None:
        return assessed
    parsed, match, answers = assessed.parsed, assessed.match, answer_format(config)
    try:
        if config.whole_answers:
            target = whole_answer(assessed.rollout, parsed, match, tokenizer)
            return assessed._replace(target=target)
        if config.matched_only:
            parsed, match = without_false_positives(
                parsed, match, tokenizer, answers, allow_poly=config.allow_poly
            )
        target = build_target(
            parsed,
            assessed.sample.objects,
            match,
            tokenizer,
            config.custom.object_field_order,
            matching=config.rollout_matching.matching,
            answers=answers,
            duplicates=assessed.duplicates or (),
        )
    except (NotRemovable, TargetUnreadable) as error:
        return assessed._replace(left_out=str(error))
    return assessed._replace(target=target)


def run_stages(
    samples: Sequence[Sample],
    rollouts: Sequence[RolloutOutput],
    tokenizer: Tokenizer,
    config: Config,
) -> list[AssessedRollout]:
    """Run all stages of channel B on answers: parse, match, target, and rewards of whole groups.

    samples: one for each answer.
    """
    answers, matching = answer_format(config), config.rollout_matching.matching
    assessed = [
        assess(
            sample,
            rollout,
            tokenizer,
            partial(match_objects, config=matching),
            allow_poly=config.allow_poly,
            answers=answers,
            duplicate_iou=config.duplicate_iou,
        )
        for sample, rollout in zip(samples, rollouts, strict=True)
    ]
    assessed = [with_target(each, tokenizer, config) for each in assessed]
    if config.group_relative is None:
        return assessed
    return with_rewards(assessed, config.group_relative, matching.maskiou_resolution)


def kept_logprobs(rollout: RolloutOutput, target: Target) -> list[float]:
    """Return the log-probabilities of the longest common start of answer and target prefix.

    These ids have the same context in both. The first edit ends them, such as a removed duplicate
    (CLEAN-01). Empty for an answer without log-probabilities.
    """
    if rollout.logprobs is None:
        return []
    prefix = target.token_ids[: target.prefix_len]
    return rollout.logprobs[: common_length(prefix, rollout.response_token_ids)]
