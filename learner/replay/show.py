"""The verdict on a step that was built again, and on many."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from rich.table import Table

from learner.data.show import new_table, plain
from learner.metrics.figures import counted
from learner.replay.compare import NOTHING, STAGES, Difference, Differing, Replayed
from learner.replay.logged import listed
from learner.rollout_log import Judged, LoggedAnswer
from learner.tokens import Tokenizer, token_table
from learner.types import Role

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
    left_out = sum(judged.target is None for own in replayed.ranks for _, judged in own)
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
        logged, judged = difference.answer
        yield from _of_target(at, logged, LoggedAnswer.of(judged), tokenizer)
        return
    yield "logged", _text(at.logged)
    yield "rebuilt", _text(at.rebuilt)
    if difference.answer is not None and difference.stage == "match" and at.path[0] == "pairs":
        logged, judged = difference.answer
        pairs = [logged.match.pairs, judged.match.pairs]
        number = int(at.path[1])
        for pair in sorted({own[number] for own in pairs if number < len(own)}):
            yield f"[{pair[0]}, {pair[1]}]", _pair(judged, *pair)
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


def _pair(judged: Judged, prediction: int, truth: int) -> str:
    """In words."""
    objects, truths = judged.parsed.objects, judged.sample.objects
    if prediction >= len(objects) or truth >= len(truths):
        return "objects that are not there"
    found, item = objects[prediction], truths[truth]
    iou = judged.match.mask_iou[prediction, truth]
    overlap = "never compared" if math.isnan(iou) else f"IoU {iou:.4f} as rebuilt"
    return f"{found.key} ({found.desc}) with ground truth {truth} ({item.desc}), {overlap}"


def _ids(answer: LoggedAnswer) -> list[int]:
    return answer.target.token_ids(answer.response_token_ids) if answer.target else []


def _role(value: Any) -> str:
    return _text(value) if value is NOTHING else Role(value).name.lower().replace("_", " ")


def _text(value: Any) -> str:
    return repr(value) if value is NOTHING else json.dumps(value, ensure_ascii=False)
