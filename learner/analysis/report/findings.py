"""What a person should look at first, computed from the logs.

Each finding has a threshold below which it is not worth a line; they are here in one place.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from learner.analysis.report.answers import DROPS, GUARD, Tally, drop_meanings, drop_totals
from learner.analysis.report.charts import seconds
from learner.analysis.report.run_view import Line, Point, RunView, numbers, of_channel, points
from learner.runs.console import counted, fraction, number, score
from learner.runs.declared import ANSWER_FAULTS

Weight = Literal["bad", "look", "good"]

_B = "stage2_ab/channel_b"
# Shares from which on something is told.
_TRUNCATED = 0.01
_DROPPED = 0.01
_WRONG = 0.1
_WAITING = 0.3
_PUSHING = 0.3
# A reason for drops rises when it is so much more frequent in the last third than in the first.
_RISES = 1.5
_FEW = 5
# Steps that are compared at both ends of a run.
_FEWEST_STEPS = 12


@dataclass(frozen=True)
class Highlight:
    """A sentence of the report. section: of the page, where it is shown."""

    weight: Weight
    text: str
    section: str


def findings(run: RunView, tally: Tally, unreadable: int) -> list[Highlight]:
    """What is wrong first, then what is worth a look. unreadable: images of shown answers."""
    found = [
        *_broken(run),
        *_servers(run),
        *_answers(run, tally),
        *_drops(run),
        *_trends(run),
        *_time(run),
    ]
    if unreadable:
        text = f"{counted(unreadable, 'image')} of the answers shown cannot be read any more"
        found.append(Highlight("look", text, "gallery"))
    weights: Sequence[Weight] = ("bad", "look", "good")
    return sorted(found, key=lambda finding: weights.index(finding.weight))


def _broken(run: RunView) -> Iterator[Highlight]:
    for key, name in (("loss", "The loss"), ("grad_norm", "The gradient norm")):
        broken = [step for step, value in run.series(key) if value is None]
        if broken:
            where = f"{counted(len(broken), 'step')} (first: step {broken[0]})"
            yield Highlight("bad", f"{name} was not a finite number in {where}", "curves")
    if run.error is not None:
        yield Highlight("bad", f"The run was ended by an error: {run.error}", "config")


def _servers(run: RunView) -> Iterator[Highlight]:
    def total(key: str) -> int:
        return int(sum(value or 0 for value in (line.get(key) for line in run.metrics)))

    if lost := total("rollout/servers_lost") + total("eval/rollout/servers_lost"):
        yield Highlight("bad", f"Servers were lost {counted(lost, 'time')}", "sync")
    if retries := total("rollout/retries") + total("eval/rollout/retries"):
        yield Highlight("look", f"{counted(retries, 'server call')} had to be made again", "sync")
    fallbacks = {line["sync_fallback"] for line in run.calls if line.get("sync_fallback")}
    for reason in sorted(map(str, fallbacks)):
        yield Highlight("bad", f"Full weights replaced the adapter: {reason}", "sync")


def _answers(run: RunView, tally: Tally) -> Iterator[Highlight]:
    limit = run.config.rollout_matching.max_new_tokens
    if tally.answers:
        cut = tally.cut_short / tally.answers
        if cut >= _TRUNCATED:
            text = f"{cut:.1%} of the answers were truncated at max_new_tokens ({limit})"
            yield Highlight("look", text, "answers")
        if empty := tally.faults["no_object"]:
            text = f"{fraction(empty, tally.answers)} of the answers are no JSON object at all"
            yield Highlight("look", text, "answers")
        if (dropped := tally.faults["dropped"]) / tally.answers >= _DROPPED:
            of_all = fraction(dropped, tally.answers)
            totals = drop_totals(run.steps, drop_meanings())
            most = max(totals, key=lambda reason: totals[reason])
            as_most = f", most of them as {most}" if totals[most] else ""
            text = f"The parser dropped objects of {of_all} of the answers{as_most}"
            yield Highlight("look", text, "answers")
        if (wrong := tally.faults["wrong_desc"]) / tally.answers >= _WRONG:
            of_all = fraction(wrong, tally.answers)
            text = f"{of_all} of the answers describe an object they found by a wrong name"
            yield Highlight("look", text, "gallery")
        if left := tally.faults["not_supervised"]:
            text = f"{counted(left, 'answer')} could not be trained on and were left out"
            yield Highlight("look", text, "gallery")
    else:
        rates = list(numbers(run.series("rollout/parse_truncated_rate")))
        if rates and sum(rates) / len(rates) >= _TRUNCATED:
            text = f"{fraction(sum(rates), len(rates))} of the answers were truncated"
            yield Highlight("look", text, "answers")
    for name, meaning in ANSWER_FAULTS.items():
        if lost := int(sum(numbers(run.series(f"{_B}/{name}")))):
            text = f"{counted(lost, 'answer')} with {meaning} ({name})"
            yield Highlight("look", text, "answers")
    if ended := int(sum(numbers(run.series(GUARD)))):
        yield Highlight("look", f"The repeat guard ended {counted(ended, 'answer')}", "answers")


def _drops(run: RunView) -> Iterator[Highlight]:
    lines = [line for line in run.steps if f"{_B}/N_valid_pred" in line]
    first, last = _ends(lines)
    reasons = {key for line in lines for key in line if key.startswith(DROPS)}
    for key in sorted(reasons):
        before, after = _per_object(first, key), _per_object(last, key)
        often = sum(line.get(key) or 0 for line in last) >= _FEW
        if often and after >= _RISES * before:
            text = (
                f"Drop reason {key.removeprefix(DROPS)} rises: {before:.2%} of the predicted "
                f"objects in the first third, {after:.2%} in the last"
            )
            yield Highlight("look", text, "answers")


def _ends(lines: list[Line]) -> tuple[list[Line], list[Line]]:
    """The first and the last third; nothing of a run that is too short to compare them."""
    third = len(lines) // 3
    return (lines[:third], lines[-third:]) if len(lines) >= _FEWEST_STEPS else ([], [])


def _per_object(lines: list[Line], key: str) -> float:
    def total(name: str) -> float:
        return sum(line.get(name) or 0 for line in lines)

    predicted = total(f"{_B}/N_valid_pred") + total(f"{_B}/N_drop_invalid")
    return total(key) / predicted if predicted else 0.0


def _trends(run: RunView) -> Iterator[Highlight]:
    for channel in run.channels:
        before, after = _change(run.series("loss", channel))
        if before is not None and after is not None and after > before:
            text = (
                f"The loss of channel {channel} rose: {number(before)} in the first third of its "
                f"steps, {number(after)} in the last"
            )
            yield Highlight("look", text, "curves")
    before, after = _change(run.series(f"{_B}/match_rate"))
    if before is not None and after is not None:
        text = f"{before:.1%} in the first third of the steps with answers, {after:.1%} in the last"
        if after > before:
            yield Highlight("good", f"The match rate of training images rose: {text}", "curves")
        else:
            text = f"The match rate of training images did not rise: {text}"
            yield Highlight("look", text, "curves")
    yield from _best(points(run.evaluations, "eval/f1"))


def _change(series: list[Point]) -> tuple[float | None, float | None]:
    """Means of the first and the last third."""
    third = len(series) // 3
    if len(series) < _FEWEST_STEPS:
        return None, None
    first, last = list(numbers(series[:third])), list(numbers(series[-third:]))
    return (sum(first) / len(first) if first else None), (sum(last) / len(last) if last else None)


def _best(scores: list[Point]) -> Iterator[Highlight]:
    known = [(value, step) for step, value in scores if value is not None]
    if len(known) < 2:
        return
    best, step = max(known)
    last = known[-1][0]
    if last < best:
        text = f"The best F1 was {score(best)} at step {step}; the last is {score(last)}"
        yield Highlight("look", text, "curves")
    elif best > 0:
        yield Highlight("good", f"The last F1, {score(last)}, is the best", "curves")


def _time(run: RunView) -> Iterator[Highlight]:
    lines = [line for line in run.steps if "time/step_s" in line]
    of_b = of_channel(lines, "B")
    slow = [line for line in lines if seconds(line, "push") > seconds(line, "learn") > 0]
    if slow:
        verb = "push took" if len(slow) == 1 else "pushes took"
        yield Highlight("look", f"{len(slow)} {verb} longer than the step's training", "timeline")
    whole = sum(seconds(line, "step") for line in of_b)
    if not whole:
        return
    waited = sum(seconds(line, "wait") for line in of_b) / whole
    pushed = sum(seconds(line, "push") for line in of_b) / whole
    if waited >= _WAITING:
        text = f"Steps with answers spent {waited:.0%} of their time waiting for packs"
        yield Highlight("look", text, "timeline")
    if pushed >= _PUSHING:
        text = f"Steps with answers spent {pushed:.0%} of their time pushing weights"
        yield Highlight("look", text, "timeline")
