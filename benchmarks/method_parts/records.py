"""What the arms of the experiment leave behind, and the tables made of it.

Every arm is a run folder with evaluations of the deciding scenes. An arm is held against channel A
alone of its seed, sample by sample: at as many optimizer steps, and at as many seconds of training.
The intervals are those of `learner compare`.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.analysis.evaluation.comparison import Compared, Comparison
from learner.analysis.report.run_view import SCORES as SCORES_FILE
from learner.runs.run_folder import EVALUATIONS, METRICS, RUN

# Of `learner compare`, and how the table shows them.
SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "F1@mIoU": ("F1@mIoU", "{:.3f}".format),
    "F1": ("F1", "{:.3f}".format),
    "precision": ("precision", "{:.3f}".format),
    "recall": ("recall", "{:.3f}".format),
    "objects an answer": ("objects", "{:.1f}".format),
    "duplicates an answer": ("duplicates", "{:.2f}".format),
    "tokens an answer": ("tokens", "{:.0f}".format),
    "truncated answers": ("truncated", "{:.1%}".format),
}
DECIDES, REPEATS = "F1@mIoU", "duplicates an answer"
HEADER = ["arm", *(title for title, _ in SHOWN.values()), "AP", "seconds"]
AGAINST = ["F1@mIoU minus A's", "seeds above 0", "duplicates over A's"]


@dataclass(frozen=True)
class Run:
    """An arm on one seed. folder: of the run, which has ended."""

    arm: str
    seed: int
    folder: Path

    @property
    def commit(self) -> str | None:
        commit: str | None = json.loads((self.folder / RUN).read_text(encoding="utf-8"))["commit"]
        return commit

    @property
    def evaluated(self) -> list[int]:
        """Optimizer steps after which it was evaluated."""
        return sorted(int(each.name[5:]) for each in (self.folder / EVALUATIONS).glob("step_*"))

    def evaluation(self, step: int) -> Path:
        return self.folder / EVALUATIONS / f"step_{step:06d}"

    def scores(self, step: int) -> dict[str, Any]:
        """All numbers of an evaluation."""
        text = (self.evaluation(step) / SCORES_FILE).read_text(encoding="utf-8")
        numbers: dict[str, Any] = json.loads(text)
        return numbers

    def seconds(self, until: int) -> float:
        """Seconds of the steps up to `until`: rollouts, pushes, forwards and backwards."""
        lines = (self.folder / METRICS).read_text(encoding="utf-8").splitlines()
        steps = [row for row in map(json.loads, lines) if "time/step_s" in row]
        return float(sum(row["time/step_s"] for row in steps if row["step"] <= until))


def read_runs(out: Path, arms: Iterable[str]) -> list[Run]:
    """Read the runs of all arms that have ended. out: has a folder `ARM_SEED` for each."""
    found = ((arm, path) for arm in arms for path in sorted(out.glob(f"{arm}_[0-9]*")))
    return [
        Run(arm, int(seed), path)
        for arm, path in found
        if (seed := path.name.removeprefix(f"{arm}_")).isdigit()
    ]


@dataclass(frozen=True)
class Row:
    """An arm on one seed beside channel A alone of that seed, by the name of each score."""

    run: Run
    step: int
    against: dict[str, Compared]

    @property
    def above(self) -> bool:
        """Whether the interval of what decides is above 0."""
        return self.against[DECIDES].low > 0


def at_equal_steps(run: Run, alone: Run, steps: int) -> Row:
    return _row(run, steps, alone, steps)


def at_equal_time(run: Run, alone: Run, steps: int) -> Row:
    """Channel A alone has at least as many seconds: its first evaluation that has, or its last."""
    needed = run.seconds(steps)
    enough = (step for step in alone.evaluated if alone.seconds(step) >= needed)
    return _row(run, steps, alone, next(enough, alone.evaluated[-1]))


def _row(run: Run, step: int, alone: Run, alone_step: int) -> Row:
    compared = Comparison.of(alone.evaluation(alone_step), run.evaluation(step))
    return Row(run, step, {each.name: each for each in compared.scores})


def score_table(rows: dict[str, list[Row]], base: str) -> str:
    """rows: of each arm by its title, one for each seed. base: title of channel A alone."""
    lines = [_line(HEADER + AGAINST), "|---" * len(HEADER + AGAINST) + "|"]
    for title, found in rows.items():
        cells = [
            spread([row.against[name].second for row in found], shown)
            for name, (_, shown) in SHOWN.items()
        ]
        ap = [row.run.scores(row.step)["coco"]["bbox"]["objects"]["ap"] for row in found]
        cells += [spread(ap, "{:.3f}".format)]
        cells += [spread([row.run.seconds(row.step) for row in found], "{:.0f}".format)]
        lines.append(_line([title, *cells, *(_against(found) if title != base else [""] * 3)]))
    return "\n".join(lines)


def _against(rows: Sequence[Row]) -> list[str]:
    differences = [row.against[DECIDES].difference for row in rows]
    repeats = [row.against[REPEATS] for row in rows]
    alone = sum(each.first for each in repeats)
    ratio = f"{sum(each.second for each in repeats) / alone:.2f}" if alone else "-"
    return [
        spread(differences, "{:+.3f}".format),
        f"{sum(row.above for row in rows)} of {len(rows)}",
        ratio,
    ]


def time_table(rows: dict[str, list[Row]]) -> str:
    """The same arms beside channel A alone of as many seconds."""
    names = ["arm", "F1@mIoU", "of A after as much time", *AGAINST]
    lines = [_line(names), "|---" * len(names) + "|"]
    for title, found in rows.items():
        sides = [[row.against[DECIDES].second for row in found]]
        sides += [[row.against[DECIDES].first for row in found]]
        cells = [spread(side, "{:.3f}".format) for side in sides]
        lines.append(_line([title, *cells, *_against(found)]))
    return "\n".join(lines)


def spread(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """`mean (least .. most)`, or the one value of all."""
    mean = shown(statistics.fmean(values))
    least, most = shown(min(values)), shown(max(values))
    return mean if least == most else f"{mean} ({least} .. {most})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
