"""The answers of channel B and what became of each: `rollouts/step_000012.jsonl` (MET-03).

One line per sample, which says all there is to say of it without the data file. Other processes
than the first write `step_000012.rank1.jsonl`. Steps are counted from 1, as in `metrics.jsonl`.
Imports no torch.
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
    """Step and rank of the log with this name; None for the name of anything else."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


# So many equal ids in a row, as the placeholders of an image are, are written as [id, count].
_RUN = 4


def folded(ids: Iterable[int]) -> list[int | list[int]]:
    """Ids with `[id, count]` in place of a run of equal ones; `unfolded` is its inverse."""
    short: list[int | list[int]] = []
    for value, run in groupby(ids):
        count = sum(1 for _ in run)
        short += [[value, count]] if count >= _RUN else [value] * count
    return short


def unfolded(short: Iterable[int | list[int]]) -> list[int]:
    """The ids that `folded` was given."""
    ids: list[int] = []
    for item in short:
        ids += [item[0]] * item[1] if isinstance(item, list) else [item]
    return ids


FoldedIds = Annotated[list[int], BeforeValidator(unfolded), PlainSerializer(folded)]


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
    confidence: Annotated[float | None, Field(exclude_if=lambda value: value is None)] = None


class LoggedParse(_Record):
    """dropped: (key, reason) of each object that the parser refused.

    duplicates: valid ones that repeat another and were removed; `objects` has the rest.
    fault: why the answer was not read as its format, or not to its end.
    """

    truncated: bool
    invalid: bool
    objects: list[LoggedPrediction]
    dropped: list[tuple[str, str]]
    duplicates: Annotated[list[LoggedPrediction], Field(exclude_if=lambda value: not value)] = []
    fault: Annotated[AnswerFault | None, Field(exclude_if=lambda value: value is None)] = None


class LoggedMatch(_Record):
    """pairs: (predicted, ground truth), places in the two lists of objects.

    ious: of each pair, as an evaluation measured it; not in the log of a run.
    unjudged: predictions that are neither right nor false, as an evaluation found (LVIS).
    """

    pairs: list[tuple[int, int]]
    false_positives: list[int]
    false_negatives: list[int]
    gated: int
    ious: Annotated[list[float] | None, Field(exclude_if=lambda value: value is None)] = None
    unjudged: Annotated[list[int], Field(exclude_if=lambda value: not value)] = []


class LoggedTarget(_Record):
    """`Y_train`; fields as in `Target`, but for those that make it short.

    kept: so many of its ids are the first ones of the response. ids: the rest of them.
    keys: of the appended objects. roles: a digit for each id, the value of its `Role`.
    """

    prefix_len: int
    kept: int
    ids: list[int]
    keys: list[str]
    roles: Annotated[str, Field(pattern="^[1-7]*$")]
    groups: list[CoordGroup]
    departures: Annotated[list[Departure], Field(exclude_if=lambda value: not value)] = []

    @classmethod
    def of(cls, target: Target, response: Sequence[int]) -> "LoggedTarget":
        """response: ids of the answer, of which the target keeps the beginning."""
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
        """All of them."""
        return [*response[: self.kept], *self.ids]


class LoggedAnswer(_Record):
    """One answer, and what became of it.

    images: absolute paths. width, height: pixels of the first. weights_version: when it was
    begun and when it was ended. target: where it is supervised; left_out: else, why.
    category_lists: as `Sample` has them. reward: where answers are compared.
    logprobs: of each of `response_token_ids`, where they were requested.
    """

    sample_id: str
    images: list[Path]
    width: int
    height: int
    ground_truth: list[LoggedObject]
    category_lists: Annotated[dict[str, list[str]], Field(exclude_if=lambda value: not value)] = {}
    seed: int | None
    weights_version: tuple[int, int]
    finish_reason: str | None
    repeat_terminated: bool
    supervised: bool
    parse: LoggedParse
    match: LoggedMatch
    target: LoggedTarget | None = None
    left_out: str | None = None
    reward: Annotated[Reward | None, Field(exclude_if=lambda value: value is None)] = None
    text: str
    prompt_token_ids: FoldedIds
    response_token_ids: list[int]
    logprobs: Annotated[list[float] | None, Field(exclude_if=lambda value: value is None)] = None

    @classmethod
    def of(cls, assessed: AssessedRollout, **own: Any) -> Self:
        """The part of an assessed rollout that replay needs. own: fields of a subclass."""
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
        """How many predictions are right or false."""
        return len(self.parse.objects) - len(self.match.unjudged)

    @property
    def hit_pairs(self) -> list[tuple[int, int]]:
        """The matched pairs with the right description: equal in Unicode NFC."""
        said, truths = self.parse.objects, self.ground_truth
        return [
            (p, g)
            for p, g in self.match.pairs
            if normalized(said[p].desc) == normalized(truths[g].desc)
        ]

    @property
    def sample(self) -> Sample:
        """What was asked, as the data file had it."""
        objects = tuple(GroundTruthObject(o.desc, o.shape) for o in self.ground_truth)
        lists = dict(self.category_lists)
        return Sample(self.sample_id, tuple(self.images), self.width, self.height, objects, lists)

    @property
    def rollout(self) -> RolloutOutput:
        """What was answered, as the backend gave it."""
        return RolloutOutput(
            **{each.name: getattr(self, each.name) for each in fields(RolloutOutput)}
        )


def f1_of(answer: LoggedAnswer) -> float:
    """2 hits / (predicted objects + ground truths); 1 where there are none of either."""
    predicted = answer.counted + len(answer.parse.duplicates)
    both = predicted + len(answer.ground_truth)
    return 2 * len(answer.hit_pairs) / both if both else 1.0


class StepAnswer(LoggedAnswer):
    """A line of the log of a run.

    step: from 1. rank: of the learner process that asked. chunk: as in `AssessedRollout`.
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
        """All of a step at once; the file appears whole or not at all.

        step: its number, from 1. places: of the segments of those with a target, in order.

        Raises RunError when the disk is full.
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
