"""Terminal output of a replay: a step, a difference, the details of an answer."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.text import Text

from learner.analysis.replay.compare import NOTHING, STAGES, Difference, compare
from learner.analysis.replay.rebuild import LoggedStep, Rebuilder, StepLog, listed
from learner.analysis.report.answers import faults_of
from learner.data.show import Table, plain, print_tables
from learner.runs.console import counted
from learner.runs.declared import DROPS
from learner.runs.rollout_log import LoggedTarget, StepAnswer
from learner.stages.tokens import Tokenizer, decode_exactly
from learner.types import AssessedRollout, Role, Shape, Target
from shared_contracts.errors import ContractError
from shared_contracts.machine import installed_versions

_STYLES = {
    Role.MATCHED_STRUCTURE: "green",
    Role.MATCHED_DESC: "green",
    Role.FALSE_POSITIVE: "red",
    Role.APPENDED_STRUCTURE: "bold blue",
    Role.APPENDED_DESC: "bold blue",
    Role.COORD: "cyan",
    Role.CLOSURE: "magenta",
}
# Largest number of differing steps that are listed.
_STEPS = 20


def replay_step(step: LoggedStep, detailed: Sequence[StepAnswer], rebuilder: Rebuilder) -> bool:
    """Rebuild a step and print its differences; return whether it is identical.

    detailed: answers to print in detail.
    """
    replayed = compare(step, rebuilder)
    tables = list[Table]()
    for answer in detailed:
        tables += _details(answer, replayed.assessed(answer), rebuilder.tokenizer)
    rows = [
        [stage, *map(str, replayed.stages.get(stage, ("not compared", "")))] for stage in STAGES
    ]
    answers, processes = counted(len(step.answers), "answer"), counted(len(step.ranks), "process")
    title = f"Step {step.step}: {answers}, {processes}"
    tables.append(Table(title, ("stage", "#compared", "#different"), rows))
    verdict = f"Identical: all answers of step {step.step} are rebuilt bit for bit."
    if replayed.first is not None:
        tables.append(_difference(replayed.first))
        verdict = f"Different: step {step.step} is not rebuilt as it was logged."
    print_tables(tables)
    print(f"\n{verdict}")
    return replayed.first is None


def replay_all(log: StepLog, rebuilder: Rebuilder) -> bool:
    """Rebuild every step and print those that differ; return whether all are identical.

    An unreadable step is reported and skipped. Raises its ContractError if no step is readable.
    """
    bar = Console(stderr=True)
    first: Difference | None = None
    differing, identical, refused = list[list[str]](), list[int](), list[ContractError]()
    steps = track(log.steps, "Steps", console=bar, transient=True, disable=not bar.is_terminal)
    for step in steps:
        try:
            difference = compare(log.step(step), rebuilder).first
        except ContractError as error:
            refused.append(error)
            print(f"note: step {step} is left out: {error}", file=sys.stderr)
            continue
        first = first or difference
        if difference is None:
            identical.append(step)
        else:
            differing.append([str(step), "different", f"{difference.field}, {_about(difference)}"])
    count = len(differing) + len(identical)
    if not count:
        raise refused[0]
    rows = differing[:_STEPS]
    if identical:
        rows.append([listed(identical), "identical", ""])
    tables = [Table(counted(count, "step"), ("steps", "verdict", "first difference"), rows)]
    without = f" ({len(refused)} could not be read)" if refused else ""
    verdict = f"Identical: all {counted(count, 'step')}{without} are rebuilt bit for bit."
    if first is not None:
        tables.append(_difference(first))
        verdict = f"Different: {len(differing)} of {count} steps{without}."
    print_tables(tables)
    print(f"\n{verdict}")
    return first is None


def _details(
    answer: StepAnswer, assessed: AssessedRollout, tokenizer: Tokenizer
) -> Iterator[Table]:
    """Yield tables with all details of an answer."""
    yield _named(f"Sample {answer.sample_id}", *_facts(answer))
    yield _named("Answer", ("", decode_exactly(tokenizer, answer.response_token_ids)))
    yield _objects(assessed)
    yield _truths(assessed)
    title = "Target"
    if assessed.target is None:
        left_out = f"nothing, the answer is left out: {assessed.left_out}"
        yield _named(title, ("", left_out))
    else:
        yield _named(title, *_target(assessed.target, answer, tokenizer))


NamedValue = tuple[str, str | Text]


def _named(title: str, *rows: NamedValue) -> Table:
    """Return a table of names and values, without headings."""
    return Table(title, ("", ""), rows)


def _facts(answer: StepAnswer) -> Iterator[NamedValue]:
    segment, reward = answer.segment, answer.reward
    yield from (("image", str(image)) for image in answer.images)
    yield "requested", f"by process {answer.rank}, chunk {answer.chunk}, seed {answer.seed}"
    yield "weights", "version {} at its start, {} at its end".format(*answer.weights_version)
    yield "length", f"{len(answer.response_token_ids)} tokens, ended by {answer.finish_reason}"
    yield "faults", ", ".join(faults_of(answer)) or "none"
    yield "segment", f"{segment.length} tokens, in pack {segment.pack}" if segment else "none"
    if reward is not None:
        *parts, _ = reward._asdict().items()
        yield "reward", " ".join(f"{key} {value:.4f}" for key, value in parts)
        if reward.credits is not None:
            yield "credits", " ".join(f"{credit:+.4f}" for credit in reward.credits)


def _objects(assessed: AssessedRollout) -> Table:
    parsed, match = assessed.parsed, assessed.match
    rows, matched = list[list[str | Text]](), dict(match.pairs)
    for place, item in enumerate(parsed.objects):
        if place in matched:
            iou = match.mask_iou[place, matched[place]]
            result = Text(f"matched to ground truth {matched[place] + 1}, IoU {iou:.2f}", "green")
        else:
            best = np.nanmax(match.mask_iou[place], initial=0.0)
            result = Text(f"not matched, IoU {best:.2f} at most", "red")
        rows.append([item.key, item.desc, _bins(item.shape), result])
    for duplicate in assessed.duplicates or ():
        item = duplicate.found
        result = Text("removed, repeats an earlier object", "yellow")
        rows.append([item.key, item.desc, _bins(item.shape), result])
    for key, reason in parsed.dropped:
        result = Text(f"dropped, {reason}: {DROPS[reason]}", "yellow")
        rows.append([key, "", "", result])
    return Table("Objects of the answer", ("key", "description", "bins", "result"), rows)


def _truths(assessed: AssessedRollout) -> Table:
    match, target = assessed.match, assessed.target
    rows = list[list[str | Text]]()
    finders = {j: assessed.parsed.objects[i].key for i, j in match.pairs}
    keys = iter(target.fn_keys if target else ())
    for place, truth in enumerate(assessed.sample.objects):
        if place in finders:
            result = Text("found as ", "green").append_text(plain(finders[place]))
        else:
            key = next(keys, None)
            result = Text("missed" + (f", appended as {key}" if key else ""), "bold blue")
        rows.append([str(place + 1), truth.desc, _bins(truth.shape), result])
    return Table("Ground truth", ("#", "description", "bins", "result"), rows)


def _bins(shape: Shape) -> str:
    name = "" if shape.kind == "bbox_2d" else "polygon "
    return name + " ".join(map(str, shape.coords))


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


def _difference(difference: Difference) -> Table:
    """Return a table of the first difference, with both values."""
    logged, rebuilt, _, answer, _ = difference.values
    rows = [("field", difference.field)] + [
        (name, "nothing" if value is NOTHING else json.dumps(value, ensure_ascii=False))
        for name, value in (("logged", logged), ("rebuilt", rebuilt))
    ]
    if answer is not None:
        rows.append(("see", f"--step {answer.step} --sample {answer.sample_id}"))
    return _named(f"First difference: {difference.stage}, {_about(difference)}", *rows)


def _about(difference: Difference) -> str:
    """Return the sample and the process of a difference, as text."""
    rank, answer = difference.values.rank, difference.values.answer
    process = "all processes" if rank is None else f"process {rank}"
    return process if answer is None else f"sample {answer.sample_id} of {process}"


def notes_on(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield possible reasons of differences: other library versions. facts: of `run.json`."""
    versions = facts["versions"]
    here = installed_versions(versions)
    changed = [
        f"{name} {logged} (here {here.get(name, 'none')})"
        for name, logged in versions.items()
        if here.get(name) != logged
    ]
    if changed:
        yield f"the run was made with {', '.join(changed)}"
