"""Comparison of a rebuilt step with its log, stage by stage.

It ends with the first stage that differs, because later stages depend on it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, NamedTuple, get_args

from learner.analysis.replay.rebuild import LoggedStep, Rebuilder, Rebuilt
from learner.runs.declared import ANSWER_FAULTS
from learner.runs.metrics import Payload
from learner.runs.rollout_log import LoggedAnswer, StepAnswer
from learner.types import AssessedRollout
from shared_contracts.errors import ContractError

_FAULTS = {f"stage2_ab/channel_b/{fault}" for fault in ANSWER_FAULTS}

Stage = Literal["parse", "match", "target", "packs", "metrics"]
STAGES: tuple[Stage, ...] = get_args(Stage)

# Marks a missing value.
NOTHING = object()


class Values(NamedTuple):
    """Values of an answer or a process; rank, answer: None for a value of the whole step.

    path: keys and indices of the values in those of the stage.
    """

    logged: Any
    rebuilt: Any
    rank: int | None = None
    answer: StepAnswer | None = None
    path: tuple[str | int, ...] = ()

    def difference(self) -> "Values | None":
        """Return the first values within these that differ; None for equal ones."""
        logged, rebuilt = self.logged, self.rebuilt
        if isinstance(logged, list | tuple) and isinstance(rebuilt, list | tuple):
            logged, rebuilt = dict(enumerate(logged)), dict(enumerate(rebuilt))
        if not (isinstance(logged, dict) and isinstance(rebuilt, dict)):
            return None if logged == rebuilt else self
        within = (
            Values(
                logged.get(key, NOTHING),
                rebuilt.get(key, NOTHING),
                self.rank,
                self.answer,
                (*self.path, key),
            ).difference()
            for key in {**logged, **rebuilt}
        )
        return next(filter(None, within), None)


class Difference(NamedTuple):
    """The first difference of a step."""

    stage: Stage
    values: Values

    @property
    def field(self) -> str:
        """`parse.objects[1].coords[2]`"""
        steps = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.values.path)
        return self.stage + "".join(steps)


class Replayed(NamedTuple):
    """A rebuilt step. stages: numbers of values and of different ones, of each compared stage."""

    ranks: Sequence[Rebuilt]
    stages: Mapping[Stage, tuple[int, int]]
    first: Difference | None

    def assessed(self, answer: StepAnswer) -> AssessedRollout:
        """Return the rebuilt form of an answer."""
        return next(assessed for own in self.ranks for each, assessed in own if each is answer)


def compare(step: LoggedStep, rebuilder: Rebuilder) -> Replayed:
    """Rebuild a step, and compare each stage with the log."""
    ranks = [rebuilder.rebuild(own) for own in step.ranks]
    stages: dict[Stage, tuple[int, int]] = {}
    for stage, values in _stages(step, ranks, rebuilder):
        different = [found for each in values if (found := each.difference()) is not None]
        stages[stage] = len(values), len(different)
        if different:
            return Replayed(ranks, stages, Difference(stage, different[0]))
    return Replayed(ranks, stages, None)


def _stages(
    step: LoggedStep, ranks: Sequence[Rebuilt], rebuilder: Rebuilder
) -> Iterator[tuple[Stage, list[Values]]]:
    """Yield the values of each stage; the caller stops at a difference, before packs are made."""
    pairs = [(answer, LoggedAnswer.of(assessed)) for own in ranks for answer, assessed in own]
    yield "parse", [Values(_parse(was), _parse(now), was.rank, was) for was, now in pairs]
    yield (
        "match",
        [
            Values(was.match.model_dump(), now.match.model_dump(), was.rank, was)
            for was, now in pairs
        ],
    )
    yield "target", [Values(_target(was), _target(now), was.rank, was) for was, now in pairs]
    payload, packs = Payload(), list[Values]()
    for own in ranks:
        packs += _packs(own, rebuilder, payload)
    yield "packs", packs
    if step.metrics:
        rebuilt = payload.metrics()
        missing = {key: NOTHING for key, value in rebuilt.items() if value and key not in _FAULTS}
        # Earlier versions logged neither answer faults nor counters of 0.
        logged = {**rebuilt, **missing, **step.metrics}
        yield "metrics", [Values(logged[key], rebuilt[key], path=(key,)) for key in rebuilt]


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


def _packs(own: Rebuilt, rebuilder: Rebuilder, payload: Payload) -> Iterator[Values]:
    """Yield the pack places of one process's segments; add its counts to `payload`."""
    try:
        packing, counts = rebuilder.packed(own)
    except ContractError as error:
        logged = len({answer.segment.pack for answer, _ in own if answer.segment})
        yield Values(f"{logged} packs", error.found, own[0][0].rank)
        return
    payload.merge(counts)
    places = iter(packing.places)  # of all answers with a target
    for answer, made in own:
        segment = None if answer.segment is None else asdict(answer.segment)
        place = None if made.target is None else asdict(next(places))
        yield Values(segment, place, answer.rank, answer)
