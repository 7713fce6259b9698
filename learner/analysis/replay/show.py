"""The result of a replay for a terminal: a step, a difference, the story of one answer."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from learner.analysis.replay.compare import NOTHING, STAGES, Difference, Replayed
from learner.analysis.replay.rebuild import listed
from learner.analysis.report.answers import faults_of
from learner.data.show import new_table, plain
from learner.runs.console import counted
from learner.runs.declared import DROPS
from learner.runs.rollout_log import LoggedTarget, StepAnswer
from learner.stages.tokens import Tokenizer, decode_exactly
from learner.types import AssessedRollout, Role, Shape, Target

Titled = tuple[str, Table]

_STYLES = {
    Role.MATCHED_STRUCTURE: "green",
    Role.MATCHED_DESC: "green",
    Role.FALSE_POSITIVE: "red",
    Role.APPENDED_STRUCTURE: "bold blue",
    Role.APPENDED_DESC: "bold blue",
    Role.COORD: "cyan",
    Role.CLOSURE: "magenta",
}
# Differing steps that have a line.
_STEPS = 20


def story(answer: StepAnswer, assessed: AssessedRollout, tokenizer: Tokenizer) -> Iterator[Titled]:
    """All that became of one answer, as tables under their titles."""
    yield f"Sample {answer.sample_id}", _facts(answer)
    yield "Answer", _rows(("", decode_exactly(tokenizer, answer.response_token_ids)))
    yield "Objects of the answer", _objects(assessed)
    yield "Ground truth", _truths(assessed)
    if assessed.target is None:
        left_out = f"nothing, the answer is left out: {assessed.left_out}"
        yield "What is taught", _rows(("", left_out))
    else:
        yield "What is taught", _target(assessed.target, answer, tokenizer)


def _rows(*rows: tuple[str, object]) -> Table:
    """Names and values, without a head."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value if isinstance(value, Text) else plain(value))
    return table


def _facts(answer: StepAnswer) -> Table:
    segment, reward = answer.segment, answer.reward
    parts = "" if reward is None else " ".join(f"{k} {v:.4f}" for k, v in reward._asdict().items())
    return _rows(
        *(("image", image) for image in answer.images),
        ("requested", f"by process {answer.rank}, chunk {answer.chunk}, seed {answer.seed}"),
        ("weights", "version {} at its start, {} at its end".format(*answer.weights_version)),
        ("length", f"{len(answer.response_token_ids)} tokens, ended by {answer.finish_reason}"),
        ("faults", ", ".join(faults_of(answer)) or "none"),
        ("segment", f"{segment.length} tokens, in pack {segment.pack}" if segment else "none"),
        *([("reward", parts)] if parts else []),
    )


def _objects(assessed: AssessedRollout) -> Table:
    parsed, match = assessed.parsed, assessed.match
    table = new_table("key", "description", "bins", "result")
    matched = dict(match.pairs)
    for place, found in enumerate(parsed.objects):
        if place in matched:
            iou = match.mask_iou[place, matched[place]]
            result = Text(f"matched to ground truth {matched[place] + 1}, IoU {iou:.2f}", "green")
        else:
            best = np.nanmax(match.mask_iou[place], initial=0.0)
            result = Text(f"not matched, IoU {best:.2f} at most", "red")
        table.add_row(plain(found.key), plain(found.desc), _bins(found.shape), result)
    for duplicate in assessed.duplicates or ():
        found = duplicate.found
        result = Text("removed, repeats an earlier object", "yellow")
        table.add_row(plain(found.key), plain(found.desc), _bins(found.shape), result)
    for key, reason in parsed.dropped:
        result = Text(f"dropped, {reason}: {DROPS[reason]}", "yellow")
        table.add_row(plain(key), "", "", result)
    return table


def _truths(assessed: AssessedRollout) -> Table:
    match, target = assessed.match, assessed.target
    table = new_table("#", "description", "bins", "result")
    finders = {j: assessed.parsed.objects[i].key for i, j in match.pairs}
    keys = iter(target.fn_keys if target else ())
    for place, truth in enumerate(assessed.sample.objects):
        if place in finders:
            result = Text("found as ", "green").append_text(plain(finders[place]))
        else:
            key = next(keys, None)
            result = Text("missed" + (f", appended as {key}" if key else ""), "bold blue")
        table.add_row(str(place + 1), plain(truth.desc), _bins(truth.shape), result)
    return table


def _bins(shape: Shape) -> str:
    name = "" if shape.kind == "bbox_2d" else "polygon "
    return name + " ".join(map(str, shape.coords))


def _target(target: Target, answer: StepAnswer, tokenizer: Tokenizer) -> Table:
    """The text of a target coloured by role, and the end of the answer that it does not keep."""
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
    return _rows(
        ("length", f"{len(target.token_ids)} tokens; the first {kept} are the answer's"),
        ("text", text),
        ("cut off", cut),
        ("roles", Text(", ").join(legend)),
        ("departures", f"{len(target.departures)} tokens of removed duplicates"),
    )


def step_table(replayed: Replayed) -> Titled:
    """What was compared at each stage, and how much of it differs."""
    table = new_table("stage", "#compared", "#different")
    for stage in STAGES:
        if result := replayed.stages.get(stage):
            table.add_row(stage, str(result.compared), str(len(result.differences)))
        else:
            table.add_row(stage, "not compared", "")
    step = replayed.logged
    processes, answers = counted(len(step.ranks), "process"), counted(len(step.answers), "answer")
    return f"Step {step.step}: {answers}, {processes}", table


def steps_table(differences: Mapping[int, str]) -> Titled:
    """A line for each differing step, and one for all identical steps.

    differences: of each step, in words; empty for an identical one.
    """
    table = new_table("steps", "verdict", "first difference")
    different = [step for step, text in differences.items() if text]
    identical = [step for step, text in differences.items() if not text]
    for step in different[:_STEPS]:
        table.add_row(str(step), "different", plain(differences[step]))
    if identical:
        table.add_row(listed(identical), "identical", "")
    return counted(len(differences), "step"), table


def difference_table(difference: Difference) -> Titled:
    """Where a step first differs, and both values."""
    logged, rebuilt, _, answer = difference.values
    rows = [
        (name, "nothing" if value is NOTHING else json.dumps(value, ensure_ascii=False))
        for name, value in (("logged", logged), ("rebuilt", rebuilt))
    ]
    if answer is not None:
        rows.append(("see", f"--step {answer.step} --sample {answer.sample_id}"))
    title = f"First difference: {difference.stage}, {about(difference)}"
    return title, _rows(("field", difference.field), *rows)


def about(difference: Difference) -> str:
    """The sample and the process of a difference."""
    rank, answer = difference.values.rank, difference.values.answer
    process = "all processes" if rank is None else f"process {rank}"
    return process if answer is None else f"sample {answer.sample_id} of {process}"


def verdict(replayed: Replayed) -> str:
    """In a sentence."""
    step = replayed.logged.step
    if replayed.first is not None:
        return f"Different: step {step} is not rebuilt as it was logged."
    return f"Identical: all answers of step {step} are rebuilt bit for bit."


def verdict_on_all(differences: Sequence[str], unread: int) -> str:
    """In a sentence. differences: of each step; empty for an identical one."""
    without = f" ({unread} could not be read)" if unread else ""
    if different := sum(map(bool, differences)):
        return f"Different: {different} of {len(differences)} steps{without}."
    return f"Identical: all {counted(len(differences), 'step')}{without} are rebuilt bit for bit."


def notes_on(facts: Mapping[str, Any]) -> Iterator[str]:
    """What may explain a difference: other versions of libraries. facts: of `run.json`."""
    changed = []
    for name, was in facts["versions"].items():
        try:
            now = version(name)
        except PackageNotFoundError:
            now = None
        if now != was:
            changed.append(f"{name} {was} (here {now or 'none'})")
    if changed:
        yield f"the run was made with {', '.join(changed)}"
