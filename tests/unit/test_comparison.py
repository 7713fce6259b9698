"""Two evaluations side by side, with paired intervals (EVAL-02)."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from learner.analysis.evaluation.comparison import SCORES, Compared, compare, find_answers
from learner.analysis.evaluation.folder import ANSWERS, Scored, write_evaluation
from learner.analysis.evaluation.scores import ScoredAnswer, Scores
from learner.cli import app
from learner.types import GroundTruthObject
from shared_contracts.errors import ContractError
from tests.unit.eval_answers import DATA, answers, box

pytestmark = pytest.mark.req("EVAL-02")

CAT, DOG = box("cat", 0, 0, 400, 400), box("dog", 500, 500, 900, 900)


def evaluation(*right: bool, there: GroundTruthObject = CAT) -> list[ScoredAnswer]:
    """An answer for each sample, which has one object: it is found, or another one is."""
    return answers(*(([there], [there if found else DOG]) for found in right))


def by_name(first: list[ScoredAnswer], second: list[ScoredAnswer]) -> dict[str, Compared]:
    return {each.name: each for each in compare(first, second, seed=0)}


def test_scores_are_those_of_the_evaluations() -> None:
    first = answers(([CAT, DOG], [CAT, CAT, CAT]), ([CAT], [box("cat", 0, 0, 999, 999), DOG]))
    second = answers(([CAT, DOG], [CAT, DOG]), ([CAT], []))
    found = by_name(first, second)
    for side, told in (("first", Scores.of(first)), ("second", Scores.of(second))):
        shown = {
            "F1": told.f1,
            "F1 at IoU 0.95": told.f1_95,
            "F1@mIoU": told.f1_miou,
            "precision": told.precision,
            "recall": told.recall,
            "objects an answer": told.predicted / 2,
            "duplicates an answer": told.duplicates / 2,
            "oversized an answer": told.oversized / 2,
            "truncated answers": 0.0,
            "tokens an answer": 0.0,
        }
        assert {name: getattr(each, side) for name, each in found.items()} == pytest.approx(shown)
    assert [each.name for each in found.values()] == list(SCORES)
    assert all(each.difference == each.second - each.first for each in found.values())


def test_the_interval_is_that_of_the_differences_of_pairs() -> None:
    """Recall is a mean over 100 samples of one object: its deviation is known."""
    first = [i % 2 == 0 for i in range(100)]
    second = [right or i < 20 for i, right in enumerate(first)]  # right wherever the first is
    found = by_name(evaluation(*first), evaluation(*second))["recall"]
    assert found.difference == pytest.approx(0.1)
    deviation = np.std(np.subtract(second, first, dtype=float)) / 10
    assert found.low == pytest.approx(0.1 - 1.96 * deviation, abs=0.012)
    assert found.high == pytest.approx(0.1 + 1.96 * deviation, abs=0.012)


def test_equal_answers_differ_by_nothing() -> None:
    same = evaluation(True, False, True)
    for each in compare(same, same, seed=3):
        assert (each.difference, each.low, each.high) == (0, 0, 0)


def written(folder: Path, found: list[ScoredAnswer]) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_evaluation(folder, Scored.of(found, DATA, polygons=False), {})
    return folder


def test_the_command_compares_the_newest_evaluation_of_a_run_with_a_folder(tmp_path: Path) -> None:
    run, right = tmp_path / "run", [True] * 30
    other = written(tmp_path / "other", evaluation(*right))
    written(run / "evaluations" / "step_000010", evaluation(True))
    newest = written(run / "evaluations" / "step_000020", evaluation(*[False] * 30))
    shown = CliRunner().invoke(app, ["compare", str(run), str(other)])
    assert shown.exit_code == 0, shown.output
    assert f"first: {newest / ANSWERS}" in shown.output.replace("\n", "")
    f1 = next(line.split() for line in shown.output.splitlines() if line.startswith("F1 "))
    assert f1 == ["F1", "0.000", "1.000", "+1.000", "+1.000", "..", "+1.000", "*"]
    told = CliRunner().invoke(app, ["compare", str(run), str(other / ANSWERS), "--json"])
    numbers = json.loads(told.output)
    assert (numbers["samples"], numbers["scores"][0]["difference"]) == (30, 1.0)


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    two = written(tmp_path / "two", evaluation(True, True))
    three = written(tmp_path / "three", evaluation(True, True, True))
    dogs = written(tmp_path / "dogs", evaluation(True, True, there=DOG))

    def refused(second: Path) -> str:
        with pytest.raises(ContractError) as caught:
            CliRunner().invoke(app, ["compare", str(two), str(second)], catch_exceptions=False)
        return str(caught.value)

    assert "samples that only one of both has: 1, such as val.jsonl:3" in refused(three)
    assert "val.jsonl:1 has other objects" in refused(dogs)
    (tmp_path / "none").mkdir()
    assert "has no gt_vs_pred.jsonl" in refused(tmp_path / "none")
    with pytest.raises(ContractError, match="nor has an evaluation below it"):
        find_answers(tmp_path / "missing")
