"""A step rebuilt from its answers, and compared with its log stage by stage.

The comparison ends with the first stage that differs, because all later stages follow from it.
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
# The answers of a process, each with what was rebuilt of it.
Rebuilt = Sequence[tuple[StepAnswer, AssessedRollout]]
# A value that one side does not have.
NOTHING = object()


class Values(NamedTuple):
    """A logged and a rebuilt value. rank, answer: None for a value of the whole step."""

    logged: Any
    rebuilt: Any
    rank: int | None = None
    answer: StepAnswer | None = None


@dataclass(frozen=True)
class Difference:
    """The first place where two values differ. path: keys and indices. values: at that place."""

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
    """compared: answers, or numbers."""

    compared: int
    differences: list[Difference]


@dataclass(frozen=True)
class Replayed:
    """A rebuilt step. stages: those that were compared."""

    logged: LoggedStep
    ranks: Sequence[Rebuilt]
    stages: Mapping[Stage, StageResult]

    @property
    def first(self) -> Difference | None:
        """The difference of the earliest stage, process and answer."""
        return next((each for result in self.stages.values() for each in result.differences), None)

    def assessed(self, answer: StepAnswer) -> AssessedRollout:
        """What was rebuilt of an answer."""
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
    """The values of each stage; packs are made only if all stages before are identical."""
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
        # An earlier version logged neither faults of answers nor each counter that is 0.
        logged = {
            key: step.metrics.get(key, NOTHING if value and key not in _FAULTS else value)
            for key, value in rebuilt.items()
        }
        yield "metrics", [Values({key: logged[key]}, {key: rebuilt[key]}) for key in rebuilt]


def _values(answer: StepAnswer, logged: Any, rebuilt: Any) -> Values:
    return Values(logged, rebuilt, answer.rank, answer)


def _parse(answer: LoggedAnswer) -> dict[str, Any]:
    """The parse without its fault: an earlier version logged none."""
    return answer.parse.model_dump(exclude={"fault"})


def _target(answer: LoggedAnswer) -> dict[str, Any]:
    """The reward, and the target with all ids, wherever the log has them."""
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
    """The places of the segments of one process; its counts go into `payload`."""
    answers, assessed = zip(*own, strict=True)
    try:
        packing, counts = rebuilder.packed(answers, assessed)
    except ContractError as error:
        logged = len({answer.segment.pack for answer in answers if answer.segment})
        return [Values(f"{logged} packs", error.found, answers[0].rank)]
    payload.merge(counts)
    places = iter(packing.places)  # of all answers but those that are left out
    rebuilt = [None if each.target is None else asdict(next(places)) for each in assessed]
    segments = [None if each.segment is None else asdict(each.segment) for each in answers]
    return [_values(*values) for values in zip(answers, segments, rebuilt, strict=True)]


def _differences(logged: Any, rebuilt: Any, path: Path = ()) -> Iterator[tuple[Path, Any, Any]]:
    """(path, logged, rebuilt) of each differing value of two JSON values, in order."""
    if isinstance(logged, list | tuple) and isinstance(rebuilt, list | tuple):
        logged, rebuilt = dict(enumerate(logged)), dict(enumerate(rebuilt))
    if not (isinstance(logged, dict) and isinstance(rebuilt, dict)):
        if logged != rebuilt:
            yield path, logged, rebuilt
        return
    for key in {**logged, **rebuilt}:
        was, now = logged.get(key, NOTHING), rebuilt.get(key, NOTHING)
        yield from _differences(was, now, (*path, key))
