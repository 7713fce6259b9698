"""Average precision, hits by description and size, LVIS's protocol: counted by hand."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from learner.analysis.evaluation.comparison import compare
from learner.analysis.evaluation.detections import (
    AveragePrecision,
    CocoFiles,
    Detected,
    detect,
    precision_payload,
)
from learner.analysis.evaluation.folder import breakdown
from learner.analysis.evaluation.scores import ScoredAnswer, Scores, match_named
from learner.analysis.report.gallery import shown_objects
from learner.types import AssessedRollout, GroundTruthObject, ParsedObject, ParsedRollout
from tests.unit.eval_answers import DATA, RESOLUTION, Case, answered, answers, box, poly, sample
from tests.unit.small_run import rollout

pytestmark = pytest.mark.req("EVAL-01")

CAT, DOG = box("cat", 100, 100, 500, 500), box("dog", 600, 600, 900, 900)
ELSEWHERE = box("cat", 700, 0, 900, 50)


def files_of(found: list[ScoredAnswer], *, polygons: bool = False) -> CocoFiles:
    return CocoFiles.of(found, DATA.parent, polygons=polygons)


def detected(found: list[ScoredAnswer]) -> Detected:
    return detect(files_of(found))["bbox"]


def by_name(detected: Detected) -> dict[str, float | None]:
    return {category.name: category.ap for category in detected.categories}


@pytest.mark.req("EVAL-02", "LOGP-01")
@pytest.mark.parametrize(("right", "wrong", "ap"), [(0.9, 0.3, 1.0), (0.3, 0.9, 0.5)])
def test_detections_rank_by_the_probabilities_of_their_coordinates(
    right: float, wrong: float, ap: float
) -> None:
    """One of two boxes is right. The tokens of the descriptions do not count."""
    boxes = (CAT, ELSEWHERE)
    predicted = [
        ParsedObject(f"object_{n}", n, "bbox_2d", list(o.shape.coords), "cat", places, (0, 0), [])
        for n, (o, places) in enumerate(zip(boxes, ([1, 2, 3, 4], [6, 7, 8, 9]), strict=True), 1)
    ]
    parsed = ParsedRollout(predicted, [], [], 2, False, False, [])
    logprobs = [-50.0, *[math.log(right)] * 4, 0.0, *[math.log(wrong)] * 4]
    output = replace(rollout([], list(range(10))), logprobs=logprobs)
    given = sample(1, [CAT])
    match = match_named(predicted, given.objects, RESOLUTION)
    answer = ScoredAnswer.scored(AssessedRollout(given, output, parsed, match), RESOLUTION)
    files = files_of([answer])
    assert files.ranked
    assert [each["score"] for each in files.detections] == pytest.approx([right, wrong])
    assert detect(files)["bbox"].objects.ap == pytest.approx(ap)
    again = ScoredAnswer.model_validate_json(answer.model_dump_json())
    assert [item.confidence for item in again.parse.objects] == pytest.approx([right, wrong])


def test_detections_are_in_pixels() -> None:
    files = files_of(answers(([CAT], [box("cat", 0, 111, 999, 999)]), side=90))
    (detection,) = files.detections
    assert detection == {
        "id": 1,
        "image_id": 1,
        "category_id": 1,
        "bbox": [0.0, pytest.approx(10), 90.0, pytest.approx(80)],
        "score": 1.0,
    }
    (partly,) = answers(([CAT], [CAT, ELSEWHERE]))
    partly.parse.objects[0].confidence = 0.5
    assert not files_of([partly]).ranked
    assert [each["score"] for each in files_of([partly]).detections] == [1.0, 1.0]
    masks = files_of(answers(([CAT], [box("cat", 0, 0, 999, 999)]), side=90), polygons=True)
    assert masks.detections[0]["segmentation"] == [[0, 0, 90, 0, 90, 90, 0, 90]]
    assert "segmentation" in masks.ground_truth["annotations"][0]


def offline(folder: Path, kind: str) -> AveragePrecision:
    truth = COCO(str(folder / "gt.json"))
    scored = COCOeval(truth, truth.loadRes(str(folder / "preds.json")), kind)
    scored.evaluate()
    scored.accumulate()
    scored.summarize()
    values = [None if value == -1 else value for value in scored.stats]
    return AveragePrecision(*(values[place] for place in (0, 1, 2, 3, 4, 5, 8)))


def test_pycocotools_gives_the_same_scores_for_the_files(tmp_path: Path) -> None:
    roof, near = poly("roof", 0, 0, 500, 0, 500, 500), poly("roof", 0, 0, 500, 0, 0, 490)
    cases: list[Case] = [
        ([CAT, roof], [near, CAT, ELSEWHERE]),
        ([DOG], [GroundTruthObject("猫", DOG.shape)]),
        ([CAT, DOG], [box("dog", 610, 590, 905, 880)]),
    ]
    files = files_of(answers(*cases, side=300), polygons=True)
    found = detect(files)
    (tmp_path / "gt.json").write_text(json.dumps(files.ground_truth))
    (tmp_path / "preds.json").write_text(json.dumps(files.detections))
    for kind, detected in found.items():
        assert offline(tmp_path, kind) == detected.objects
    assert found["bbox"].objects != found["segm"].objects
    assert precision_payload(found).metrics()["eval/segm_ap75"] == found["segm"].objects.ap75
    assert 0 < (found["bbox"].objects.ap or 0) < 1


def parts_of(found: list[ScoredAnswer], *, polygons: bool = False) -> dict[str, list[Any]]:
    boxes = detect(files_of(found, polygons=polygons))["bbox"]
    return breakdown(found, boxes.categories)


def counts(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["hits"], row["predicted"], row["ground_truths"]


def test_descriptions_have_scores_and_ap() -> None:
    cow = box("cow", *DOG.shape.coords)
    several = answers(([CAT, DOG], [CAT, cow]), ([CAT], []))
    cat, *others = parts_of(several)["descriptions"]
    assert (cat["name"], *counts(cat)) == ("cat", 1, 1, 2)
    assert cat["ap50"] == pytest.approx(0.5, abs=0.01)
    scores = ("name", "precision", "recall", "f1", "ap")
    assert [[row[key] for key in scores] for row in others] == [
        ["cow", 0.0, None, 0.0, None],
        ["dog", None, 0.0, 0.0, 0.0],
    ]
    assert (cat["precision"], cat["recall"], cat["f1"]) == (1.0, 0.5, 2 / 3)
    alone = detected(several).alone  # whatever their descriptions
    assert alone.ap == pytest.approx(2 / 3, abs=0.01)


@pytest.mark.req("RES-20")
def test_confusion_pairs_hits_first_and_the_rest_by_place() -> None:
    near = box("cat", 101, 100, 500, 500)
    on_the_cat = box("dog", *CAT.shape.coords)
    bird = box("bird", 0, 0, 50, 50)
    found = parts_of(
        answers(([CAT], [on_the_cat, near]), ([CAT, DOG], [on_the_cat]), ([DOG], [DOG, bird]))
    )
    assert [tuple(row.values()) for row in found["confusion"]] == [
        (None, "bird", 1),
        (None, "dog", 1),
        ("cat", "cat", 1),
        ("cat", "dog", 1),
        ("dog", None, 1),
        ("dog", "dog", 1),
    ]


def test_sizes_are_areas_in_pixels() -> None:
    """An image of 999 pixels a side, so that a bin is a pixel; 32^2 is the last small area."""
    small, above = box("cat", 0, 0, 32, 32), box("cat", 100, 0, 132, 33)
    large = box("cat", 200, 0, 297, 97)
    stray = box("cat", 0, 500, 20, 520)
    half = box("cat", 200, 0, 297, 60)  # a hit of the large one, itself of medium size
    found = parts_of(answers(([small, above, large], [above, half, stray]), side=999))
    rows = {row["size"]: counts(row) for row in found["sizes"]}
    assert rows == {"small": (0, 1, 1), "medium": (1, 1, 1), "large": (1, 1, 1)}
    triangle = poly("cat", 0, 0, 64, 0, 0, 32)  # half of a rectangle of 2048 pixels: 32^2
    found = parts_of(answers(([triangle], []), side=999), polygons=True)
    assert [row["ground_truths"] for row in found["sizes"]] == [1, 0, 0]


OBJECTS = st.lists(
    st.builds(
        lambda name, x, y, w, h: box(name, x, y, x + w, y + h),
        st.sampled_from(["cat", "dog", "bird"]),
        *[st.integers(0, 12)] * 2,
        *[st.integers(1, 12)] * 2,
    ),
    max_size=6,
)


@pytest.mark.req("RES-20")
@given(st.lists(st.tuples(OBJECTS, OBJECTS), max_size=3))
def test_every_part_adds_up_to_the_scores(
    cases: list[tuple[list[GroundTruthObject], list[GroundTruthObject]]],
) -> None:
    found = answers(*cases, side=999)
    whole, parts = Scores.of(found), parts_of(found)
    sums = (whole.hits, whole.predicted, whole.ground_truths)
    for rows in (parts["descriptions"], parts["sizes"], parts["thresholds"][:1]):
        totals = [sum(column) for column in zip(*map(counts, rows), strict=True)]
        assert totals == ([*sums] if rows else [])
        assert rows or not any(sums)
    hits = [row["hits"] for row in parts["thresholds"]]
    assert hits == sorted(hits, reverse=True)
    assert whole.located >= whole.hits
    pairs = [tuple(row.values()) for row in parts["confusion"]]
    assert sum(n for truth, _, n in pairs if truth is not None) == whole.ground_truths
    assert sum(n for _, predicted, n in pairs if predicted is not None) == whole.predicted
    assert sum(n for truth, predicted, n in pairs if truth == predicted) == whole.hits
    json.dumps(parts, allow_nan=False)


DOG_ON_CAT, COW_ON_CAT = (box(name, *CAT.shape.coords) for name in ("dog", "cow"))
OTHER_CAT, OTHER_DOG = box("cat", 600, 600, 900, 900), box("dog", 600, 600, 900, 900)

Listed = tuple[Sequence[GroundTruthObject], Sequence[GroundTruthObject], dict[str, Any]]


def lists(negative: list[str] | None = None, partly: list[str] | None = None) -> dict[str, Any]:
    given = {"neg_categories": negative, "not_exhaustive_categories": partly}
    return {key: names for key, names in given.items() if names is not None}


def with_lists(*images: Listed) -> list[ScoredAnswer]:
    """images: ground truth, predictions, `metadata`."""
    return [
        answered(replace(sample(number, there), metadata=metadata), predicted)
        for number, (there, predicted, metadata) in enumerate(images, start=1)
    ]


@pytest.mark.req("EVAL-02", "IO-01")
@pytest.mark.parametrize(
    ("metadata", "ap", "predicted"),
    [
        ({}, 1 / 2, 3),
        (lists([]), 1, 2),
        (lists(["dog"]), 1 / 2, 3),
        (lists(None, ["dog"]), 1, 2),
        (lists(["dog"], ["dog"]), 1, 2),
    ],
)
def test_false_detection_counts_where_its_category_was_verified(
    metadata: dict[str, Any], ap: float, predicted: int
) -> None:
    """The false dog of the first image is before the right one: precision 1/2 at recall 1."""
    found = with_lists(([CAT], [CAT, OTHER_DOG], metadata), ([DOG_ON_CAT], [DOG_ON_CAT], lists([])))
    aps = by_name(detected(found))
    assert [aps["cat"], aps["dog"]] == pytest.approx([1, ap])
    scores = Scores.of(found)
    assert (scores.hits, scores.predicted, scores.ground_truths) == (2, predicted, 2)
    assert scores.ratio("precision") == pytest.approx(2 / predicted)
    assert scores.ratio("f1") == pytest.approx(4 / (predicted + 2))
    assert scores.ratio("box_precision") == pytest.approx(2 / predicted)


@pytest.mark.req("EVAL-02", "IO-01")
def test_first_300_detections_of_an_image_count() -> None:
    def ap(others: int) -> float | None:
        predicted = [*[box("cow", 0, 0, 9 + n, 9) for n in range(others)], CAT]
        return by_name(detected(with_lists(([CAT], predicted, lists([])))))["cat"]

    assert ap(299) == pytest.approx(1)
    assert ap(300) == 0
    crowd = [box("cat", 9 * n, 0, 9 * n + 9, 999) for n in range(111)]
    found = detected(with_lists((crowd, crowd, lists([]))))
    assert by_name(found) == {"cat": pytest.approx(1)}


@pytest.mark.req("EVAL-02", "IO-01")
def test_every_part_of_an_evaluation_leaves_out_unjudged_predictions() -> None:
    whole = box("sky", 0, 0, 999, 999)
    found = with_lists(([CAT], [CAT, whole, DOG_ON_CAT], lists(["dog"])))
    (answer,) = found
    assert (answer.counted, answer.match.unjudged, answer.oversized) == (2, [1], 0)
    parts = parts_of(found)
    assert [each["predicted"] for each in parts["thresholds"]] == [2] * 10
    assert sum(each["predicted"] for each in parts["sizes"]) == 2
    assert {pair["predicted"] for pair in parts["confusion"]} == {"cat", "dog"}
    compared = {each.name: each.first for each in compare(found, found, seed=0)}
    assert compared["precision"] == 1 / 2
    roles = [each.role for each in shown_objects(answer, RESOLUTION)]
    assert roles == ["match", "unjudged", "stray", "truth"]
