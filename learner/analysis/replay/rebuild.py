"""A logged step, built again from its answers and compared with its log, stage by stage.

An answer is compared up to the first stage at which it differs, as all after it follow from that;
packs are compared where all answers are identical, and metrics where packs are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from learner.config.schema import Config
from learner.runs.checkpoint import checkpoints_in
from learner.runs.metrics import Payload, rollout_payload
from learner.runs.resume import data_digest
from learner.runs.rollout_log import LoggedAnswer, LoggedTarget, StepAnswer
from learner.runs.run_folder import RunFolder
from learner.stages.formats import answer_format
from learner.stages.matching import match_objects
from learner.stages.packing import Parts, StepPacker
from learner.stages.targets import assess, with_target
from learner.stages.tokens import Tokenizer
from learner.types import AssessedRollout
from shared_contracts.adapters import folder_with
from shared_contracts.errors import ContractError

TOKENIZER = "tokenizer.json"


class Found(NamedTuple):
    """note: what a reader should know of where it is from; empty for nothing."""

    folder: Path
    note: str


def find_tokenizer(run: RunFolder, config: Config, given: Path | None) -> Found:
    """The folder with the tokenizer of a run. given: to look in alone.

    Raises ContractError where it is gone or another one, and says of each folder which.
    """
    wanted = run.facts().get("tokenizer_sha256")
    if wanted is None:
        raise ContractError(
            str(run.path / "run.json"),
            "it does not say which tokenizer the run had: it is of an earlier version",
            "Read it with the version of Rollmatch that wrote it (`versions` in run.json)",
        )
    first = folder_with(Path(config.model.model), TOKENIZER, "model.model")
    folders = [given] if given else [first, *checkpoints_in(run.path)]
    wrong: list[str] = []
    for folder in folders:
        if (problem := _problem(folder / TOKENIZER, wanted)) is None:
            note = f"{wrong[0]}; that of {folder} is the same" if wrong else ""
            return Found(folder, note)
        wrong.append(f"{folder} {problem}")
    raise ContractError(
        "--tokenizer" if given else f"model.model of {run.path}",
        "; ".join(wrong),
        f"Name a folder with the {TOKENIZER} of the run with --tokenizer (SHA-256 {wanted})",
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    """As training loads it."""
    from transformers import AutoTokenizer  # seconds

    loaded: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer: Tokenizer = loaded
    return tokenizer


def _problem(file: Path, wanted: str) -> str | None:
    if not file.parent.is_dir():
        return "is gone"
    if not file.is_file():
        return f"has no {TOKENIZER}"
    if data_digest(file) != wanted:
        return f"has another {TOKENIZER} than when the run was started"
    return None


# So many steps, or samples, are listed whole.
_LISTED = 8


@dataclass(frozen=True)
class LoggedStep:
    """A step as a run logged it.

    step: from 1. ranks: the answers of each process, in the order in which it asked.
    metrics: of its line in `metrics.jsonl`; empty where it has none yet.
    """

    step: int
    ranks: Sequence[Sequence[StepAnswer]]
    metrics: dict[str, Any]

    @property
    def answers(self) -> list[StepAnswer]:
        return [answer for rank in self.ranks for answer in rank]

    def mates(self, answer: StepAnswer) -> list[StepAnswer]:
        """The others whose segments are in the pack of this one's."""
        if answer.segment is None:
            return []
        return [
            each
            for each in self.answers
            if each is not answer
            and each.rank == answer.rank
            and each.segment is not None
            and each.segment.pack == answer.segment.pack
        ]

    def sample(self, wanted: str) -> list[StepAnswer]:
        """The answers to a sample, as `named` finds them.

        Raises ContractError for a name that none has, or several.
        """
        found = [answer for answer in self.answers if named(answer.sample_id, wanted)]
        ids = sorted({answer.sample_id for answer in found})
        if len(ids) == 1:
            return found
        raise ContractError(
            "--sample",
            f"{wanted!r} is the end of {listed(ids)}"
            if ids
            else f"step {self.step} has no sample {wanted!r}",
            f"Name one of {listed(ids or [answer.sample_id for answer in self.answers])}",
        )


class StepLog:
    """The logged steps of a run. The logs of all steps are read once."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        steps = (line for line in run.metrics() if "step/channel_b" in line)
        self._metrics = {line["step"]: line for line in steps}
        self._ranks = run.calling_ranks()

    @property
    def steps(self) -> list[int]:
        """Of channel B, in order; ContractError where there are none."""
        steps = self._run.answer_steps()
        if not steps:
            raise ContractError(
                str(self._run.path),
                "no answers are logged in it",
                "Name a run with steps of channel B and training.log_rollouts: true",
            )
        return steps

    def step(self, step: int) -> LoggedStep:
        """The log of a step.

        Raises:
            ContractError: no answers are logged of it, or not all, or not all that became of them.
        """
        answers = self._run.answers(step)
        if not answers:
            raise self._absent(step)
        by_rank: dict[int, list[StepAnswer]] = {}
        for answer in answers:
            by_rank.setdefault(answer.rank, []).append(answer)
        if missing := sorted(self._ranks.get(step, set()) - set(by_rank)):
            raise ContractError(
                f"{self._run.path}, step {step}",
                f"process {missing[0]} asked for answers, and its file in rollouts/ is missing",
                "Restore it; if the run ended within this step, choose one before it",
            )
        ranks = [by_rank[rank] for rank in sorted(by_rank)]
        return LoggedStep(step, ranks, self._metrics.get(step, {}))

    def step_with(self, wanted: str) -> int:
        """The step that has a sample; ContractError where none has it, or several."""
        steps = [
            step
            for step in self.steps
            if any(named(answer.sample_id, wanted) for answer in self._run.answers(step))
        ]
        if len(steps) == 1:
            return steps[0]
        found = f"steps {listed(steps)} have" if steps else "no logged step has"
        do = "Say which step with --step" if steps else "Name a sample as FILE:LINE of its data"
        raise ContractError("--sample", f"{found} a sample {wanted!r}", do)

    def _absent(self, step: int) -> ContractError:
        steps = self.steps
        found = f"no answers of step {step} are logged"
        if self._metrics.get(step, {}).get("step/channel_b") == 0:
            found = f"step {step} was one of channel A, which has no answers"
        return ContractError(
            f"--step {step}", found, f"Choose a step of channel B: {listed(steps)}"
        )


def named(sample_id: str, wanted: str) -> bool:
    """`/data/train.jsonl:12` is also `train.jsonl:12`, and `12`."""
    return sample_id == wanted or sample_id.endswith((f"/{wanted}", f":{wanted}"))


def listed(items: Sequence[object]) -> str:
    """All of a few, else the first and the last ones and how many they are."""
    if len(items) <= _LISTED:
        return ", ".join(map(str, items))
    ends = [*items[: _LISTED - 2], "...", *items[-2:]]
    return f"{', '.join(map(str, ends))} ({len(items)} in all)"


@dataclass(frozen=True)
class RebuiltSegment:
    """A segment without its tensors, as long as they are."""

    sample_id: str
    length: int

    def __len__(self) -> int:
        return self.length


RebuiltPacks = StepPacker[RebuiltSegment, list[RebuiltSegment]]


class Rebuilder:
    """Does what a run of `config` did with its answers. tokenizer: of its model."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._config = config

    def assessed(self, answer: StepAnswer) -> AssessedRollout:
        """An answer, parsed, matched and made a target."""
        config, matching = self._config, self._config.rollout_matching.matching
        order, answers = config.custom.object_field_order, answer_format(config)
        match, polygons = partial(match_objects, config=matching), config.allow_poly
        found = assess(
            answer.sample,
            answer.rollout,
            self.tokenizer,
            match,
            allow_poly=polygons,
            answers=answers,
            duplicate_iou=config.duplicate_iou,
        )
        return with_target(found, self.tokenizer, order, matching, answers)

    def packed(
        self, answers: Sequence[StepAnswer], assessed: Sequence[AssessedRollout]
    ) -> RebuiltPacks:
        """All answers of one process, packed as they came.

        Raises ContractError where they cannot be.
        """
        config = self._config
        packing: RebuiltPacks = StepPacker(config.training, config.global_max_length, list)
        pairs = zip(answers, assessed, strict=True)
        rounds = [
            (own[0][0].weights_version[0], [s for _, each in own if (s := segment_of(each))])
            for _, group in groupby(pairs, lambda pair: pair[0].chunk)
            if (own := list(group))
        ]
        if config.rollout_matching.async_rollout.enabled:
            parts = Parts[list[RebuiltSegment]](packing)
            for version, segments in rounds:
                parts.add(version, segments)
            parts.finished()
        else:
            for number, (_, segments) in enumerate(rounds, start=1):
                packing.chunk(segments, last=number == len(rounds))
        return packing

    def payload(self, assessed: Sequence[AssessedRollout], packing: RebuiltPacks) -> Payload:
        """What one process counted of its answers and packs."""
        payload = rollout_payload(assessed)
        payload.merge(packing.payload())
        return payload


def segment_of(assessed: AssessedRollout) -> RebuiltSegment | None:
    """Prompt and target; None for an answer that is left out."""
    if assessed.target is None:
        return None
    length = len(assessed.rollout.prompt_token_ids) + len(assessed.target.token_ids)
    return RebuiltSegment(assessed.sample.sample_id, length)


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
    answer: tuple[StepAnswer, AssessedRollout] | None = None

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
    ranks: Sequence[Sequence[tuple[StepAnswer, AssessedRollout]]]
    packs: int
    stages: Mapping[Stage, StageResult]

    @property
    def first(self) -> Difference | None:
        """Of the earliest stage, process and answer."""
        found = (each for stage in STAGES for each in self.stages[stage].differences)
        return next(found, None)

    def assessed(self, answer: StepAnswer) -> AssessedRollout:
        """What was built of an answer."""
        return next(assessed for own in self.ranks for each, assessed in own if each is answer)


def compare(step: LoggedStep, rebuilder: Rebuilder) -> Replayed:
    """Build a step again, and compare each stage with the log."""
    stages = {stage: StageResult() for stage in STAGES}
    ranks = [[(answer, rebuilder.assessed(answer)) for answer in own] for own in step.ranks]
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


def _compare_answer(
    pair: tuple[StepAnswer, AssessedRollout], stages: Mapping[Stage, StageResult]
) -> None:
    answer, assessed = pair
    again, logged, segment = LoggedAnswer.of(assessed), answer.segment, segment_of(assessed)
    compared: list[tuple[Stage, Any, Any]] = [
        ("parse", answer.parse.model_dump(mode="json"), again.parse.model_dump(mode="json")),
        ("match", answer.match.model_dump(mode="json"), again.match.model_dump(mode="json")),
        ("target", _target(answer), _target(again)),
        ("length", {"tokens": logged and logged.length}, {"tokens": segment and segment.length}),
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
            {**g._asdict(), "positions": list(g.positions), "bins": list(g.bins)}
            for g in target.groups
        ],
    }


def _compare_packs(
    own: Sequence[tuple[StepAnswer, AssessedRollout]],
    rebuilder: Rebuilder,
    result: StageResult,
    payload: Payload,
) -> int:
    """Of one process; returns how many packs were made, and merges what was counted."""
    answers, assessed = zip(*own, strict=True)
    try:
        packing = rebuilder.packed(answers, assessed)
    except ContractError as error:
        logged = len({a.segment.pack for a in answers if a.segment})
        failed = Differing(("plan",), f"{logged} packs", error.found, (None, None))
        result.differences.append(Difference("packs", failed, answers[0].rank))
        return 0
    made = iter(packing.places)  # of all answers but those that are left out
    places = [None if each.target is None else next(made) for each in assessed]
    for pair, place in zip(own, places, strict=True):
        segment = pair[0].segment
        if place is None or segment is None:
            continue
        result.compared += 1
        if at := first_difference(asdict(segment), asdict(place)):
            result.differences.append(Difference("packs", at, pair[0].rank, pair))
    payload.merge(rebuilder.payload(assessed, packing))
    return len({place.pack for place in places if place})


def _compare_metrics(step: LoggedStep, payload: Payload, result: StageResult) -> None:
    if not step.metrics:
        result.note = f'not compared: metrics.jsonl has no line of "step": {step.step}'
        return
    for key, value in payload.metrics().items():
        result.compared += 1
        logged = step.metrics.get(key, NOTHING)
        if logged is NOTHING and value == 0:  # an older version did not count this
            continue
        if logged != value:
            at = Differing((key,), logged, value, (None, None))
            result.differences.append(Difference("metrics", at))


def _item(values: list[Any], index: int) -> Any:
    return values[index] if index < len(values) else NOTHING
