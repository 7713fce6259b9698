"""Replay: steps of channel B, computed again from their log and compared with it (REPLAY-01).

Requires the config and log of the run and the tokenizer of its model; no server, weights or images.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.text import Text

from learner.analysis.report.answers import faults_of
from learner.analysis.report.gallery import ROLES, facts_of, shown_objects
from learner.config.schema import Config
from learner.data.checkpoint import TOKENIZER, Checkpoint
from learner.data.show import Table, plain, print_tables
from learner.runs.checkpoint import data_digest
from learner.runs.console import counted
from learner.runs.declared import DROPS
from learner.runs.rollout_log import LoggedAnswer, LoggedTarget, StepAnswer
from learner.runs.run_folder import RunFolder
from learner.stages.targets import run_stages
from learner.stages.tokens import Tokenizer, decode_exactly
from learner.types import AssessedRollout, Role, Target
from shared_contracts.errors import ContractError

_STYLES = {
    Role.MATCHED_STRUCTURE: "green",
    Role.MATCHED_DESC: "green",
    Role.FALSE_POSITIVE: "red",
    Role.APPENDED_STRUCTURE: "bold blue",
    Role.APPENDED_DESC: "bold blue",
    Role.COORD: "cyan",
    Role.CLOSURE: "magenta",
}
# Largest number of differing answers that are listed.
_LISTED = 20
# Parts of an answer that are computed from its ids.
_COMPARED = {"parse", "match", "supervised", "left_out", "target"}


def find_tokenizer(run: RunFolder, config: Config, given: Path | None) -> Path:
    """Return the folder with a run's tokenizer: `given`, else that of its model.

    Raises ContractError if it has none, or another one.
    """
    folder = given or Checkpoint(config.model.model).processor
    file, digest = folder / TOKENIZER, run.facts().get("tokenizer_sha256")
    if digest is None:
        raise ContractError(str(run.path), "run.json has no tokenizer_sha256", "Restore run.json")
    if file.is_file() and data_digest(file) == digest:
        return folder
    found = "there is no such file"
    if file.is_file():
        found = "it is another one than when the run was started"
    do = f"Name a folder with the {TOKENIZER} of the run with --tokenizer (SHA-256 {digest}); "
    raise ContractError(str(file), found, f"{do}checkpoints of the run have it")


def load_tokenizer(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer  # slow

    loaded: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer: Tokenizer = loaded
    return tokenizer


def logged_steps(run: RunFolder, step: int | None) -> list[int]:
    """Return `step`, or all steps with logged answers.

    Raises ContractError if there are none, and for another step.
    """
    steps = run.answer_steps()
    if not steps:
        raise ContractError(
            str(run.path),
            "no answers are logged in it",
            "Name a run with steps of channel B and training.log_rollouts: true",
        )
    if step is None:
        return steps
    if step not in steps:
        do = f"Choose one of the {len(steps)} logged steps, from {steps[0]} to {steps[-1]}"
        raise ContractError(f"--step {step}", "no answers of this step are logged", do)
    return [step]


def rebuild(
    answers: Sequence[StepAnswer], config: Config, tokenizer: Tokenizer
) -> list[AssessedRollout]:
    samples, rollouts = [each.sample for each in answers], [each.rollout for each in answers]
    return run_stages(samples, rollouts, tokenizer, config)


class Difference(NamedTuple):
    """field: such as `parse.objects[1].coords[2]`, with both values; None: there is none."""

    answer: StepAnswer
    field: str
    logged: Any
    rebuilt: Any


def first_difference(answer: StepAnswer, assessed: AssessedRollout) -> Difference | None:
    """Compare an answer with its rebuilt form; None if both are equal."""
    found = _differing(_parts(answer), _parts(LoggedAnswer.of(assessed)), "")
    return None if found is None else Difference(answer, *found)


def _parts(answer: LoggedAnswer) -> dict[str, Any]:
    """Return what is computed; without the parse's fault, which earlier versions did not log."""
    parts = answer.model_dump(include=_COMPARED, exclude={"parse": {"fault"}})
    return parts | {"reward": None if answer.reward is None else answer.reward._asdict()}


def _differing(logged: Any, rebuilt: Any, field: str) -> tuple[str, Any, Any] | None:
    """Return the first values within two that differ, with their field; None for equal ones."""
    if isinstance(logged, list | tuple) and isinstance(rebuilt, list | tuple):
        logged, rebuilt = dict(enumerate(logged)), dict(enumerate(rebuilt))
    if not (isinstance(logged, dict) and isinstance(rebuilt, dict)):
        return None if logged == rebuilt else (field.removeprefix("."), logged, rebuilt)
    for key in {**logged, **rebuilt}:
        within = f"{field}[{key}]" if isinstance(key, int) else f"{field}.{key}"
        if found := _differing(logged.get(key), rebuilt.get(key), within):
            return found
    return None


def replay(
    run: RunFolder, steps: Sequence[int], sample: str | None, config: Config, tokenizer: Tokenizer
) -> bool:
    """Compute steps again and print what differs; return whether all answers are identical.

    sample: print all details of its answers. `/data/train.jsonl:12` is also `train.jsonl:12`.
    A step that cannot be read is printed and left out.

    Raises ContractError if no step can be read, or no answer is to this sample.
    """
    details, differences, unread = list[Table](), list[Difference](), list[ContractError]()
    count, resolution = 0, config.rollout_matching.matching.maskiou_resolution
    bar = Console(stderr=True)
    for step in track(steps, "Steps", console=bar, transient=True, disable=not bar.is_terminal):
        try:
            answers = run.answers(step)
        except ContractError as error:
            print(f"Step {step} is left out: {error.where}: {error.found}", file=sys.stderr)
            unread.append(error)
            if len(unread) == len(steps):
                raise
            continue
        count += len(answers)
        for answer, assessed in zip(answers, rebuild(answers, config, tokenizer), strict=True):
            if sample is not None and f"/{answer.sample_id}".endswith((f"/{sample}", f":{sample}")):
                details += _details(answer, assessed, tokenizer, resolution)
            if (difference := first_difference(answer, assessed)) is not None:
                differences.append(difference)
    if sample is not None and not details:
        do = "Name one as FILE:LINE of its data; the page of the run shows answered ones"
        raise ContractError("--sample", f"no logged answer is to a sample {sample!r}", do)
    whole = f"{counted(count, 'answer')} of {counted(len(steps) - len(unread), 'step')}"
    verdict = f"Identical: {whole} are rebuilt bit for bit."
    if differences:
        details += _differences(differences)
        verdict = f"Different: {len(differences):,} of {whole} are not rebuilt as they were logged."
    print_tables(details)
    print(f"\n{verdict}" if details else verdict)
    return not differences


def _details(
    answer: StepAnswer, assessed: AssessedRollout, tokenizer: Tokenizer, resolution: int
) -> Iterator[Table]:
    yield _named(f"Step {answer.step}, sample {answer.sample_id}", *_facts(answer))
    yield _named("Answer", ("", decode_exactly(tokenizer, answer.response_token_ids)))
    yield _objects(LoggedAnswer.of(assessed), resolution)
    title = "Target"
    if assessed.target is None:
        left_out = f"nothing, the answer is left out: {assessed.left_out}"
        yield _named(title, ("", left_out))
    else:
        yield _named(title, *_target(assessed.target, answer, tokenizer))


NamedValue = tuple[str, str | Text]


def _named(title: str, *rows: NamedValue) -> Table:
    return Table(title, ("", ""), rows)


def _facts(answer: StepAnswer) -> Iterator[NamedValue]:
    segment, reward = answer.segment, answer.reward
    yield from facts_of(answer).items()
    yield "faults", ", ".join(faults_of(answer)) or "none"
    yield "segment", f"{segment.length} tokens, in pack {segment.pack}" if segment else "none"
    if reward is not None:
        *parts, _ = reward._asdict().items()
        yield "reward", " ".join(f"{key} {value:.4f}" for key, value in parts)
        if reward.credits is not None:
            yield "credits", " ".join(f"{credit:+.4f}" for credit in reward.credits)


def _objects(answer: LoggedAnswer, resolution: int) -> Table:
    rows, objects = list[list[str]](), shown_objects(answer, resolution)
    for each in objects:
        result, _ = ROLES[each.role]
        if each.pair is not None:
            result += f": {objects[each.pair].key}, IoU {each.iou:.2f}"
        rows.append([each.key, each.desc, " ".join(map(str, each.coords)), result])
    for key, reason in answer.parse.dropped:
        rows.append([key, "", "", f"dropped, {reason}: {DROPS[reason]}"])
    return Table("Objects", ("object", "description", "bins", "result"), rows)


def _target(target: Target, answer: StepAnswer, tokenizer: Tokenizer) -> Iterator[NamedValue]:
    """Yield the text of a target coloured by role, and the removed end of the answer."""
    kept = LoggedTarget.of(target, answer.response_token_ids).kept
    cut = plain(decode_exactly(tokenizer, answer.response_token_ids[kept:]))
    cut.stylize("strike dim")
    text = Text()
    for role, run in groupby(
        zip(target.role.tolist(), target.token_ids, strict=True), itemgetter(0)
    ):
        own = plain(decode_exactly(tokenizer, [token for _, token in run]))
        text.append(own.plain, _STYLES[Role(role)])
    counts = Counter(map(Role, target.role.tolist()))
    legend = (
        Text(f"{count} {role.name.lower().replace('_', ' ')}", _STYLES[role])
        for role, count in sorted(counts.items())
    )
    yield "length", f"{len(target.token_ids)} tokens; the first {kept} are the answer's"
    yield "text", text
    yield "cut off", cut
    yield "roles", Text(", ").join(legend)
    yield "departures", f"{len(target.departures)} tokens of removed duplicates"


def _differences(differences: Sequence[Difference]) -> Iterator[Table]:
    rows = [[str(each.answer.step), each.answer.sample_id, each.field] for each in differences]
    yield Table("Answers that differ", ("#step", "sample", "first field"), rows[:_LISTED])
    first = differences[0]
    yield _named(
        f"First difference: step {first.answer.step}, sample {first.answer.sample_id}, "
        f"process {first.answer.rank}",
        ("field", first.field),
        ("logged", json.dumps(first.logged, ensure_ascii=False)),
        ("rebuilt", json.dumps(first.rebuilt, ensure_ascii=False)),
    )
