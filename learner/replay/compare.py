"""What was logged of a step against what was built again, stage by stage.

An answer is compared up to the first stage at which it differs, as all after it follow from that;
packs are compared where all answers are identical, and metrics where packs are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from learner.metrics import Payload
from learner.replay.logged import LoggedStep
from learner.replay.rebuild import Rebuilder, places_of, segment_of
from learner.rollout_log import Judged, LoggedAnswer, LoggedTarget, StepAnswer
from shared_contracts.errors import ContractError

Stage = Literal["parse", "match", "target", "length", "packs", "metrics"]
STAGES: tuple[Stage, ...] = get_args(Stage)


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


NOTHING = _Nothing()


class Differing(NamedTuple):
    """The first place where two values of JSON differ.

    path: keys and indices. inside: both values that it is directly in.
    """

    path: tuple[str | int, ...]
    logged: Any
    rebuilt: Any
    inside: tuple[Any, Any]


@dataclass(frozen=True)
class Difference:
    """answer: what it is about, with what was built of it; None for one of the whole step.

    rank: None where it is about all processes.
    """

    stage: Stage
    at: Differing
    rank: int | None = None
    answer: tuple[StepAnswer, Judged] | None = None

    @property
    def field(self) -> str:
        """`parse.objects[1].coords[2]`"""
        steps = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.at.path)
        return self.stage + "".join(steps)


@dataclass
class StageResult:
    """compared: so many answers, segments or numbers. note: why there are none."""

    compared: int = 0
    differences: list[Difference] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class Replayed:
    """A step that was built again. ranks: each process's answers, and what was built of them."""

    logged: LoggedStep
    ranks: Sequence[Sequence[tuple[StepAnswer, Judged]]]
    packs: int
    stages: Mapping[Stage, StageResult]

    @property
    def first(self) -> Difference | None:
        """Of the earliest stage, process and answer."""
        found = (each for stage in STAGES for each in self.stages[stage].differences)
        return next(found, None)

    def judged(self, answer: StepAnswer) -> Judged:
        """What was built of an answer."""
        return next(judged for own in self.ranks for each, judged in own if each is answer)


def compare(step: LoggedStep, rebuilder: Rebuilder) -> Replayed:
    """Build a step again, and compare each stage with the log."""
    stages = {stage: StageResult() for stage in STAGES}
    ranks = [[(answer, rebuilder.judged(answer)) for answer in own] for own in step.ranks]
    for own in ranks:
        for pair in own:
            _compare_answer(pair, stages)
    packs = 0
    if _agree(stages, STAGES[:4], "packs"):
        payload = Payload()
        for own in ranks:
            packs += _compare_packs(own, rebuilder, stages["packs"], payload)
        if _agree(stages, ("packs",), "metrics"):
            _compare_metrics(step, payload, stages["metrics"])
    else:
        stages["metrics"].note = stages["packs"].note
    return Replayed(step, ranks, packs, stages)


def first_difference(
    logged: Any, rebuilt: Any, path: tuple[str | int, ...] = (), inside: Any = None
) -> Differing | None:
    """Of two values of JSON, in the order of the logged one's keys; None where they are equal."""
    if isinstance(logged, dict) and isinstance(rebuilt, dict):
        keys = [*logged, *(key for key in rebuilt if key not in logged)]
        pairs: Iterator[tuple[str | int, Any, Any]] = (
            (key, logged.get(key, NOTHING), rebuilt.get(key, NOTHING)) for key in keys
        )
    elif isinstance(logged, list) and isinstance(rebuilt, list):
        longest = max(len(logged), len(rebuilt))
        pairs = ((i, _item(logged, i), _item(rebuilt, i)) for i in range(longest))
    else:
        same = type(logged) is type(rebuilt) and logged == rebuilt
        return None if same else Differing(path, logged, rebuilt, inside or (logged, rebuilt))
    for key, was, now in pairs:
        if found := first_difference(was, now, (*path, key), (logged, rebuilt)):
            return found
    return None


def _agree(stages: Mapping[Stage, StageResult], before: Sequence[Stage], stage: Stage) -> bool:
    """Nothing differs in the stages before `stage`; else it has a note that says so."""
    if differing := next((each for each in before if stages[each].differences), None):
        stages[stage].note = f"not compared: it follows from {differing}, which differs"
    return differing is None


def _compare_answer(pair: tuple[StepAnswer, Judged], stages: Mapping[Stage, StageResult]) -> None:
    answer, judged = pair
    again = LoggedAnswer.of(judged)
    compared: list[tuple[Stage, Any, Any]] = [
        ("parse", answer.parse.model_dump(mode="json"), again.parse.model_dump(mode="json")),
        ("match", answer.match.model_dump(mode="json"), again.match.model_dump(mode="json")),
        ("target", _target(answer), _target(again)),
        ("length", _length_logged(answer), _length_of(judged)),
    ]
    for stage, was, now in compared:
        result = stages[stage]
        result.compared += 1
        if at := first_difference(was, now):
            result.differences.append(Difference(stage, at, answer.rank, pair))
            return


def _target(answer: LoggedAnswer) -> dict[str, Any]:
    """Of all ids, wherever the log has them."""
    whole = {"supervised": answer.supervised, "left_out": answer.left_out}
    if answer.target is None:
        return whole
    return {**whole, **_whole(answer.target, answer.response_token_ids)}


def _whole(target: LoggedTarget, response: list[int]) -> dict[str, Any]:
    return {
        "prefix_len": target.prefix_len,
        "keys": target.keys,
        "token_ids": target.token_ids(response),
        "roles": [int(digit) for digit in target.roles],
        "groups": [
            {**group._asdict(), "bins": list(map(float, group.bins))} for group in target.groups
        ],
    }


def _length_logged(answer: StepAnswer) -> dict[str, Any]:
    return {"tokens": answer.segment.length if answer.segment else None}


def _length_of(judged: Judged) -> dict[str, Any]:
    segment = segment_of(judged)
    return {"tokens": segment.length if segment else None}


def _compare_packs(
    own: Sequence[tuple[StepAnswer, Judged]],
    rebuilder: Rebuilder,
    result: StageResult,
    payload: Payload,
) -> int:
    """Of one process; returns how many packs were made, and merges what was counted."""
    answers, judged = zip(*own, strict=True)
    try:
        packing = rebuilder.packed(answers, judged)
    except ContractError as error:
        logged = len({a.segment.pack for a in answers if a.segment})
        failed = Differing(("plan",), f"{logged} packs", error.found, (None, None))
        result.differences.append(Difference("packs", failed, answers[0].rank))
        return 0
    places = places_of(judged, packing)
    for pair, place in zip(own, places, strict=True):
        segment = pair[0].segment
        if place is None or segment is None:
            continue
        result.compared += 1
        if at := first_difference(segment.model_dump(), place._asdict()):
            result.differences.append(Difference("packs", at, pair[0].rank, pair))
    payload.merge(rebuilder.payload(judged, packing))
    return len({place.pack for place in places if place})


def _compare_metrics(step: LoggedStep, payload: Payload, result: StageResult) -> None:
    if not step.metrics:
        result.note = f'not compared: metrics.jsonl has no line of "step": {step.step}'
        return
    for key, value in payload.metrics().items():
        result.compared += 1
        logged = step.metrics.get(key, NOTHING)
        if logged != value:
            at = Differing((key,), logged, value, (None, None))
            result.differences.append(Difference("metrics", at))


def _item(values: list[Any], index: int) -> Any:
    return values[index] if index < len(values) else NOTHING
