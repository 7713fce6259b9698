"""Two evaluations of the same samples, side by side (EVAL-02). Imports no torch.

Intervals are those of the paired bootstrap (Efron and Tibshirani, 1993, chapter 13; Koehn, 2004,
for pairs): a draw takes samples with replacement, the same ones for both evaluations. The interval
is the middle 95 % of the differences of all draws. It covers the choice of samples, but not the
seed of a training.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from learner.analysis.evaluation.folder import ANSWERS, read_answers
from learner.analysis.evaluation.scores import ScoredAnswer
from learner.data.show import Table
from learner.runs.run_folder import EVALUATIONS
from shared_contracts.errors import ContractError

DRAWS = 2000
INTERVAL_PERCENT = (2.5, 97.5)
# Draws per chunk, to bound the memory of (draws, samples) counts.
_AT_ONCE = 50

Array = npt.NDArray[np.float64]
# Arrays (..., samples) or (...,) by name; `hits` has a last axis over `IOU_THRESHOLDS`.
Totals = dict[str, Array]


@dataclass(frozen=True)
class Compared:
    """One score. difference: second - first. low, high: its interval."""

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
        """Compare two evaluations: their folders, or run folders with evaluations.

        Raises ContractError for missing answers, or answers to different samples.
        """
        files = (find_answers(first), find_answers(second))
        sides = [{_place(answer): answer for answer in read_answers(file)} for file in files]
        _require_same_samples(files, sides)
        rows = [[side[place] for place in sides[0]] for side in sides]
        return cls(*files, len(rows[0]), tuple(compare(rows[0], rows[1], seed)))

    def numbers(self) -> dict[str, Any]:
        scores = [asdict(each) for each in self.scores]
        paths = {"first": str(self.first), "second": str(self.second)}
        return {**paths, "samples": self.samples, "draws": DRAWS, "scores": scores}


def find_answers(path: Path) -> Path:
    """Return the answer file of an evaluation, or of a run's newest evaluation.

    Raises ContractError if there is none.
    """
    if (path / ANSWERS).is_file():
        return path / ANSWERS
    files = (path / EVALUATIONS).glob(f"*/{ANSWERS}")
    if newest := max(files, key=lambda file: file.stat().st_mtime, default=None):
        return newest
    raise ContractError(
        str(path),
        f"has no {ANSWERS}, nor has an evaluation below it",
        "Name the folder of an evaluation, or evaluate the run with `learner eval`",
    )


def _place(answer: ScoredAnswer) -> str:
    """Return file name and line of a sample, without the folder, which may differ."""
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
    """Yield every compared score. first, second: answers to the same samples in the same order."""
    sides = (_counts(first), _counts(second))
    whole = [{name: counts.sum(axis=0) for name, counts in side.items()} for side in sides]
    drawn = [_resampled(side, seed) for side in sides]
    for name, score in SCORES.items():
        one, other = (float(score(totals)) for totals in whole)
        low, high = np.percentile(score(drawn[1]) - score(drawn[0]), INTERVAL_PERCENT).tolist()
        yield Compared(name, one, other, other - one, low, high)


def _resampled(counts: Totals, seed: int) -> Totals:
    """Return totals (draws,) of resampled samples; equal seeds draw the same samples."""
    rng, samples = np.random.default_rng(seed), len(counts["answers"])
    parts: list[Totals] = []
    for _ in range(DRAWS // _AT_ONCE):
        times = rng.multinomial(samples, np.full(samples, 1 / samples), _AT_ONCE)
        parts.append({name: times @ of_samples for name, of_samples in counts.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in counts}


def _counts(answers: Sequence[ScoredAnswer]) -> Totals:
    counts = {
        "answers": [1 for _ in answers],
        "predicted": [answer.counted for answer in answers],
        "truths": [len(answer.ground_truth) for answer in answers],
        "duplicates": [answer.duplicates for answer in answers],
        "oversized": [answer.oversized for answer in answers],
        "truncated": [answer.parse.truncated for answer in answers],
        "tokens": [len(answer.response_token_ids) for answer in answers],
        "hits": [answer.hits_at for answer in answers],
    }
    return {name: np.array(values, dtype=np.float64) for name, values in counts.items()}


def _f1(totals: Totals, hits: Array) -> Array:
    f1: Array = 2 * hits / np.maximum(totals["predicted"] + totals["truths"], 1)
    return f1


def _hits_per(name: str) -> Callable[[Totals], Array]:
    return lambda totals: totals["hits"][..., 0] / np.maximum(totals[name], 1)


def _per_answer(name: str) -> Callable[[Totals], Array]:
    return lambda totals: totals[name] / totals["answers"]


SCORES: dict[str, Callable[[Totals], Array]] = {
    "F1": lambda totals: _f1(totals, totals["hits"][..., 0]),
    "F1 at IoU 0.95": lambda totals: _f1(totals, totals["hits"][..., -1]),
    "F1@mIoU": lambda totals: _f1(totals, totals["hits"].mean(axis=-1)),
    "precision": _hits_per("predicted"),
    "recall": _hits_per("truths"),
    "objects an answer": _per_answer("predicted"),
    "duplicates an answer": _per_answer("duplicates"),
    "oversized an answer": _per_answer("oversized"),
    "truncated answers": _per_answer("truncated"),
    "tokens an answer": _per_answer("tokens"),
}


def comparison_table(found: Comparison) -> Table:
    rows = []
    for each in found.scores:
        interval = f"{each.low:+.3f} .. {each.high:+.3f}"
        star = "*" if each.low > 0 or each.high < 0 else ""
        values = (f"{each.first:.3f}", f"{each.second:.3f}", f"{each.difference:+.3f}")
        rows.append([each.name, *values, interval, star])
    title = f"{found.samples} samples; difference: second - first"
    return Table(title, ("", "#first", "#second", "#difference", "#95 % interval", ""), rows)
