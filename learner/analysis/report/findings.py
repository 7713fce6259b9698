"""The main problems of a run, computed from its logs.

The constants of this module are the thresholds of findings.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from learner.analysis.report.answers import LEFT_OUT, UNREAD, WRONG, Tally, count_rows
from learner.analysis.report.run_view import RunView, mean
from learner.runs.console import counted, fraction
from learner.runs.declared import DROPS

Weight = Literal["bad", "look"]

B = "stage2_ab/channel_b/"
GUARD = "rollout/repeat_terminate_triggered_sequences"

# Smallest shares for a finding.
_TRUNCATED = 0.01
_WRONG = 0.1


@dataclass(frozen=True)
class Finding:
    """A sentence of the page. section: slug of the section with the details."""

    weight: Weight
    text: str
    section: str


def findings(run: RunView, tally: Tally, unreadable: int) -> list[Finding]:
    """Return all findings: bad ones, then those to look at.

    unreadable: number of unreadable images of the shown answers.
    """
    found = [*_failures(run), *_drops(run), *_answers(run, tally)]
    if unreadable:
        text = f"{counted(unreadable, 'image')} of the answers shown cannot be read any more"
        found.append(Finding("look", text, "gallery"))
    return sorted(found, key=lambda finding: finding.weight != "bad")


def _failures(run: RunView) -> Iterator[Finding]:
    if run.error is not None:
        yield Finding("bad", f"The run was ended by an error: {run.error}", "config")
    for key, name in (("loss", "The loss"), ("grad_norm", "The gradient norm")):
        broken = [step for step, value in run.series(key) if value is None]
        if broken:
            where = f"{counted(len(broken), 'step')} (first: step {broken[0]})"
            yield Finding("bad", f"{name} was not a finite number in {where}", "curves")

    def total(key: str) -> int:
        keys = (key, f"eval/{key}")
        return int(sum(line.get(each) or 0 for line in run.metrics for each in keys))

    if lost := total("rollout/servers_lost"):
        yield Finding("bad", f"Servers were lost {counted(lost, 'time')}", "curves")
    if retries := total("rollout/retries"):
        yield Finding("look", f"{counted(retries, 'server call')} had to be repeated", "curves")
    fallbacks = {line["sync_fallback"] for line in run.calls if line.get("sync_fallback")}
    for reason in sorted(map(str, fallbacks)):
        yield Finding("bad", f"Full weights replaced the adapter: {reason}", "curves")


def _drops(run: RunView) -> Iterator[Finding]:
    """Yield a finding for each reason of incompletely parsed answers and dropped objects.

    Shares are of the answers and of the predicted objects of all logged steps.
    """
    totals = {name: run.total(f"{B}{name}") for name in UNREAD}
    of_step = run.config.training.effective_batch_size * run.config.answers_per_sample
    answers = count_rows(totals, UNREAD, len(run.by_channel.get("B", [])) * of_step)
    dropped = {reason: run.total(f"{B}strict_drop/{reason}") for reason in DROPS}
    predicted = run.total(f"{B}N_valid_pred") + sum(dropped.values())
    objects = sorted(count_rows(dropped, DROPS, predicted), key=lambda row: -row.count)
    for counts, unit, verb in ((answers, "answer", "with"), (objects, "object", "dropped as")):
        for each in counts:
            what = f"{counted(each.count, unit)} {verb} {each.name} ({each.share})"
            yield Finding("look", f"{what}: {each.meaning}", "gallery")


def _answers(run: RunView, tally: Tally) -> Iterator[Finding]:
    truncated = mean(run.series("rollout/parse_truncated_rate")) or 0.0
    limit = ""
    if tally.answers:
        truncated = tally.cut_short / tally.answers
        limit = f" at max_new_tokens ({run.config.rollout_matching.max_new_tokens})"
    if truncated >= _TRUNCATED:
        yield Finding("look", f"{truncated:.1%} of the answers were truncated{limit}", "gallery")
    wrong, left_out = tally.faults[WRONG], tally.faults[LEFT_OUT]
    if tally.answers and wrong / tally.answers >= _WRONG:
        of_all = fraction(wrong, tally.answers)
        text = f"{of_all} of the answers describe an object they found by a wrong name"
        yield Finding("look", text, "gallery")
    if left_out:
        text = f"{counted(left_out, 'answer')} could not be trained on and were left out"
        yield Finding("look", text, "gallery")
    if ended := run.total(GUARD):
        yield Finding("look", f"The repeat guard ended {counted(ended, 'answer')}", "gallery")
