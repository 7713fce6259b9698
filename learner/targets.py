"""`Y_train`: what the model is taught for one sample, and the role of each of its tokens.

    rollout   {"object_1": {cat}, "object_2": {ghost}}      ground truth: cat, dog
    prefix    {"object_1": {cat}, "object_2": {ghost}       ids taken over as they are
    append                                           , "object_3": {dog}}
    EOS                                                                  <|im_end|>

The roles come from the strict parser, run again over the finished ids: its first entries
are those of the prefix, the rest are the appended objects (APPEND-02). A target in which
the closing brace or the EOS is not where it must be raises `ClosureNotFound`; such a
sample is dropped from supervision and counted (LOSS-02).

Left out: matched pairs with a polygon on either side get the role COORD and no
`CoordGroup`; their targets need a transport plan (OT-01).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from learner.parsing import parse_rollout, scan_answer
from learner.serialize import object_key, serialize_append, serialize_objects
from learner.tokens import Tokenizer, token_table
from learner.types import (
    CoordGroup,
    FieldOrder,
    GroundTruthObject,
    MatchResult,
    ParsedObject,
    ParsedRollout,
    Role,
    Shape,
    Target,
)

# One entry of a target: the ground truth it is taught from, None for a false positive,
# and whether a prediction was matched to it.
_Lesson = tuple[GroundTruthObject, bool] | None


class ClosureNotFound(Exception):
    """The outermost `}` or the EOS of a target cannot be located."""


def build_target(
    parsed: ParsedRollout,
    ground_truth: Sequence[GroundTruthObject],
    match: MatchResult,
    tokenizer: Tokenizer,
    field_order: FieldOrder,
) -> Target:
    """Prefix of the rollout + every ground truth that was not matched + EOS (channel B).

    Raises `ClosureNotFound`, e.g. for a description that contains `<|im_end|>`.
    """
    table = token_table(tokenizer)
    missed = [ground_truth[j] for j in match.false_negatives]
    assert len(match.pairs) + len(missed) == len(ground_truth)
    start_index = parsed.max_object_index + 1
    prefix_text = "".join(table.pieces(parsed.prefix_token_ids, tokenizer))
    append = serialize_append(prefix_text, missed, start_index, field_order)
    token_ids = [
        *parsed.prefix_token_ids,
        *tokenizer.encode(append, add_special_tokens=False),
        table.vocab.im_end_id,
    ]
    matched = {i: (ground_truth[j], True) for i, j in match.pairs}
    lessons: list[_Lesson] = [None if i is None else matched.get(i) for _, i in parsed.entry_ends]
    lessons += [(item, False) for item in missed]
    role, coord_groups = _supervise(token_ids, lessons, tokenizer)
    return Target(
        token_ids=token_ids,
        prefix_len=len(parsed.prefix_token_ids),
        fn_keys=[object_key(start_index + i) for i in range(len(missed))],
        role=role,
        coord_groups=coord_groups,
    )


def build_ground_truth_target(
    ground_truth: Sequence[GroundTruthObject], tokenizer: Tokenizer, field_order: FieldOrder
) -> Target:
    """The whole answer from the ground truth, in its order (channel A).

    Raises `ClosureNotFound`, e.g. for a description that contains `<|im_end|>`.
    """
    token_ids = tokenizer.encode(
        serialize_objects(ground_truth, field_order), add_special_tokens=False
    )
    token_ids.append(token_table(tokenizer).vocab.im_end_id)
    lessons: list[_Lesson] = [(item, False) for item in ground_truth]
    role, coord_groups = _supervise(token_ids, lessons, tokenizer)
    return Target(
        token_ids=token_ids,
        prefix_len=0,
        fn_keys=[object_key(i + 1) for i in range(len(ground_truth))],
        role=role,
        coord_groups=coord_groups,
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
    scan = scan_answer(table.pieces(ids[:eos], tokenizer), ids[:eos], table.vocab)
    return None if scan.close_at is None else (scan.close_at.token, eos)


def _supervise(
    token_ids: list[int], lessons: list[_Lesson], tokenizer: Tokenizer
) -> tuple[npt.NDArray[np.int8], list[CoordGroup]]:
    """Roles and coordinate groups of a target whose entries teach `lessons`, in order."""
    closure = locate_closure(token_ids, tokenizer)
    if closure is None:
        raise ClosureNotFound(f"no closing brace before the EOS in {len(token_ids)} tokens")
    again = parse_rollout(token_ids, tokenizer)
    spans = _entry_spans(again, token_ids, tokenizer)
    entries = [
        (span, None if i is None else again.objects[i], lesson)
        for span, (_, i), lesson in zip(spans, again.entry_ends, lessons, strict=True)
    ]
    role = _roles(token_ids, entries, token_table(tokenizer).vocab.bins)
    role[list(closure)] = Role.CLOSURE
    groups = [
        _coord_group(found, *lesson)
        for _, found, lesson in entries
        if found is not None and lesson is not None
    ]
    supervised = [group for group in groups if group is not None]
    return role, sorted(supervised, key=lambda group: not group.matched)


def _entry_spans(
    parsed: ParsedRollout, token_ids: list[int], tokenizer: Tokenizer
) -> list[tuple[int, int]]:
    """Tokens [start, end) of each entry with all that leads up to it.

    A token whose text goes on behind the end of an entry belongs to the next one too.
    """
    spans = []
    start = 0
    for last, _ in parsed.entry_ends:
        spans.append((start, last + 1))
        (piece,) = token_table(tokenizer).pieces([token_ids[last]], tokenizer)
        start = last + 1 if piece.endswith("}") else last
    return spans


def _roles(
    token_ids: list[int],
    entries: list[tuple[tuple[int, int], ParsedObject | None, _Lesson]],
    coord_bins: dict[int, int],
) -> npt.NDArray[np.int8]:
    """Role of each token; where tokens are shared, what is written later here wins."""
    role = np.full(len(token_ids), Role.APPENDED_STRUCTURE, dtype=np.int8)
    for (start, end), _, lesson in entries:
        if lesson is not None and lesson[1]:
            role[start:end] = Role.MATCHED_STRUCTURE
    for _, found, lesson in entries:
        if lesson is not None and found is not None:
            role[found.desc_token_indices] = Role.MATCHED_DESC if lesson[1] else Role.APPENDED_DESC
    role[[i for i, token_id in enumerate(token_ids) if token_id in coord_bins]] = Role.COORD
    for (start, end), _, lesson in entries:
        if lesson is None:
            role[start:end] = Role.FALSE_POSITIVE
    return role


def _coord_group(found: ParsedObject, item: GroundTruthObject, matched: bool) -> CoordGroup | None:
    """Coordinates to teach; None for a matched pair with a polygon in it."""
    if matched and {found.kind, item.shape.kind} != {"bbox_2d"}:
        return None
    shape: Shape = item.shape
    return CoordGroup(
        positions=tuple(found.coord_token_indices),
        bins=tuple(shape.coords),
        matched=matched,
        is_box=shape.kind == "bbox_2d",
    )
