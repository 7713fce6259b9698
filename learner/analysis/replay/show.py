"""What a replay found, for a terminal: a step, a difference, the story of one answer."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from learner.analysis.replay.rebuild import NOTHING, STAGES, Difference, Differing, Replayed, listed
from learner.data.show import new_table, plain
from learner.runs.console import counted
from learner.runs.declared import METRICS
from learner.runs.rollout_log import LoggedAnswer, LoggedTarget, StepAnswer
from learner.stages.tokens import Tokenizer, decode_exactly, token_table
from learner.types import AssessedRollout, Role, Shape, Target
from shared_contracts.cli import printable

_STYLES = {
    Role.MATCHED_STRUCTURE: "green",
    Role.MATCHED_DESC: "green",
    Role.FALSE_POSITIVE: "red",
    Role.APPENDED_STRUCTURE: "bold blue",
    Role.APPENDED_DESC: "bold blue",
    Role.COORD: "cyan",
    Role.CLOSURE: "magenta",
}
_MEANINGS = {metric.key.rpartition("/")[2]: metric.meaning for metric in METRICS}


def story(
    answer: StepAnswer, assessed: AssessedRollout, mates: Sequence[StepAnswer], tokenizer: Tokenizer
) -> Iterator[tuple[str, Table]]:
    """Tables under their titles. mates: other answers whose segments are in the same pack."""
    yield f"Sample {answer.sample_id}", _facts(answer, assessed, mates)
    yield "Answer", _alone(decode_exactly(tokenizer, answer.response_token_ids))
    if answer.parse.objects or answer.parse.dropped:
        yield "Objects of the answer", _objects(assessed)
    yield "Ground truth", _truths(assessed)
    title = "What is taught"
    if assessed.target is None:
        yield title, _alone(f"nothing, the answer is left out: {assessed.left_out}")
    else:
        yield title, _target(assessed.target, assessed.rollout.response_token_ids, tokenizer)


def _facts(answer: StepAnswer, assessed: AssessedRollout, mates: Sequence[StepAnswer]) -> Table:
    table = facts_table()
    for image in answer.images:
        table.add_row("image", plain(image))
    begun, ended = answer.weights_version
    weights = str(begun) if begun == ended else f"{begun} when begun, {ended} when ended"
    asked = f"in step {answer.step} by process {answer.rank}, chunk {answer.chunk}"
    table.add_row("asked", f"{asked}, seed {answer.seed}, weights of version {weights}")
    table.add_row("answered", _answered(answer))
    if assessed.target is not None and answer.segment is not None:
        prompt, taught = len(answer.prompt_token_ids), len(assessed.target.token_ids)
        segment = answer.segment
        table.add_row(
            "segment", f"{prompt + taught} tokens: {prompt} of the prompt, {taught} taught"
        )
        names = listed([mate.sample_id.rpartition("/")[2] for mate in mates])
        beside = f"beside {names}" if mates else "alone"
        came = f"made when {segment.come} segments of the step had come"
        table.add_row("pack", plain(f"number {segment.pack}, {came}; {beside}"))
    return table


def _answered(answer: StepAnswer) -> str:
    said = f"{len(answer.response_token_ids)} tokens, ended by {answer.finish_reason}"
    if answer.repeat_terminated:
        said += ", as it repeated itself"
    if answer.parse.truncated:
        said += "; cut off: its outermost object is not closed"
    if answer.parse.invalid:
        said += "; no object was opened, so nothing of it can be kept"
    return said


def _objects(assessed: AssessedRollout) -> Table:
    parsed, match = assessed.parsed, assessed.match
    table = new_table("key", "description", "bins", "what became of it")
    matched = dict(match.pairs)
    for number, found in enumerate(parsed.objects):
        if number in matched:
            iou = match.mask_iou[number, matched[number]]
            became = Text(f"matched to ground truth {matched[number] + 1}, IoU {iou:.2f}", "green")
        else:
            became = Text(f"matched to none{_nearest(match.mask_iou[number])}", "red")
        table.add_row(plain(found.key), plain(found.desc), _shape(found.shape), became)
    for duplicate in assessed.duplicates or ():
        found = duplicate.found
        became = Text("removed, repeats an earlier object", "yellow")
        table.add_row(plain(found.key), plain(found.desc), _shape(found.shape), became)
    for key, reason in parsed.dropped:
        meaning = _MEANINGS[reason].removeprefix("of those: ")
        table.add_row(plain(key), "", "", Text(f"dropped, {reason}: {meaning}", "yellow"))
    return table


def _nearest(overlaps: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> str:
    """The ground truth that a prediction overlaps most, if it was compared with any."""
    if np.isnan(overlaps).all():
        return ""
    best = int(np.nanargmax(overlaps))
    return f"; IoU {overlaps[best]:.2f} with ground truth {best + 1} at most"


def _truths(assessed: AssessedRollout) -> Table:
    match, target = assessed.match, assessed.target
    table = new_table("#", "description", "bins", "what became of it")
    finders = {j: assessed.parsed.objects[i].key for i, j in match.pairs}
    keys = iter(target.fn_keys if target else ())
    for number, truth in enumerate(assessed.sample.objects):
        if number in finders:
            became = Text(f"found as {printable(finders[number])}", "green")
        else:
            key = next(keys, None)
            became = Text("missed" + (f", appended as {key}" if key else ""), "bold blue")
        table.add_row(str(number + 1), plain(truth.desc), _shape(truth.shape), became)
    return table


def _target(target: Target, response: list[int], tokenizer: Tokenizer) -> Table:
    """Its text in parts, coloured by role, and what of the answer is not in it."""
    kept = LoggedTarget.of(target, response).kept
    last = len(target.token_ids) - 1
    table = new_table("part", "#tokens", "text")

    def add(part: str, start: int, end: int) -> None:
        if end > start:
            table.add_row(part, str(end - start), _coloured(target, start, end, tokenizer))

    add("kept", 0, kept)
    add("spelled anew", kept, target.prefix_len)
    add("appended" if target.fn_keys else "closed", target.prefix_len, last)
    add("end", last, last + 1)
    if cut := response[kept:]:
        text = plain(decode_exactly(tokenizer, cut))
        text.stylize("strike dim")
        table.add_row("cut off", str(len(cut)), text)
    for position, token in target.departures:
        said, taught = (
            printable(decode_exactly(tokenizer, [each]))
            for each in (token, target.token_ids[position])
        )
        table.add_row(
            "departure", "1", plain(f"{said} of a duplicate, where the target has {taught}")
        )
    counts = {role: int((target.role == role).sum()) for role in Role}
    legend = Text(", ").join(
        Text(f"{count} {role.name.lower().replace('_', ' ')}", _STYLES[role])
        for role, count in counts.items()
        if count
    )
    table.add_row("roles", str(last + 1), legend)
    return table


def _coloured(target: Target, start: int, end: int, tokenizer: Tokenizer) -> Text:
    text = Text()
    for role, run in groupby(range(start, end), lambda i: Role(int(target.role[i]))):
        own = plain(decode_exactly(tokenizer, [target.token_ids[i] for i in run]))
        text.append(own.plain, _STYLES[role])
    return text


def _alone(text: str) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(overflow="fold")
    table.add_row(plain(text))
    return table


def _shape(shape: Shape) -> str:
    name = "" if shape.kind == "bbox_2d" else "polygon "
    return name + " ".join(map(str, shape.coords))


Titled = tuple[str, Table]

# Steps that differ, each with its own line.
_STEPS = 20
# Tokens shown before and after one that differs.
_AROUND = 10
# What is compared at each stage.
_OF_STAGE = dict(
    zip(STAGES, ("answers", "answers", "answers", "answers", "segments", "numbers"), strict=True)
)


def step_table(replayed: Replayed) -> Titled:
    """What was compared at each stage, and how much of it differs."""
    step = replayed.logged
    table = new_table("stage", "#compared", "", "#identical", "#different", "")
    for stage in STAGES:
        result = replayed.stages[stage]
        different = len(result.differences)
        table.add_row(
            stage,
            str(result.compared),
            _OF_STAGE[stage],
            str(result.compared - different),
            str(different),
            plain(result.note),
        )
    title = f"Step {step.step}: {counted(len(step.answers), 'answer')}"
    if len(step.ranks) > 1:
        title += f" of {len(step.ranks)} processes"
    if replayed.packs:
        title += f", {counted(replayed.packs, 'pack')}"
    return title, table


class DifferingStep(NamedTuple):
    """What is told of one of many: a whole `Replayed` holds every answer of its step."""

    step: int
    where: str

    @classmethod
    def of(cls, step: int, first: Difference) -> "DifferingStep":
        return cls(step, f"{first.field}, {about(first)}")


def steps_table(different: Sequence[DifferingStep], identical: Sequence[int]) -> Titled:
    """A line for each step that differs, and one for all that do not."""
    table = new_table("steps", "verdict", "first difference")
    for step, where in different[:_STEPS]:
        table.add_row(str(step), "different", plain(where))
    if len(different) > _STEPS:
        table.add_row(listed([each.step for each in different[_STEPS:]]), "different", "")
    if identical:
        table.add_row(listed(identical), "identical", "")
    return counted(len(different) + len(identical), "step"), table


def difference_table(difference: Difference, tokenizer: Tokenizer) -> Titled:
    """Where a step first differs, and both values."""
    table = facts_table()
    table.add_row("field", plain(difference.field))
    for label, value in _told(difference, tokenizer):
        table.add_row(label, plain(value))
    if difference.answer is not None:
        step, sample = difference.answer[0].step, difference.answer[0].sample_id
        table.add_row("see", plain(f"--step {step} --sample {sample}"))
    return f"First difference: {difference.stage}, {about(difference)}", table


def about(difference: Difference) -> str:
    """Which sample and process it is about."""
    process = "all processes" if difference.rank is None else f"process {difference.rank}"
    if difference.answer is None:
        return process
    return f"sample {difference.answer[0].sample_id} of {process}"


def verdict(replayed: Replayed) -> str:
    """In a sentence."""
    step = replayed.logged.step
    if replayed.first is not None:
        return f"Different: step {step} is not built again as it was logged."
    left_out = sum(assessed.target is None for own in replayed.ranks for _, assessed in own)
    without = f" ({left_out} of them left out of training)" if left_out else ""
    return f"Identical: all answers of step {step}{without} are built again bit for bit."


def verdict_on_all(different: int, identical: int, left_out: int) -> str:
    """In a sentence."""
    without = f" ({left_out} could not be read)" if left_out else ""
    if different:
        return f"Different: {different} of {different + identical} steps{without}."
    return f"Identical: all {counted(identical, 'step')}{without} are built again bit for bit."


def notes_on(facts: Mapping[str, Any], step: int) -> Iterator[str]:
    """What is otherwise here than where the run was made. facts: of `run.json`. step: the first."""
    now = {name: _version(name) for name in facts["versions"]}
    changed = [
        f"{name} {was} (here {now[name] or 'none'})"
        for name, was in facts["versions"].items()
        if now[name] != was
    ]
    if changed:
        yield f"the run was made with {', '.join(changed)}"
    if step <= facts["started_at_step"]:
        yield (
            f"the run went on after step {facts['started_at_step']}: steps up to it may have been "
            "made with other versions and another training.packing_min_fill_ratio"
        )


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def facts_table() -> Table:
    """Names and what they are, without a head."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def around(ids: Sequence[int], position: int, tokenizer: Tokenizer) -> str:
    """The text of some tokens, with the one at `position` in marks."""
    pieces = token_table(tokenizer).pieces(list(ids), tokenizer)
    before = "".join(pieces[max(0, position - _AROUND) : position])
    after = "".join(pieces[position + 1 : position + 1 + _AROUND])
    here = pieces[position] if position < len(pieces) else "the end"
    return f"{'...' if position > _AROUND else ''}{before}>>{here}<<{after}"


def _told(difference: Difference, tokenizer: Tokenizer) -> Iterable[tuple[str, str]]:
    at = difference.at
    if difference.answer is not None and difference.stage == "target":
        logged, assessed = difference.answer
        yield from _of_target(at, logged, LoggedAnswer.of(assessed), tokenizer)
        return
    yield "logged", _text(at.logged)
    yield "rebuilt", _text(at.rebuilt)
    if difference.answer is not None and difference.stage == "match" and at.path[0] == "pairs":
        logged, assessed = difference.answer
        pairs = [logged.match.pairs, assessed.match.pairs]
        number = int(at.path[1])
        for pair in sorted({own[number] for own in pairs if number < len(own)}):
            yield f"[{pair[0]}, {pair[1]}]", _pair(assessed, *pair)
    if len(at.path) > 1:
        yield "in, logged", _text(at.inside[0])
        yield "in, rebuilt", _text(at.inside[1])


def _of_target(
    at: Differing, logged: LoggedAnswer, rebuilt: LoggedAnswer, tokenizer: Tokenizer
) -> Iterable[tuple[str, str]]:
    """With the text around the token that it is about."""
    was, now = _ids(logged), _ids(rebuilt)
    match at.path:
        case ("token_ids", int(position)):
            yield "logged", f"{_text(at.logged)}   {around(was, position, tokenizer)}"
            yield "rebuilt", f"{_text(at.rebuilt)}   {around(now, position, tokenizer)}"
        case ("roles", int(position)):
            yield "logged", _role(at.logged)
            yield "rebuilt", _role(at.rebuilt)
            yield "at", f"token {position}: {around(now, position, tokenizer)}"
        case ("groups", int(number), *_):
            yield "logged", _text(at.logged)
            yield "rebuilt", _text(at.rebuilt)
            groups = [g for of in (rebuilt, logged) if of.target for g in of.target.groups[number:]]
            first = groups[0].positions[0]
            yield "at", f"token {first}: {around(now, first, tokenizer)}"
        case _:
            yield "logged", _text(at.logged)
            yield "rebuilt", _text(at.rebuilt)
            reason = rebuilt.left_out if at.path == ("supervised",) else None
            if reason or logged.left_out:
                yield "left out", str(reason or logged.left_out)


def _pair(assessed: AssessedRollout, prediction: int, truth: int) -> str:
    """In words, with the ground truth's number from 1 as on every page and table."""
    objects, truths = assessed.parsed.objects, assessed.sample.objects
    if prediction >= len(objects) or truth >= len(truths):
        return "objects that are not there"
    found, item = objects[prediction], truths[truth]
    iou = assessed.match.mask_iou[prediction, truth]
    overlap = "never compared" if math.isnan(iou) else f"IoU {iou:.4f} as rebuilt"
    return f"{found.key} ({found.desc}) with ground truth {truth + 1} ({item.desc}), {overlap}"


def _ids(answer: LoggedAnswer) -> list[int]:
    return answer.target.token_ids(answer.response_token_ids) if answer.target else []


def _role(value: Any) -> str:
    return _text(value) if value is NOTHING else Role(value).name.lower().replace("_", " ")


def _text(value: Any) -> str:
    return repr(value) if value is NOTHING else json.dumps(value, ensure_ascii=False)
