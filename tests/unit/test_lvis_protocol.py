"""LVIS's federated protocol, counted by hand: which predictions an image's annotations judge."""

import html
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from learner.analysis.evaluation.breakdown import Breakdown
from learner.analysis.evaluation.comparison import compare
from learner.analysis.evaluation.detections import CocoFiles, Detected, detect
from learner.analysis.evaluation.folder import Scored, read_answers, write_evaluation
from learner.analysis.evaluation.scores import ScoredAnswer, Scores
from learner.analysis.report.gallery import shown_objects
from learner.data.jsonl import read_samples
from learner.types import GroundTruthObject
from shared_contracts.errors import ContractErrors
from tests.unit.data_files import box as box_of_a_line
from tests.unit.data_files import line, paint, write_lines
from tests.unit.eval_answers import DATA, RESOLUTION, answered, box, sample

pytestmark = pytest.mark.req("EVAL-02", "IO-01")

CAT, DOG, COW = (box(name, 100, 100, 500, 500) for name in ("cat", "dog", "cow"))
OTHER_CAT, OTHER_DOG = box("cat", 600, 600, 900, 900), box("dog", 600, 600, 900, 900)

Image = tuple[Sequence[GroundTruthObject], Sequence[GroundTruthObject], dict[str, Any]]


def lists(negative: list[str] | None = None, partly: list[str] | None = None) -> dict[str, Any]:
    given = {"neg_categories": negative, "not_exhaustive_categories": partly}
    return {key: names for key, names in given.items() if names is not None}


def answers(*images: Image) -> list[ScoredAnswer]:
    """images: what is there, what is said, `metadata`."""
    return [
        answered(replace(sample(number, there), metadata=metadata), said)
        for number, (there, said, metadata) in enumerate(images, start=1)
    ]


def detected(found: list[ScoredAnswer]) -> Detected:
    return detect(CocoFiles.of(found, DATA.parent, polygons=False))["bbox"]


def ap_of(found: list[ScoredAnswer]) -> dict[str, float | None]:
    return {category.name: category.ap for category in detected(found).categories}


@pytest.mark.parametrize(
    ("metadata", "ap", "predicted"),
    [
        ({}, 1 / 2, 3),
        (lists([]), 1, 2),
        (lists(["dog"]), 1 / 2, 3),
        (lists(["cow"]), 1, 2),
        (lists(None, []), 1 / 2, 3),
        (lists(None, ["dog"]), 1, 2),
        (lists(["dog"], ["dog"]), 1, 2),
    ],
    ids=[
        "no lists: every category was looked for",
        "the absence of no category was verified",
        "the absence of dogs was verified",
        "that of another category",
        "no negative list: every category was looked for",
        "not every dog was annotated",
        "both",
    ],
)
def test_a_false_detection_counts_where_its_category_was_looked_for(
    metadata: dict[str, Any], ap: float, predicted: int
) -> None:
    """The false dog of the first image is before the right one: precision 1/2 at recall 1."""
    found = answers(([CAT], [CAT, OTHER_DOG], metadata), ([DOG], [DOG], lists([])))
    aps = ap_of(found)
    assert [aps["cat"], aps["dog"]] == pytest.approx([1, ap])
    scores = Scores.of(found)
    assert (scores.hits, scores.predicted, scores.ground_truths) == (2, predicted, 2)
    assert scores.precision == pytest.approx(2 / predicted)
    assert scores.f1 == pytest.approx(4 / (predicted + 2))
    assert scores.box_precision == pytest.approx(2 / predicted)


@pytest.mark.parametrize(("partly", "ap"), [(["cat"], 1), ([], 1 / 2)])
def test_a_category_that_is_shown_may_have_more_objects_than_annotated(
    partly: list[str], ap: float
) -> None:
    found = answers(([CAT], [OTHER_CAT, CAT], lists([], partly)))
    assert ap_of(found) == {"cat": pytest.approx(ap)}
    assert found[0].match.unjudged == ([0] if partly else [])
    assert found[0].match.false_positives == ([] if partly else [0])
    assert (found[0].precision, found[0].f1) == (ap, 1 if partly else 2 / 3)


def test_a_missed_object_is_missed_whatever_the_lists_say() -> None:
    found = answers(([CAT, DOG], [CAT], lists([], ["cat", "dog"])))
    assert ap_of(found) == {"cat": pytest.approx(1), "dog": 0}
    assert Scores.of(found).recall == 1 / 2


def test_an_unjudged_prediction_is_paired_with_nothing_at_its_place() -> None:
    """A cow on the cat: where cows were not looked for, it may be one."""
    found = answers(([CAT], [COW], lists([])), ([COW], [COW], lists([])))
    first = found[0]
    assert (first.match.pairs, first.match.false_negatives, first.located) == ([], [0], 0)
    assert detected(found).alone.ap == pytest.approx(51 / 101)
    looked_for = answers(([CAT], [COW], lists(["cow"])))[0]
    assert (looked_for.match.pairs, looked_for.located) == ([(0, 0)], 1)


def test_the_first_300_detections_of_an_image_count_whatever_their_category() -> None:
    def ap(others: int) -> float | None:
        said = [*[box("cow", 0, 0, 9 + n, 9) for n in range(others)], CAT]
        return ap_of(answers(([CAT], said, lists([]))))["cat"]

    assert ap(299) == pytest.approx(1)
    assert ap(300) == 0


def test_more_than_100_objects_of_a_category_count() -> None:
    crowd = [box("cat", 9 * n, 0, 9 * n + 9, 999) for n in range(111)]
    assert ap_of(answers((crowd, crowd, lists([])))) == {"cat": pytest.approx(1)}


def test_every_part_of_an_evaluation_leaves_the_unjudged_out() -> None:
    whole = box("sky", 0, 0, 999, 999)
    found = answers(([CAT], [CAT, whole, DOG], lists(["dog"])))
    (answer,) = found
    assert (answer.counted, answer.match.unjudged, answer.oversized) == (2, [1], 0)
    parts = Breakdown.of(found, detected(found).categories)
    assert [each.predicted for each in parts.thresholds] == [2] * 10
    assert sum(each.predicted for each in parts.sizes) == 2
    assert {pair.predicted for pair in parts.confusion} == {"cat", "dog"}
    compared = {each.name: each.first for each in compare(found, found, seed=0)}
    assert compared["precision"] == 1 / 2
    roles = [each.role for each in shown_objects(answer, RESOLUTION)]
    assert roles == ["match", "unjudged", "stray", "truth"]


def test_a_folder_keeps_the_lists_and_names_the_protocol(tmp_path: Path) -> None:
    paint(tmp_path / "a.png")
    metadata = {"metadata": {"image_id": 7, **lists(["dog"], ["cafe\u0301"])}}
    data = write_lines(
        tmp_path / "val.jsonl", line("a.png", box_of_a_line("cat", 1, 1, 99, 99)) | metadata
    )
    (asked,) = read_samples(data, allow_poly=False)
    scored = Scored.of([answered(asked, [CAT, COW])], data, polygons=False)
    write_evaluation(tmp_path / "out", scored, {})
    assert read_answers(tmp_path / "out") == scored.answers
    assert scored.answers[0].sample.category_lists == lists(["dog"], ["café"])
    assert json.loads((tmp_path / "out" / "scores.json").read_text())["protocol"] == "lvis"
    page = html.unescape((tmp_path / "out" / "report.html").read_text("utf-8"))
    assert "LVIS's average precision" in page
    truth = json.loads((tmp_path / "out" / "coco_gt.json").read_text())
    names = {category["id"]: category["name"] for category in truth["categories"]}
    assert names == {1: "café", 2: "cat", 3: "dog", 4: "cow"}
    (image,) = truth["images"]
    assert (image["neg_category_ids"], image["not_exhaustive_category_ids"]) == ([3], [1])


@pytest.mark.parametrize("names", ["cat", ["cat", 3], [" "], {"cat": 1}, None])
@pytest.mark.parametrize("key", ["neg_categories", "not_exhaustive_categories"])
def test_lists_that_are_none_of_descriptions_are_refused_with_their_line(
    key: str, names: Any, tmp_path: Path
) -> None:
    paint(tmp_path / "a.png")
    good = line("a.png")
    data = write_lines(tmp_path / "d.jsonl", good, good | {"metadata": {key: names}})
    with pytest.raises(ContractErrors) as caught:
        read_samples(data, allow_poly=False)
    (error,) = caught.value.errors
    assert error.where == f"{data}:2"
    assert error.found == f"metadata.{key} is {json.dumps(names)}"
