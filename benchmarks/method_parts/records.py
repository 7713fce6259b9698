"""What an arm of the ablation leaves behind, and the tables made of it.

Record       one arm on one seed: its evaluations and what it generated in training
tables       of docs/benchmarks.md: mean over the seeds, with the least and the most
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

RECORD = "record.json"

SCORES = (
    "| arm | precision | recall | F1 | F1 of boxes alone | F1 minus that of {base}, same seed |"
)
COUNTS = (
    "| arm | where | answers | tokens | tokens an answer | truncated | ended by the guard "
    "| objects dropped |"
)


@dataclass(frozen=True)
class Counts:
    """Over some answers.

    tokens: generated, without the EOS. truncated: not closed where they end, whoever ended
    them. ended: by the repeat guard. dropped: objects the strict parser refuses.
    """

    answers: int = 0
    tokens: int = 0
    truncated: int = 0
    ended: int = 0
    dropped: int = 0

    def __add__(self, other: Self) -> Self:
        names = [field.name for field in fields(self)]
        return type(self)(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True)
class Evaluation:
    """Of the held-out scenes, after `step` optimizer steps."""

    step: int
    precision: float
    recall: float
    f1: float
    box_f1: float
    counts: Counts


@dataclass(frozen=True)
class Record:
    """One arm on one seed. commit: of the tree that ran it. training: of its channel-B steps."""

    arm: str
    seed: int
    commit: str | None
    seconds: float
    evaluations: tuple[Evaluation, ...]
    training: Counts

    @property
    def last(self) -> Evaluation:
        return self.evaluations[-1]

    @property
    def evaluated(self) -> Counts:
        """Over the answers of all evaluations."""
        return sum((one.counts for one in self.evaluations), Counts())

    def write(self, folder: Path) -> None:
        (folder / RECORD).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        told = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return cls(
            **told
            | {
                "evaluations": tuple(
                    Evaluation(**one | {"counts": Counts(**one["counts"])})
                    for one in told["evaluations"]
                ),
                "training": Counts(**told["training"]),
            }
        )


def read_records(out: Path) -> list[Record]:
    """Of every arm that has ended under `out`."""
    return [Record.read(path.parent) for path in sorted(out.glob(f"*/{RECORD}"))]


def tables(records: Sequence[Record], titles: Mapping[str, str], base: str) -> str:
    """Scores at the end of training, and what was generated on the way.

    titles: of the arms by their keys, in the order of the rows; without a record, no row.
    base: key of the arm that the others are held against, seed by seed.
    """
    of = {key: [r for r in records if r.arm == key] for key in titles}
    found = {key: runs for key, runs in of.items() if runs}
    started = [r for r in records if r.arm == base] or list(records)
    scores = [SCORES.format(base=titles[base]), "|---" * 6 + "|"]
    scores.append(_scores("before, after the warm-up", [r.evaluations[0] for r in started], ""))
    scores += [
        _scores(titles[key], [r.last for r in runs], _over(runs, of[base]) if key != base else "")
        for key, runs in found.items()
    ]
    counts = [COUNTS, "|---" * 8 + "|"]
    for key, runs in found.items():
        counts.append(_counts(titles[key], "training", [r.training for r in runs]))
        counts.append(_counts("", "evaluations", [r.evaluated for r in runs]))
    return "\n".join([*scores, "", *counts])


def spread(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """`mean (least .. most)`, or the one value of all."""
    mean = shown(statistics.fmean(values))
    least, most = shown(min(values)), shown(max(values))
    return mean if least == most else f"{mean} ({least} .. {most})"


def curves(records: Sequence[Record], arm: str, score: str) -> tuple[list[int], list[list[float]]]:
    """(steps, scores of each seed at these steps) of one arm.

    score: name of a field of `Evaluation`. Seeds without an evaluation at some step are a
    caller's mistake: all runs of an ablation are evaluated alike.
    """
    runs = [r for r in records if r.arm == arm]
    grids = {tuple(one.step for one in r.evaluations) for r in runs}
    assert len(grids) <= 1, f"the runs of {arm} were evaluated at different steps"
    steps = list(next(iter(grids), ()))
    return steps, [[getattr(one, score) for one in r.evaluations] for r in runs]


def _over(runs: Sequence[Record], base: Sequence[Record]) -> str:
    """Difference of the last F1 on the seeds that both have."""
    there = {r.seed: r.last.f1 for r in base}
    differences = [r.last.f1 - there[r.seed] for r in runs if r.seed in there]
    return spread(differences, "{:+.3f}".format) if differences else ""


def _scores(title: str, evaluations: Sequence[Evaluation], over: str) -> str:
    names = ("precision", "recall", "f1", "box_f1")
    cells = [spread([getattr(one, name) for one in evaluations], "{:.3f}".format) for name in names]
    return _row([title, *cells, over])


def _counts(title: str, where: str, counts: Sequence[Counts]) -> str:
    """A row of sums; answers that were never asked for leave it empty."""
    if not any(c.answers for c in counts):
        return _row([title, where, "0", *[""] * 5])
    names = ("truncated", "ended", "dropped")
    cells = [spread([getattr(c, name) for c in counts], "{:,.0f}".format) for name in names]
    whole = spread([c.answers for c in counts], "{:,.0f}".format)
    tokens = spread([c.tokens for c in counts], "{:,.0f}".format)
    each = spread([c.tokens / c.answers for c in counts], "{:.1f}".format)
    return _row([title, where, whole, tokens, each, *cells])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
