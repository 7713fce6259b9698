"""What the parser dropped, how answers ended, how long they are."""

from dataclasses import dataclass

from learner.metrics.declared import CHANNEL_B
from learner.metrics.figures import number, share
from learner.report.charts import Bars, Chart, histogram, present
from learner.report.outcomes import FAULTS
from learner.report.run_view import Line, RunView
from learner.report.tally import Tally

DROPS = "stage2_ab/channel_b/strict_drop/"
GUARD = "rollout/repeat_terminate_triggered_sequences"


def drop_meanings() -> dict[str, str]:
    """Why the parser drops an object, by reason."""
    return {
        metric.key.removeprefix(DROPS): metric.meaning.removeprefix("of those: ")
        for metric in CHANNEL_B
        if metric.key.startswith(DROPS)
    }


@dataclass(frozen=True)
class CountRow:
    """A thing that was counted, and what it is."""

    name: str
    meaning: str
    count: str
    share: str


def drop_chart(run: RunView, meanings: dict[str, str]) -> Chart | None:
    """Dropped objects by reason, over the steps with answers; None where none was dropped."""
    lines = [line for line in run.steps if any(key.startswith(DROPS) for key in line)]
    totals = drop_totals(lines, meanings)
    if not any(totals.values()):
        return None
    bars = Bars.over([line["step"] for line in lines])
    traces = [
        bars.trace(reason, [line.get(DROPS + reason) for line in lines], place % 8 + 1)
        for place, reason in enumerate(meanings)
        if totals[reason]
    ]
    notes = [bars.note] if bars.note else []
    return Chart("drops", "Dropped objects by reason", ["objects"], traces, notes, wide=True)


def drop_totals(lines: list[Line], meanings: dict[str, str]) -> dict[str, int]:
    return {
        reason: int(sum(line.get(DROPS + reason) or 0 for line in lines)) for reason in meanings
    }


def drop_rows(run: RunView, meanings: dict[str, str]) -> list[CountRow]:
    """All reasons, the most frequent first."""
    totals = drop_totals(run.steps, meanings)
    valid = sum(line.get("stage2_ab/channel_b/N_valid_pred") or 0 for line in run.steps)
    predicted = valid + sum(totals.values())
    ordered = sorted(totals, key=lambda reason: -totals[reason])
    return [_row(reason, meanings[reason], totals[reason], predicted) for reason in ordered]


def _row(name: str, meaning: str, count: int, of: float) -> CountRow:
    return CountRow(name, meaning, number(count), share(count, of, places=2))


def guard_chart(run: RunView) -> Chart | None:
    lines = [line for line in run.steps if GUARD in line]
    if not any(line[GUARD] for line in lines):
        return None
    bars = Bars.over([line["step"] for line in lines])
    traces = [bars.trace("ended by the guard", [line[GUARD] for line in lines], 2)]
    notes = [bars.note] if bars.note else []
    return Chart("guard", "Answers that the repeat guard ended", ["answers"], traces, notes)


def finish_rows(tally: Tally) -> list[CountRow]:
    meanings = {
        "stop": "the model ended it",
        "length": "max_new_tokens, or the room of the model, ended it",
        "not told": "the backend does not say",
    }
    return [
        _row(reason, meanings.get(reason, ""), count, tally.answers)
        for reason, count in tally.finishes.most_common()
    ]


def fault_rows(tally: Tally) -> list[CountRow]:
    return [
        _row(fault.label, fault.meaning, tally.faults[name], tally.answers)
        for name, fault in FAULTS.items()
    ]


def histograms(tally: Tally) -> list[Chart]:
    return present(
        histogram("tokens", "Lengths of answers", "tokens", tally.tokens, 1),
        histogram("predicted", "Objects predicted", "objects of an answer", tally.predicted, 3),
        histogram("truths", "Objects annotated", "objects of a sample", tally.truths, 4),
        histogram("dropped", "Objects dropped", "objects of an answer", tally.dropped, 2),
    )
