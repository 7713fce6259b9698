"""Comparison of a rebuilt step with its log, stage by stage.

It ends with the first stage that differs, because later stages depend on it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, get_args

from learner.analysis.replay.rebuild import LoggedStep, Rebuilder
from learner.runs.declared import ANSWER_FAULTS
from learner.runs.metrics import Payload
from learner.runs.rollout_log import LoggedAnswer, StepAnswer
from learner.types import AssessedRollout
from shared_contracts.errors import ContractError

_FAULTS = {f"stage2_ab/channel_b/{fault}" for fault in ANSWER_FAULTS}

Stage = Literal["parse", "match", "target", "packs", "metrics"]
STAGES: tuple[Stage, ...] = get_args(Stage)

Path = tuple[str | int, ...]
# (logged, rebuilt) for each answer of a process.
Rebuilt = Sequence[tuple[StepAnswer, AssessedRollout]]
# Marks a missing value.
NOTHING = object()


class Values(NamedTuple):
    """A logged and a rebuilt value. rank, answer: None for a value of the whole step."""

    logged: Any
    rebuilt: Any
    rank: int | None = None
    answer: StepAnswer | None = None


@dataclass(frozen=True)
class Difference:
    """The first difference of two values. path: keys and indices. values: at this path."""

    stage: Stage
    path: Path
    values: Values

    @property
    def field(self) -> str:
        """`parse.objects[1].coords[2]`"""
        steps = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path)
        return self.stage + "".join(steps)


@dataclass(frozen=True)
class StageResult:
    """compared: number of compared answers or metrics."""

    compared: int
    differences: list[Difference]


@dataclass(frozen=True)
class Replayed:
    """A rebuilt step. stages: the compared ones."""

    logged: LoggedStep
    ranks: Sequence[Rebuilt]
    stages: Mapping[Stage, StageResult]

    @property
    def first(self) -> Difference | None:
        """The difference of the earliest stage, process and answer."""
        return next((each for result in self.stages.values() for each in result.differences), None)

    def assessed(self, answer: StepAnswer) -> AssessedRollout:
        """Return the rebuilt form of an answer."""
        return next(assessed for own in self.ranks for each, assessed in own if each is answer)


def compare(step: LoggedStep, rebuilder: Rebuilder) -> Replayed:
    """Rebuild a step, and compare each stage with the log."""
    ranks = [list(zip(own, rebuilder.assessed(own), strict=True)) for own in step.ranks]
    results: dict[Stage, StageResult] = {}
    for stage, values in _stages(step, ranks, rebuilder):
        differences = [
            Difference(stage, path, Values(logged, rebuilt, each.rank, each.answer))
            for each in values
            for path, logged, rebuilt in islice(_differences(each.logged, each.rebuilt), 1)
        ]
        results[stage] = StageResult(len(values), differences)
        if differences:
            break
    return Replayed(step, ranks, results)


def _stages(
    step: LoggedStep, ranks: Sequence[Rebuilt], rebuilder: Rebuilder
) -> Iterator[tuple[Stage, list[Values]]]:
    """Yield the values of each stage; the caller stops at a difference, before packs are made."""
    pairs = [(answer, LoggedAnswer.of(assessed)) for own in ranks for answer, assessed in own]
    yield (
        "parse",
        [_values(was, _parse(was), _parse(now)) for was, now in pairs],
    )
    yield (
        "match",
        [_values(was, was.match.model_dump(), now.match.model_dump()) for was, now in pairs],
    )
    yield "target", [_values(was, _target(was), _target(now)) for was, now in pairs]
    payload, packs = Payload(), list[Values]()
    for own in ranks:
        packs += _packs(own, rebuilder, payload)
    yield "packs", packs
    if step.metrics:
        rebuilt = payload.metrics()
        # Earlier versions logged neither answer faults nor counters of 0.
        logged = {
            key: step.metrics.get(key, NOTHING if value and key not in _FAULTS else value)
            for key, value in rebuilt.items()
        }
        yield "metrics", [Values({key: logged[key]}, {key: rebuilt[key]}) for key in rebuilt]


def _values(answer: StepAnswer, logged: Any, rebuilt: Any) -> Values:
    return Values(logged, rebuilt, answer.rank, answer)


def _parse(answer: LoggedAnswer) -> dict[str, Any]:
    """Return the parse without its fault, which earlier versions did not log."""
    return answer.parse.model_dump(exclude={"fault"})


def _target(answer: LoggedAnswer) -> dict[str, Any]:
    """Return the reward and the target with all ids, if they exist."""
    whole: dict[str, Any] = {"supervised": answer.supervised, "left_out": answer.left_out}
    if answer.reward is not None:
        whole["reward"] = answer.reward._asdict()
    if answer.target is None:
        return whole
    target = answer.target
    return {
        **whole,
        "prefix_len": target.prefix_len,
        "keys": target.keys,
        "token_ids": target.token_ids(answer.response_token_ids),
        "roles": [int(digit) for digit in target.roles],
        "groups": [group._asdict() for group in target.groups],
    }


def _packs(own: Rebuilt, rebuilder: Rebuilder, payload: Payload) -> list[Values]:
    """Return the pack places of one process's segments; add its counts to `payload`."""
    answers, assessed = zip(*own, strict=True)
    try:
        packing, counts = rebuilder.packed(answers, assessed)
    except ContractError as error:
        logged = len({answer.segment.pack for answer in answers if answer.segment})
        return [Values(f"{logged} packs", error.found, answers[0].rank)]
    payload.merge(counts)
    places = iter(packing.places)  # of all answers with a target
    rebuilt = [None if each.target is None else asdict(next(places)) for each in assessed]
    segments = [None if each.segment is None else asdict(each.segment) for each in answers]
    return [_values(*values) for values in zip(answers, segments, rebuilt, strict=True)]


def _differences(logged: Any, rebuilt: Any, path: Path = ()) -> Iterator[tuple[Path, Any, Any]]:
    """Yield (path, logged, rebuilt) for each difference of two JSON values, in order."""
    if isinstance(logged, list | tuple) and isinstance(rebuilt, list | tuple):
        logged, rebuilt = dict(enumerate(logged)), dict(enumerate(rebuilt))
    if not (isinstance(logged, dict) and isinstance(rebuilt, dict)):
        if logged != rebuilt:
            yield path, logged, rebuilt
        return
    for key in {**logged, **rebuilt}:
        was, now = logged.get(key, NOTHING), rebuilt.get(key, NOTHING)
        yield from _differences(was, now, (*path, key))
