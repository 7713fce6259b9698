"""Average precision of answers, counted by hand, and what COCO files of them hold."""

import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from learner.analysis.evaluation.detections import (
    AveragePrecision,
    CocoFiles,
    Detected,
    detect,
    precision_payload,
)
from learner.analysis.evaluation.scores import ScoredAnswer, match_named
from learner.types import AssessedRollout, GroundTruthObject, ParsedObject, ParsedRollout
from tests.unit.eval_answers import DATA, RESOLUTION, Case, answers, box, poly, sample
from tests.unit.small_run import rollout

CAT, DOG = box("cat", 100, 100, 500, 500), box("dog", 600, 600, 900, 900)
ELSEWHERE = box("cat", 700, 0, 900, 50)
# Of 101 points of recall, those up to one half.
HALF = 51 / 101


def files_of(found: list[ScoredAnswer], *, polygons: bool = False) -> CocoFiles:
    return CocoFiles.of(found, DATA.parent, polygons=polygons)


def boxes(*cases: Case, side: int = 64) -> Detected:
    return detect(files_of(answers(*cases, side=side)))["bbox"]


def by_name(detected: Detected) -> dict[str, float | None]:
    return {category.name: category.ap for category in detected.categories}


@pytest.mark.req("EVAL-01")
def test_right_answers_have_average_precision_1() -> None:
    found = boxes(([CAT, DOG], [DOG, CAT]), ([CAT], [CAT]))
    for scores in (found.objects, found.alone):
        for value in (scores.ap, scores.ap50, scores.ap75, scores.ar):
            assert value == pytest.approx(1)


@pytest.mark.req("EVAL-01")
def test_recall_of_a_half_ends_the_curve_there() -> None:
    found = boxes(([CAT], [CAT]), ([CAT], []))
    assert found.objects.ap == pytest.approx(HALF)
    assert found.objects.ar == pytest.approx(1 / 2)


@pytest.mark.req("EVAL-01")
def test_equal_scores_are_taken_in_the_order_of_the_data_file() -> None:
    """A false detection in front of a right one halves the precision there; behind, it does not."""
    right, wrong = ([CAT], [CAT]), ([CAT], [ELSEWHERE])
    assert boxes(right, wrong).objects.ap == pytest.approx(HALF)
    assert boxes(wrong, right).objects.ap == pytest.approx(HALF / 2)


@pytest.mark.req("EVAL-01")
def test_lines_are_ordered_as_numbers() -> None:
    files = files_of(list(reversed(answers(*[([CAT], [CAT])] * 11))))
    assert [image["file_name"] for image in files.ground_truth["images"]] == [
        f"images/{line}.png" for line in range(1, 12)
    ]


@pytest.mark.req("EVAL-01")
def test_a_second_detection_of_an_object_is_a_false_one() -> None:
    """Two cats: the doubled one comes before the other, so precision there is 2/3."""
    found = boxes(([CAT], [CAT, CAT]), ([CAT], [CAT]))
    assert found.objects.ap == pytest.approx((51 * 1 + 50 * 2 / 3) / 101)


@pytest.mark.req("EVAL-01")
def test_a_false_description_is_a_category_of_its_own_and_the_object_is_missed() -> None:
    cow = GroundTruthObject("cow", DOG.shape)
    found = boxes(([CAT, DOG], [CAT, cow]))
    assert by_name(found) == {"cat": pytest.approx(1), "dog": 0.0, "cow": None}
    assert found.objects.ap == pytest.approx(1 / 2)
    assert found.alone.ap == pytest.approx(1)
    counts = {c.name: (c.ground_truths, c.predicted) for c in found.categories}
    assert counts == {"cat": (1, 1), "dog": (1, 0), "cow": (0, 1)}


@pytest.mark.req("EVAL-01")
def test_a_false_description_that_others_have_is_a_false_detection_of_theirs() -> None:
    found = boxes(([DOG], [GroundTruthObject("cat", DOG.shape)]), ([CAT], [CAT]))
    assert by_name(found) == {"cat": pytest.approx(1 / 2), "dog": 0.0}


@pytest.mark.req("EVAL-01")
def test_an_overlap_of_620_in_999_counts_at_three_of_ten_thresholds() -> None:
    found = boxes(([box("cat", 0, 0, 999, 999)], [box("cat", 0, 0, 620, 999)])).objects
    assert found.ap == pytest.approx(0.3)
    assert found.ap50 == pytest.approx(1)
    assert found.ap75 == 0


@pytest.mark.req("EVAL-01")
def test_objects_are_small_or_large_by_their_pixels() -> None:
    """Of 200 x 200: 20, 80 and 180 pixels to a side."""
    small, medium, large = (box("cat", 0, 0, side, side) for side in (100, 400, 900))
    found = boxes(([small, medium, large], [medium, large]), side=200).objects
    assert found.ap_small == 0
    assert found.ap_medium == found.ap_large == pytest.approx(1)
    only_small = boxes(([small], [small]), side=200).objects
    assert (only_small.ap_medium, only_small.ap_large) == (None, None)


@pytest.mark.req("EVAL-01")
def test_images_of_many_objects_are_scored_whole() -> None:
    crowd = [box("cat", 80 * place, 0, 80 * place + 60, 60) for place in range(12)]
    found = boxes((crowd, crowd)).objects
    assert found.ap == found.ar == pytest.approx(1)


@pytest.mark.req("EVAL-01")
@pytest.mark.parametrize(
    ("cases", "ap"),
    [([([CAT], [])], 0.0), ([([], [CAT])], None), ([([], [])], None)],
    ids=["nothing said", "nothing there", "neither"],
)
def test_where_nothing_is_there_or_said_there_is_a_number_or_none(
    cases: list[Case], ap: float | None
) -> None:
    found = boxes(*cases)
    assert (found.objects.ap, found.alone.ap) == (ap, ap)
    logged = precision_payload({"bbox": found}).metrics()
    assert logged.get("eval/ap") == ap


@pytest.mark.req("EVAL-01")
def test_masks_tell_apart_what_boxes_do_not() -> None:
    """The box around a third of itself."""
    third = poly("roof", 0, 0, 999, 0, 999, 333, 0, 333, 0, 999)
    around = box("roof", 0, 0, 999, 999)
    found = detect(files_of(answers(([third], [around]), ([CAT], [CAT])), polygons=True))
    assert by_name(found["bbox"]) == {"cat": pytest.approx(1), "roof": pytest.approx(1)}
    assert by_name(found["segm"])["roof"] == pytest.approx(0, abs=0.1)
    right = detect(files_of(answers(([third], [third]), ([CAT], [CAT])), polygons=True))
    assert right["segm"].objects.ap == pytest.approx(1)
    assert precision_payload(right).metrics()["eval/segm_ap75"] == pytest.approx(1)


@pytest.mark.req("EVAL-02", "LOGP-01")
@pytest.mark.parametrize(("right", "wrong", "ap"), [(0.9, 0.3, 1.0), (0.3, 0.9, 0.5)])
def test_detections_rank_by_the_probabilities_of_their_coordinates(
    right: float, wrong: float, ap: float
) -> None:
    """One of both is right; the first tokens are of the descriptions and do not count."""
    boxes = (CAT, ELSEWHERE)
    said = [
        ParsedObject(f"object_{n}", n, "bbox_2d", list(o.shape.coords), "cat", places, (0, 0), [])
        for n, (o, places) in enumerate(zip(boxes, ([1, 2, 3, 4], [6, 7, 8, 9]), strict=True), 1)
    ]
    parsed = ParsedRollout(said, [], [], 2, False, False, [])
    logprobs = [-50.0, *[math.log(right)] * 4, 0.0, *[math.log(wrong)] * 4]
    output = replace(rollout([], list(range(10))), logprobs=logprobs)
    asked = sample(1, [CAT])
    match = match_named(said, asked.objects, RESOLUTION)
    answer = ScoredAnswer.scored(AssessedRollout(asked, output, parsed, match), RESOLUTION)
    files = files_of([answer])
    assert files.ranked
    assert [each["score"] for each in files.detections] == pytest.approx([right, wrong])
    assert detect(files)["bbox"].objects.ap == pytest.approx(ap)
    again = ScoredAnswer.model_validate_json(answer.model_dump_json())
    assert [item.confidence for item in again.parse.objects] == pytest.approx([right, wrong])


@pytest.mark.req("EVAL-01", "EVAL-02")
def test_without_the_confidence_of_one_all_have_the_same_score() -> None:
    (answer,) = answers(([CAT], [CAT, ELSEWHERE]))
    answer.parse.objects[0].confidence = 0.5
    files = files_of([answer])
    assert not files.ranked
    assert [each["score"] for each in files.detections] == [1.0, 1.0]


@pytest.mark.req("EVAL-01")
def test_detections_are_in_pixels_and_all_have_the_same_score() -> None:
    files = files_of(answers(([CAT], [box("cat", 0, 111, 999, 999)]), side=90))
    (detection,) = files.detections
    assert detection == {
        "id": 1,
        "image_id": 1,
        "category_id": 1,
        "bbox": [0.0, pytest.approx(10), 90.0, pytest.approx(80)],
        "score": 1.0,
    }
    masks = files_of(answers(([CAT], [box("cat", 0, 0, 999, 999)]), side=90), polygons=True)
    assert masks.detections[0]["segmentation"] == [[0, 0, 90, 0, 90, 90, 0, 90]]
    assert "segmentation" in masks.ground_truth["annotations"][0]


@pytest.mark.req("EVAL-01")
def test_scoring_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    boxes(([CAT], [CAT]))
    assert capsys.readouterr() == ("", "")


def offline(folder: Path, kind: str) -> AveragePrecision:
    """What pycocotools says of the two files, used as its users do."""
    truth = COCO(str(folder / "gt.json"))
    scored = COCOeval(truth, truth.loadRes(str(folder / "preds.json")), kind)
    scored.evaluate()
    scored.accumulate()
    scored.summarize()
    values = [None if value == -1 else value for value in scored.stats]
    return AveragePrecision(*(values[place] for place in (0, 1, 2, 3, 4, 5, 8)))


@pytest.mark.req("EVAL-01")
def test_pycocotools_says_the_same_of_the_files(tmp_path: Path) -> None:
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
    assert 0 < (found["bbox"].objects.ap or 0) < 1


DESCRIPTIONS = st.sampled_from(["cat", "red dog", "猫"])


@st.composite
def boxes_of_an_image(draw: st.DrawFn) -> list[GroundTruthObject]:
    """Boxes of at least a pixel."""
    corner, side = st.integers(0, 700), st.integers(30, 299)
    found = []
    for _ in range(draw(st.integers(0, 3))):
        x, y = draw(corner), draw(corner)
        found.append(box(draw(DESCRIPTIONS), x, y, x + draw(side), y + draw(side)))
    return found


@pytest.mark.req("EVAL-01")
@settings(max_examples=60)
@given(
    cases=st.lists(st.tuples(boxes_of_an_image(), boxes_of_an_image()), min_size=1, max_size=4),
    shuffler=st.randoms(use_true_random=False),
)
def test_the_order_in_which_answers_come_changes_nothing(
    cases: list[Any], shuffler: random.Random
) -> None:
    found = answers(*cases)
    shuffled = list(found)
    shuffler.shuffle(shuffled)
    assert files_of(shuffled) == files_of(found)
    assert asdict(detect(files_of(shuffled))["bbox"]) == asdict(detect(files_of(found))["bbox"])


@pytest.mark.req("EVAL-01")
@settings(max_examples=60)
@given(st.lists(boxes_of_an_image(), min_size=1, max_size=4).filter(any))
def test_right_answers_are_perfect_whatever_is_there(images: list[list[GroundTruthObject]]) -> None:
    found = boxes(*((objects, list(reversed(objects))) for objects in images))
    assert found.objects.ap == pytest.approx(1)
    assert found.alone.ap == pytest.approx(1)
    assert all(category.ap == pytest.approx(1) for category in found.categories)
