"""Two evaluations of the same samples, side by side (EVAL-02). Imports no torch.

answers of both -> a row of counts for each sample -> totals of resampled samples -> intervals

The intervals are those of the paired bootstrap (Efron and Tibshirani, 1993, chapter 13; Koehn,
2004, for pairs): samples are drawn with replacement, the same ones for both, and each draw has a
difference. An interval holds the middle 95 % of these. It covers the choice of the samples, and
not that of the seed of a training.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from learner.analysis.evaluation.folder import ANSWERS, read_answers
from learner.analysis.evaluation.scores import IOU_THRESHOLDS, ScoredAnswer
from learner.data.show import new_table
from learner.runs.run_folder import EVALUATIONS
from shared_contracts.errors import ContractError

DRAWS = 2000
INTERVAL_PERCENT = (2.5, 97.5)
# Draws at a time, so that their weights take little memory.
_AT_ONCE = 50

Totals = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Compared:
    """One score. difference: second - first; low, high: of its interval."""

    name: str
    first: float
    second: float
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """first, second: the files of the answers."""

    first: Path
    second: Path
    samples: int
    scores: tuple[Compared, ...]

    @classmethod
    def of(cls, first: Path, second: Path, seed: int = 0) -> "Comparison":
        """Each is an evaluation's folder, its answers, or a run folder with evaluations.

        Raises ContractError where there are no answers, or where they are to other samples.
        """
        files = (find_answers(first), find_answers(second))
        sides = [{_place(answer): answer for answer in read_answers(file)} for file in files]
        _require_same_samples(files, sides)
        rows = [[side[place] for place in sides[0]] for side in sides]
        return cls(*files, len(rows[0]), tuple(compare(rows[0], rows[1], seed)))

    def numbers(self) -> dict[str, Any]:
        """All of it, for JSON."""
        scores = [asdict(each) for each in self.scores]
        paths = {"first": str(self.first), "second": str(self.second)}
        return {**paths, "samples": self.samples, "draws": DRAWS, "scores": scores}


def find_answers(path: Path) -> Path:
    """The answers of an evaluation, or of the newest one of a run.

    Raises ContractError where there are none.
    """
    if path.is_file():
        return path
    if (path / ANSWERS).is_file():
        return path / ANSWERS
    found = (path / EVALUATIONS).glob(f"*/{ANSWERS}")
    if newest := max(found, key=lambda file: file.stat().st_mtime, default=None):
        return newest
    raise ContractError(
        str(path),
        f"has no {ANSWERS}, nor has an evaluation below it",
        "Name the folder of an evaluation, or evaluate the run with `learner eval`",
    )


def _place(answer: ScoredAnswer) -> str:
    """File and line of a sample; the folder of the data may be another on another machine."""
    return Path(answer.sample_id).name


def _require_same_samples(
    files: tuple[Path, Path], sides: Sequence[dict[str, ScoredAnswer]]
) -> None:
    first, second = sides
    do = "Evaluate both on one data file"
    if alone := sorted(first.keys() ^ second.keys()):
        file = files[0] if alone[0] in first else files[1]
        found = f"samples that only one of both has: {len(alone)}, such as {alone[0]} of {file}"
        raise ContractError(str(files[1]), found, do)
    if not first:
        raise ContractError(str(files[0]), "has no answers", do)
    for place, answer in first.items():
        if answer.ground_truth != second[place].ground_truth:
            found = f"{place} has other objects than in {files[0]}"
            raise ContractError(str(files[1]), found, do)


def compare(
    first: Sequence[ScoredAnswer], second: Sequence[ScoredAnswer], seed: int
) -> Iterator[Compared]:
    """Every score. first, second: answers to the same samples in the same order."""
    a, b = _counts(first), _counts(second)
    rng = np.random.default_rng(seed)
    drawn = [_draw(rng, a, b, draws) for draws in [_AT_ONCE] * (DRAWS // _AT_ONCE)]
    of_a, of_b = (np.concatenate(totals) for totals in zip(*drawn, strict=True))
    for name, score in SCORES.items():
        one, other = (float(score(counts.sum(axis=0, keepdims=True))[0]) for counts in (a, b))
        low, high = np.percentile(score(of_b) - score(of_a), INTERVAL_PERCENT).tolist()
        yield Compared(name, one, other, other - one, low, high)


def _draw(rng: np.random.Generator, a: Totals, b: Totals, draws: int) -> tuple[Totals, Totals]:
    """Totals (draws, counts) of both, over as many samples as there are, drawn for both alike."""
    samples = len(a)
    times = rng.multinomial(samples, np.full(samples, 1 / samples), draws)
    return times @ a, times @ b


_COUNTED = ("answers", "predicted", "truths", "duplicates", "oversized", "truncated", "tokens")


def _counts(answers: Sequence[ScoredAnswer]) -> Totals:
    """(samples, counts): `_COUNTED`, then the hits at each of `IOU_THRESHOLDS`."""
    rows = [
        (
            1,
            answer.counted,
            len(answer.ground_truth),
            answer.duplicates,
            answer.oversized,
            answer.parse.truncated,
            len(answer.response_token_ids),
            *answer.hits_at,
        )
        for answer in answers
    ]
    return np.array(rows, dtype=np.float64)


def _count(totals: Totals, name: str) -> Totals:
    counts: Totals = totals[:, _COUNTED.index(name)]
    return counts


def _hits(totals: Totals, at: int) -> Totals:
    hits: Totals = totals[:, len(_COUNTED) :][:, at]
    return hits


def _f1(totals: Totals, at: int) -> Totals:
    both = _count(totals, "predicted") + _count(totals, "truths")
    f1: Totals = 2 * _hits(totals, at) / np.maximum(both, 1)
    return f1


def _mean_f1(totals: Totals) -> Totals:
    mean: Totals = np.mean([_f1(totals, at) for at in range(len(IOU_THRESHOLDS))], axis=0)
    return mean


def _hits_per(name: str) -> Callable[[Totals], Totals]:
    return lambda totals: _hits(totals, 0) / np.maximum(_count(totals, name), 1)


def _per_answer(name: str) -> Callable[[Totals], Totals]:
    return lambda totals: _count(totals, name) / _count(totals, "answers")


SCORES: dict[str, Callable[[Totals], Totals]] = {
    "F1": lambda totals: _f1(totals, 0),
    "F1 at IoU 0.95": lambda totals: _f1(totals, -1),
    "F1@mIoU": _mean_f1,
    "precision": _hits_per("predicted"),
    "recall": _hits_per("truths"),
    "objects an answer": _per_answer("predicted"),
    "duplicates an answer": _per_answer("duplicates"),
    "oversized an answer": _per_answer("oversized"),
    "truncated answers": _per_answer("truncated"),
    "tokens an answer": _per_answer("tokens"),
}


def comparison_table(found: Comparison) -> Table:
    """A row for each score; a star where the interval does not hold 0."""
    table = new_table("", "#first", "#second", "#difference", "#95 % interval", "")
    for each in found.scores:
        interval = f"{each.low:+.3f} .. {each.high:+.3f}"
        star = "*" if each.low > 0 or each.high < 0 else ""
        values = (f"{each.first:.3f}", f"{each.second:.3f}", f"{each.difference:+.3f}")
        table.add_row(each.name, *values, interval, star)
    return table
