"""The story of one sample, as types; read from top to bottom.

    Sample -> RolloutOutput -> ParsedRollout -> MatchResult -> Target -> Segment -> Pack

A worked example, two ground truths and one prediction that matches the first:

    Sample         image of a cat and a dog            objects = (cat, dog)
    RolloutOutput  '{"object_1": {"desc": "cat", ...}}<|im_end|>'     31 ids
    ParsedRollout  objects = [cat], prefix = all but the last '}'     29 ids
    MatchResult    pairs = [(0, 0)], false_negatives = [1]
    Target         prefix + ', "object_2": {"desc": "dog", ...}}' + EOS   61 ids
    Segment        prompt (80 ids) + target, with positions and pixels   141 ids
    Pack           several segments in one row, at most `capacity` ids

This module imports no torch. `Segment` and `Pack` hold tensors and are in `learner.models.packs`.
"""

import unicodedata
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

GeometryKind = Literal["bbox_2d", "poly"]
FieldOrder = Literal["desc_first", "geometry_first"]
Channel = Literal["A", "B"]
BackendName = Literal["server", "colocate", "hf"]

# Bins of a coordinate (`learner.stages.tokens`).
COORD_BINS = 1000

# Why the parser drops a predicted object (PARSE-04).
DropReason = Literal[
    "key_invalid",
    "missing_desc",
    "missing_geom",
    "unknown_geom",
    "non_coord_token",
    "wrong_arity",
    "bbox_invalid",
    "poly_unsupported",
]

# Why an answer is not read as its format, or not to its end (RES-32).
AnswerFault = Literal["prose_before", "fenced", "other_format", "wrong_container", "text_behind"]


class Shape(NamedTuple):
    """A geometry in norm1000 space: flat x, y, x, y, ... integers in 0..999."""

    kind: GeometryKind
    coords: tuple[int, ...]


# In `Sample.metadata`: LVIS's categories that are verified to be absent from the image, and those
# with objects that are not annotated. Without the first list, all categories are annotated.
NEG_CATEGORIES = "neg_categories"
NOT_EXHAUSTIVE_CATEGORIES = "not_exhaustive_categories"
CATEGORY_LISTS = (NEG_CATEGORIES, NOT_EXHAUSTIVE_CATEGORIES)


def normalized(desc: str) -> str:
    """Return a description in Unicode's form NFC, in which descriptions are compared (RES-20).

    Tokenizers normalize to NFC, so a model can only write this form.
    """
    return unicodedata.normalize("NFC", desc)


@dataclass(frozen=True)
class GroundTruthObject:
    """`shape` of kind bbox_2d is (x1, y1, x2, y2); `desc` from a data file is in NFC."""

    desc: str
    shape: Shape


@dataclass(frozen=True)
class Sample:
    """One line of the data file; `sample_id`: `file:line`; `images`: absolute paths."""

    sample_id: str
    images: tuple[Path, ...]
    width: int
    height: int
    objects: tuple[GroundTruthObject, ...]
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def category_lists(self) -> dict[str, list[str]]:
        """LVIS's lists of the image, by their keys in `metadata`; descriptions are in NFC."""
        lists = {key: self.metadata[key] for key in CATEGORY_LISTS if key in self.metadata}
        return {key: [normalized(name) for name in names] for key, names in lists.items()}


@dataclass(frozen=True)
class RolloutOutput:
    """One answer of a backend (ROLL-01).

    prompt_token_ids: image placeholders expanded.
    response_token_ids: stop-trimmed, without `<|im_end|>`.
    weights_version: at the start and at the end of generation.
    logprobs: log p of each of `response_token_ids` by the unmodified logits, in nats; None if not
        requested.
    """

    prompt_token_ids: list[int]
    response_token_ids: list[int]
    text: str
    finish_reason: str | None
    repeat_terminated: bool
    weights_version: tuple[int, int]
    seed: int | None
    logprobs: list[float] | None = None


@dataclass(frozen=True)
class ParsedObject:
    """A valid predicted object.

    key, index: `object_7`, 7.
    coords: bins in 0..999, in the order they were written.
    coord_token_indices: positions of the coordinate tokens in the response ids.
    token_span: [start, end) of the entry, from its key to the closing brace of its value.
    desc_token_indices: positions of tokens that hold a character of the description value.
    """

    key: str
    index: int
    kind: GeometryKind
    coords: list[int]
    desc: str
    coord_token_indices: list[int]
    token_span: tuple[int, int]
    desc_token_indices: list[int]

    @property
    def shape(self) -> Shape:
        return Shape(self.kind, tuple(self.coords))


@dataclass(frozen=True)
class ParsedRollout:
    """The result of the strict parser (section 8).

    objects: valid ones in order of appearance.
    dropped: (key, reason) of each invalid entry.
    prefix_token_ids: ids up to the cut, ready for an append.
    max_object_index: largest n of any `object_n` key in the prefix, 0 if none.
    truncated: the outermost object is opened, and not closed at the end of the response.
    invalid_rollout: the response has no `{`, or more than white space before it. Never together
        with `truncated`.
    entry_ends: of each top-level entry in the prefix, in order: index of the token with the last
        character of its value, and its index into `objects`, or None if it was dropped.
    unaligned: number of `dropped` entries with a coordinate that is not one coordinate token.
    fault: why the answer could not be read, or only in part; else None. It is for metrics alone,
        so equality ignores it.
    """

    objects: list[ParsedObject]
    dropped: list[tuple[str, str]]
    prefix_token_ids: list[int]
    max_object_index: int
    truncated: bool
    invalid_rollout: bool
    entry_ends: list[tuple[int, int | None]]
    unaligned: int = 0
    fault: AnswerFault | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Duplicate:
    """A valid prediction that repeats an earlier one, removed from the clean prefix (CLEAN-01).

    found: the prediction in the answer.
    stream: ids of the clean prefix before the duplicate, then the ids of the duplicate; None
        directly after another duplicate.
    """

    found: ParsedObject
    stream: list[int] | None


@dataclass(frozen=True)
class MatchResult:
    """pairs: (prediction, ground truth); mask_iou: P x G, NaN where never computed."""

    pairs: list[tuple[int, int]]
    false_positives: list[int]
    false_negatives: list[int]
    gated: int
    mask_iou: "npt.NDArray[np.float64]"


class Role(IntEnum):
    """The role of a token of a sample; the losses map roles to weights.

    Separators, keys and the opening brace belong to the entry behind them. A prediction that is not
    matched or was dropped is FALSE_POSITIVE as a whole, with its coordinates. A token that two
    entries share is FALSE_POSITIVE if one of them is. Every other coordinate token is COORD, also
    one inside a description, which no `CoordGroup` has. No coordinate token gets cross-entropy
    (LOSS-01).
    """

    PROMPT = 0
    MATCHED_STRUCTURE = 1
    MATCHED_DESC = 2
    FALSE_POSITIVE = 3
    APPENDED_STRUCTURE = 4
    APPENDED_DESC = 5
    COORD = 6
    CLOSURE = 7


class CoordGroup(NamedTuple):
    """Coordinate tokens of one supervised object.

    positions: of the coordinate tokens in the target ids (4 for a box).
    bins: targets in [0, 999], one per position: bins of the ground truth, or fractional bins of a
        transport plan (OT-01).
    matched: true for a prediction corrected to its ground truth, false for an appended
        (or teacher-forced) object.
    is_box: the bins are a ground truth's x1, y1, x2, y2, so that losses on decoded boxes
        may use them.
    """

    positions: tuple[int, ...]
    bins: tuple[float, ...]
    matched: bool
    is_box: bool


class Departure(NamedTuple):
    """Where a removed duplicate departs from the target (CLEAN-02).

    position: in the target ids. token_id: the token of the duplicate at this place.
    """

    position: int
    token_id: int


@dataclass(frozen=True)
class Target:
    """`Y_train` of one sample: prefix + appended objects + EOS (section 8).

    token_ids: length T, ends with EOS (`<|im_end|>`).
    prefix_len: number of ids from the rollout.
    fn_keys: keys of the appended objects.
    role: int8 array of length T with values of `Role`, none of them PROMPT.
    coord_groups: one per supervised object, matched ones first.
    departures: only with a clean prefix; sorted, no two at one place.
    """

    token_ids: list[int]
    prefix_len: int
    fn_keys: list[str]
    role: "npt.NDArray[np.int8]"
    coord_groups: list[CoordGroup]
    departures: list[Departure] = field(default_factory=list)


class Reward(NamedTuple):
    """The reward of an answer, and its advantages within its group (GROUP-01).

    f1: F1@mIoU of this answer, in [0, 1]. duplicates, oversized, invalid: shares of its entries, in
    [0, 1]. total: the weighted sum. spread: the standard deviation of `total` over the group.
    advantage: `total` relative to the group. credits: with `credit: object`, the advantage of each
    entry of the answer, then that of the tokens after the last entry; else None.
    """

    f1: float
    duplicates: float
    oversized: float
    invalid: float
    total: float
    spread: float = 0.0
    advantage: float = 0.0
    credits: tuple[float, ...] | None = None


class AssessedRollout(NamedTuple):
    """An answer, its objects, their match, and its target.

    parsed: with a clean prefix, the answer without its duplicates. duplicates: the removed objects;
        None without a clean prefix.
    target: None if the answer is not trained on; left_out is the reason.
    chunk: number of its part of the step, from 0.
    reward: in runs with groups of answers.
    """

    sample: Sample
    rollout: RolloutOutput
    parsed: ParsedRollout
    match: MatchResult
    target: Target | None = None
    left_out: str | None = None
    chunk: int = 0
    duplicates: tuple[Duplicate, ...] | None = None
    reward: Reward | None = None

    @property
    def truncated(self) -> bool:
        unopened = self.parsed.invalid_rollout and self.rollout.finish_reason == "length"
        return self.parsed.truncated or unopened


@dataclass(frozen=True)
class Place:
    """A segment of a step: its tokens, the number of its pack, and the position there, from 0.

    come: segments of the step that had arrived when the pack was made.
    """

    length: int
    pack: int
    position: int
    come: int
