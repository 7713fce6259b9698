"""The answers of channel B and what became of each: `rollouts/step_000012.jsonl` (MET-03).

One line per sample, which says all there is to say of it without the data file. Other processes
than the first write `step_000012.rank1.jsonl`. Steps are counted from 1, as in `metrics.jsonl`.
Imports no torch.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from learner.answer_files import answers_file
from learner.publish import publish_text
from learner.types import (
    GeometryKind,
    GroundTruthObject,
    MatchResult,
    ParsedRollout,
    RolloutOutput,
    Sample,
    Shape,
    Target,
)

# So many equal ids in a row, as the placeholders of an image are, are written as [id, count].
_RUN = 4


class Judged(NamedTuple):
    """An answer, and what channel B made of it.

    target: what is taught of it; None where it is left out, and left_out says why.
    chunk: of the answers of its step that were asked for at once, from 0.
    """

    sample: Sample
    rollout: RolloutOutput
    parsed: ParsedRollout
    match: MatchResult
    target: Target | None = None
    left_out: str | None = None
    chunk: int = 0


class Segmented(Protocol):
    """Where the segment of an answer went: a `learner.packing.Place`."""

    @property
    def length(self) -> int: ...
    @property
    def pack(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def come(self) -> int: ...


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
    model_config = ConfigDict(extra="forbid")


class LoggedObject(_Record):
    """A ground-truth object. coords: bins, flat x, y, x, y, ..."""

    desc: str
    kind: GeometryKind
    coords: list[int]

    @property
    def shape(self) -> Shape:
        return Shape(self.kind, tuple(self.coords))


class LoggedPrediction(LoggedObject):
    key: str


class LoggedParse(_Record):
    """dropped: (key, reason) of each object that the parser refused."""

    truncated: bool
    invalid: bool
    objects: list[LoggedPrediction]
    dropped: list[tuple[str, str]]


class LoggedMatch(_Record):
    """pairs: (predicted, ground truth), places in the two lists of objects."""

    pairs: list[tuple[int, int]]
    false_positives: list[int]
    false_negatives: list[int]
    gated: int


class LoggedGroup(NamedTuple):
    """The coordinate tokens of a supervised object; fields as in `CoordGroup`."""

    positions: list[int]
    bins: list[float]
    matched: bool
    is_box: bool


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
    groups: list[LoggedGroup]

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
            groups=[
                LoggedGroup(list(g.positions), list(map(float, g.bins)), g.matched, g.is_box)
                for g in target.coord_groups
            ],
        )

    def token_ids(self, response: Sequence[int]) -> list[int]:
        """All of them."""
        return [*response[: self.kept], *self.ids]


class LoggedSegment(_Record):
    """Where it went in its step, and its tokens; fields as in `learner.packing.Place`."""

    length: int
    pack: int
    position: int
    come: int

    @classmethod
    def of(cls, place: Segmented) -> "LoggedSegment":
        return cls(length=place.length, pack=place.pack, position=place.position, come=place.come)


class LoggedAnswer(_Record):
    """One answer, and what became of it.

    images: absolute paths. width, height: pixels of the first. weights_version: when it was
    begun and when it was ended. target: where it is supervised; left_out: else, why.
    """

    sample_id: str
    images: list[Path]
    width: int
    height: int
    ground_truth: list[LoggedObject]
    seed: int | None
    weights_version: tuple[int, int]
    finish_reason: str | None
    repeat_terminated: bool
    supervised: bool
    parse: LoggedParse
    match: LoggedMatch
    target: LoggedTarget | None = None
    left_out: str | None = None
    text: str
    prompt_token_ids: FoldedIds
    response_token_ids: list[int]

    @classmethod
    def of(cls, judged: Judged) -> "LoggedAnswer":
        """What of a judged answer makes it possible to judge it again."""
        sample, rollout, parsed, match, target, left_out, _ = judged
        return cls(
            sample_id=sample.sample_id,
            images=list(sample.images),
            width=sample.width,
            height=sample.height,
            ground_truth=[
                LoggedObject(desc=o.desc, kind=o.shape.kind, coords=list(o.shape.coords))
                for o in sample.objects
            ],
            seed=rollout.seed,
            weights_version=rollout.weights_version,
            finish_reason=rollout.finish_reason,
            repeat_terminated=rollout.repeat_terminated,
            supervised=target is not None,
            parse=LoggedParse(
                truncated=parsed.truncated,
                invalid=parsed.invalid_rollout,
                objects=[
                    LoggedPrediction(key=o.key, kind=o.kind, coords=list(o.coords), desc=o.desc)
                    for o in parsed.objects
                ],
                dropped=list(parsed.dropped),
            ),
            match=LoggedMatch(
                pairs=list(match.pairs),
                false_positives=list(match.false_positives),
                false_negatives=list(match.false_negatives),
                gated=match.gated,
            ),
            target=LoggedTarget.of(target, rollout.response_token_ids) if target else None,
            left_out=left_out,
            text=rollout.text,
            prompt_token_ids=list(rollout.prompt_token_ids),
            response_token_ids=list(rollout.response_token_ids),
        )

    @property
    def sample(self) -> Sample:
        """What was asked, as the data file had it."""
        objects = tuple(GroundTruthObject(o.desc, o.shape) for o in self.ground_truth)
        return Sample(self.sample_id, tuple(self.images), self.width, self.height, objects)


def hits_of(answer: LoggedAnswer) -> int:
    """Matched pairs with the right description."""
    said, truths = answer.parse.objects, answer.ground_truth
    return sum(said[p].desc == truths[g].desc for p, g in answer.match.pairs)


def f1_of(answer: LoggedAnswer) -> float:
    """2 hits / (predicted objects + ground truths); 1 where there are none of either."""
    both = len(answer.parse.objects) + len(answer.ground_truth)
    return 2 * hits_of(answer) / both if both else 1.0


class StepAnswer(LoggedAnswer):
    """A line of the log of a run.

    step: from 1. rank: of the learner process that asked. chunk: as in `Judged`. segment: None
    for an answer that is left out.
    """

    step: int
    rank: int
    chunk: int
    segment: LoggedSegment | None = None


class RolloutLog:
    """Writes the answers of one process. folder: of the run."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._folder = folder
        self._rank = rank

    def write(self, step: int, judged: Sequence[Judged], places: Sequence[Segmented] = ()) -> None:
        """All of a step at once; the file appears whole or not at all.

        step: its number, from 1. places: of the segments of those with a target, in order.

        Raises RunError when the disk is full.
        """
        file = answers_file(self._folder, step, self._rank)
        file.parent.mkdir(exist_ok=True)
        left = iter(places)
        lines = [
            self._line(step, each, next(left, None) if each.target else None) for each in judged
        ]
        publish_text(file, "".join(lines))

    def _line(self, step: int, judged: Judged, place: Segmented | None) -> str:
        answer: dict[str, Any] = dict(LoggedAnswer.of(judged))
        segment = None if place is None else LoggedSegment.of(place)
        own = StepAnswer(step=step, rank=self._rank, chunk=judged.chunk, segment=segment, **answer)
        return own.model_dump_json() + "\n"
