"""The answers of channel B and what became of each: `rollouts/step_000012.jsonl` (MET-03).

One line per sample, which says all there is to say of it without the data file. Other processes
than the first write `step_000012.rank1.jsonl`. Steps are counted from 0, as in
`rollout_calls.jsonl`: step 12 is the line of `"step": 13` in `metrics.jsonl`, where a step is
counted when it is done. Imports no torch.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

from learner.log_cut import ROLLOUTS
from learner.publish import publish_text
from learner.types import (
    GeometryKind,
    GroundTruthObject,
    MatchResult,
    ParsedRollout,
    RolloutOutput,
    Sample,
    Shape,
)

# So many equal ids in a row, as the placeholders of an image are, are written as [id, count].
_RUN = 4


class Judged(NamedTuple):
    """An answer, and what channel B made of it. supervised: it is trained on."""

    sample: Sample
    rollout: RolloutOutput
    parsed: ParsedRollout
    match: MatchResult
    supervised: bool


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


class LoggedAnswer(_Record):
    """One answer, and what became of it.

    images: absolute paths. width, height: pixels of the first. weights_version: when it was
    begun and when it was ended.
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
    text: str
    prompt_token_ids: FoldedIds
    response_token_ids: list[int]

    @classmethod
    def of(cls, judged: Judged) -> "LoggedAnswer":
        sample, rollout, parsed, match, supervised = judged
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
            supervised=supervised,
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
            text=rollout.text,
            prompt_token_ids=list(rollout.prompt_token_ids),
            response_token_ids=list(rollout.response_token_ids),
        )

    @property
    def sample(self) -> Sample:
        """What was asked, as the data file had it."""
        objects = tuple(GroundTruthObject(o.desc, o.shape) for o in self.ground_truth)
        return Sample(self.sample_id, tuple(self.images), self.width, self.height, objects)


class StepAnswer(LoggedAnswer):
    """A line of the log of a run. rank: of the learner process that asked."""

    step: int
    rank: int


class RolloutLog:
    """Writes the answers of one process. folder: of the run."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._folder = folder / ROLLOUTS
        self._rank = rank

    def write(self, step: int, judged: Sequence[Judged]) -> None:
        """All of a step at once; the file appears whole or not at all.

        Raises RunError when the disk is full.
        """
        self._folder.mkdir(exist_ok=True)
        lines = [self._line(step, each) for each in judged]
        publish_text(answers_file(self._folder, step, self._rank), "".join(lines))

    def _line(self, step: int, judged: Judged) -> str:
        answer: dict[str, Any] = dict(LoggedAnswer.of(judged))
        return StepAnswer(step=step, rank=self._rank, **answer).model_dump_json() + "\n"


def answers_file(folder: Path, step: int, rank: int) -> Path:
    """The log of one process's answers. folder: `rollouts` of a run."""
    of_rank = f".rank{rank}" if rank else ""
    return folder / f"step_{step:06d}{of_rank}.jsonl"
