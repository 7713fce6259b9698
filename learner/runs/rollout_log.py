"""The log of channel B's answers: `rollouts/step_000012.jsonl` (MET-03).

One line per sample; readers do not need the data file. Process 1 writes
`step_000012.rank1.jsonl`. Steps count from 1, as in `metrics.jsonl`. Imports no torch.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import groupby, takewhile
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from learner.runs.atomic_files import publish_text
from learner.types import (
    AnswerFault,
    AssessedRollout,
    CoordGroup,
    Departure,
    GeometryKind,
    GroundTruthObject,
    Place,
    Reward,
    RolloutOutput,
    Sample,
    Shape,
    Target,
    normalized,
)

ROLLOUTS = "rollouts"
_NAME = re.compile(r"step_(\d{6,})(?:\.rank([1-9]\d*))?\.jsonl")


def logged_in(name: str) -> tuple[int, int] | None:
    """Return step and rank of a log's name; None for another name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


# Shortest run of equal ids, such as image placeholders, that is written as [id, count].
_RUN = 4


def folded(ids: Iterable[int]) -> list[int | list[int]]:
    """Replace runs of equal ids by `[id, count]`; `unfolded` is the inverse."""
    short: list[int | list[int]] = []
    for value, run in groupby(ids):
        count = sum(1 for _ in run)
        short += [[value, count]] if count >= _RUN else [value] * count
    return short


def unfolded(short: Iterable[int | list[int]]) -> list[int]:
    ids: list[int] = []
    for item in short:
        ids += [item[0]] * item[1] if isinstance(item, list) else [item]
    return ids


FoldedIds = Annotated[list[int], BeforeValidator(unfolded), PlainSerializer(folded)]

# Fields that a line has only if they are set.
_UNLESS_NONE = Field(exclude_if=lambda value: value is None)
_UNLESS_EMPTY = Field(exclude_if=lambda value: not value)


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", from_attributes=True)


class LoggedObject(_Record):
    """A ground-truth object. coords: bins, flat x, y, x, y, ..."""

    desc: str
    kind: GeometryKind
    coords: list[int]

    @property
    def shape(self) -> Shape:
        return Shape(self.kind, tuple(self.coords))


class LoggedPrediction(LoggedObject):
    """confidence: of its box, in an evaluation with log-probabilities; not in a run's log."""

    key: str
    confidence: Annotated[float | None, _UNLESS_NONE] = None


class LoggedParse(_Record):
    """dropped: (key, reason) of each object that the parser refused.

    duplicates: removed valid objects that repeat another; `objects` has the rest.
    fault: why the answer does not have its format, or was not read to its end.
    """

    truncated: bool
    invalid: bool
    objects: list[LoggedPrediction]
    dropped: list[tuple[str, str]]
    duplicates: Annotated[list[LoggedPrediction], _UNLESS_EMPTY] = []
    fault: Annotated[AnswerFault | None, _UNLESS_NONE] = None


class LoggedMatch(_Record):
    """pairs: (predicted, ground truth) indices into the two lists of objects.

    ious: of each pair, in an evaluation; not in the log of a run.
    unjudged: predictions that an LVIS evaluation does not count.
    """

    pairs: list[tuple[int, int]]
    false_positives: list[int]
    false_negatives: list[int]
    gated: int
    ious: Annotated[list[float] | None, _UNLESS_NONE] = None
    unjudged: Annotated[list[int], _UNLESS_EMPTY] = []


class LoggedTarget(_Record):
    """`Y_train`: a `Target` in a shorter form.

    kept: number of its first ids that are those of the response. ids: the other ids.
    keys: of the appended objects. roles: one digit per id, the value of its `Role`.
    """

    prefix_len: int
    kept: int
    ids: list[int]
    keys: list[str]
    roles: Annotated[str, Field(pattern="^[1-7]*$")]
    groups: list[CoordGroup]
    departures: Annotated[list[Departure], _UNLESS_EMPTY] = []

    @classmethod
    def of(cls, target: Target, response: Sequence[int]) -> "LoggedTarget":
        """response: ids of the answer, whose beginning the target keeps."""
        both = zip(target.token_ids[: target.prefix_len], response, strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
        return cls(
            prefix_len=target.prefix_len,
            kept=kept,
            ids=target.token_ids[kept:],
            keys=target.fn_keys,
            roles="".join(map(str, target.role.tolist())),
            groups=target.coord_groups,
            departures=target.departures,
        )

    def token_ids(self, response: Sequence[int]) -> list[int]:
        return [*response[: self.kept], *self.ids]


class LoggedAnswer(_Record):
    """One answer with its parse, match and target.

    images: absolute paths. width, height: pixels of the first image. weights_version: at the start
    and at the end of the answer. target: None for an answer without supervision; left_out: why.
    category_lists: as in `Sample`. reward: if answers are compared. logprobs: of each of
    `response_token_ids`, if they were requested.
    """

    sample_id: str
    images: list[Path]
    width: int
    height: int
    ground_truth: list[LoggedObject]
    category_lists: Annotated[dict[str, list[str]], _UNLESS_EMPTY] = {}
    seed: int | None
    weights_version: tuple[int, int]
    finish_reason: str | None
    repeat_terminated: bool
    supervised: bool
    parse: LoggedParse
    match: LoggedMatch
    target: LoggedTarget | None = None
    left_out: str | None = None
    reward: Annotated[Reward | None, _UNLESS_NONE] = None
    text: str
    prompt_token_ids: FoldedIds
    response_token_ids: list[int]
    logprobs: Annotated[list[float] | None, _UNLESS_NONE] = None

    @classmethod
    def of(cls, assessed: AssessedRollout, **own: Any) -> Self:
        """Make the record of an assessed rollout. own: fields of a subclass."""
        sample, rollout, parsed, match, target, left_out, _, duplicates, reward = assessed
        return cls(
            **vars(rollout),
            **own,
            sample_id=sample.sample_id,
            images=list(sample.images),
            width=sample.width,
            height=sample.height,
            ground_truth=[
                LoggedObject(desc=o.desc, kind=o.shape.kind, coords=list(o.shape.coords))
                for o in sample.objects
            ],
            category_lists=sample.category_lists,
            supervised=target is not None,
            parse=LoggedParse(
                truncated=assessed.truncated,
                invalid=parsed.invalid_rollout,
                objects=[LoggedPrediction.model_validate(o) for o in parsed.objects],
                dropped=parsed.dropped,
                duplicates=[LoggedPrediction.model_validate(d.found) for d in duplicates or ()],
                fault=parsed.fault,
            ),
            match=LoggedMatch.model_validate(match),
            target=LoggedTarget.of(target, rollout.response_token_ids) if target else None,
            left_out=left_out,
            reward=reward,
        )

    @property
    def counted(self) -> int:
        return len(self.parse.objects) - len(self.match.unjudged)

    @property
    def hit_pairs(self) -> list[tuple[int, int]]:
        """The matched pairs with the right description: equal in Unicode NFC."""
        predicted, truths = self.parse.objects, self.ground_truth
        return [
            (p, g)
            for p, g in self.match.pairs
            if normalized(predicted[p].desc) == normalized(truths[g].desc)
        ]

    @property
    def sample(self) -> Sample:
        objects = tuple(GroundTruthObject(o.desc, o.shape) for o in self.ground_truth)
        lists = dict(self.category_lists)
        return Sample(self.sample_id, tuple(self.images), self.width, self.height, objects, lists)

    @property
    def rollout(self) -> RolloutOutput:
        return RolloutOutput(
            **{each.name: getattr(self, each.name) for each in fields(RolloutOutput)}
        )


def f1_of(answer: LoggedAnswer) -> float:
    """Return 2 hits / (predicted objects + ground truths); 1 if there are none of either."""
    predicted = answer.counted + len(answer.parse.duplicates)
    both = predicted + len(answer.ground_truth)
    return 2 * len(answer.hit_pairs) / both if both else 1.0


class StepAnswer(LoggedAnswer):
    """A line of the log of a run.

    step: from 1. rank: of the learner process that requested it. chunk: as in `AssessedRollout`.
    segment: None for an answer that is left out.
    """

    step: int
    rank: int
    chunk: int
    segment: Place | None = None


class RolloutLog:
    """Writes the answers of one process. folder: of the run."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._folder = folder
        self._rank = rank

    def write(
        self, step: int, assessed: Sequence[AssessedRollout], places: Sequence[Place] = ()
    ) -> None:
        """Publish the file of a step.

        step: from 1. places: of the segments of the answers with a target, in order.

        Raises RunError if the disk is full.
        """
        of_rank = f".rank{self._rank}" if self._rank else ""
        file = self._folder / ROLLOUTS / f"step_{step:06d}{of_rank}.jsonl"
        file.parent.mkdir(exist_ok=True)
        left, lines = iter(places), []
        for each in assessed:
            place = next(left, None) if each.target else None
            answer = StepAnswer.of(
                each, step=step, rank=self._rank, chunk=each.chunk, segment=place
            )
            lines.append(answer.model_dump_json() + "\n")
        publish_text(file, "".join(lines))
