"""Hits by description, by IoU threshold and by size, counted by hand."""

import json
import unicodedata
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.analysis.evaluation.breakdown import Breakdown, Confused
from learner.analysis.evaluation.detections import CocoFiles, detect
from learner.analysis.evaluation.scores import ScoredAnswer, Scores
from learner.types import GroundTruthObject
from tests.unit.eval_answers import DATA, answers, box, poly

CAT, DOG = box("cat", 100, 100, 500, 500), box("dog", 600, 600, 900, 900)


def breakdown(found: list[ScoredAnswer], *, polygons: bool = False) -> Breakdown:
    detected = detect(CocoFiles.of(found, DATA.parent, polygons=polygons))
    return Breakdown.of(found, detected["bbox"].categories)


@pytest.mark.req("EVAL-01")
def test_each_description_has_its_scores_and_its_ap() -> None:
    cow = box("cow", *DOG.shape.coords)
    found = breakdown(answers(([CAT, DOG], [CAT, cow]), ([CAT], [])))
    cat, cow_row, dog = found.descriptions
    assert (cat.name, cat.hits, cat.predicted, cat.ground_truths) == ("cat", 1, 1, 2)
    assert (cat.precision, cat.recall, cat.f1) == (1.0, 0.5, 2 / 3)
    assert cat.ap50 == pytest.approx(0.5, abs=0.01)
    assert (cow_row.precision, cow_row.recall, cow_row.f1, cow_row.ap) == (0.0, None, 0.0, None)
    assert (dog.precision, dog.recall, dog.f1, dog.ap) == (None, 0.0, 0.0, 0.0)
    assert [row.name for row in found.worst(2)] == ["dog", "cat"]


@pytest.mark.req("EVAL-01", "RES-20")
def test_the_confusion_takes_hits_out_first_and_pairs_the_rest_by_place() -> None:
    near = box("cat", 101, 100, 500, 500)
    on_the_cat = box("dog", *CAT.shape.coords)
    bird = box("bird", 0, 0, 50, 50)
    found = breakdown(
        answers(([CAT], [on_the_cat, near]), ([CAT, DOG], [on_the_cat]), ([DOG], [DOG, bird]))
    )
    assert found.confusion == (
        Confused(None, "bird", 1),
        Confused(None, "dog", 1),
        Confused("cat", "cat", 1),
        Confused("cat", "dog", 1),
        Confused("dog", None, 1),
        Confused("dog", "dog", 1),
    )


@pytest.mark.req("EVAL-02")
def test_each_description_has_the_mean_of_its_f1_at_all_thresholds() -> None:
    """IoU 0.9 and 0.7 with the cats, 0.5 and less with the dog; all of them add up to F1@mIoU."""
    there = box("cat", 0, 0, 100, 100)
    found = answers(
        ([there], [box("cat", 0, 0, 90, 100)]),
        ([there, DOG], [box("cat", 0, 0, 70, 100), box("dog", 600, 600, 900, 740)]),
    )
    cat, dog = breakdown(found).descriptions
    assert [cat.f1_miou, dog.f1_miou] == pytest.approx([(5 * 2 + 4 * 1) / 2 / 10, 0.0])
    assert (cat.f1_95, dog.f1_95) == (0.0, 0.0)
    scores = Scores.of(found)
    both = [2 * each.predicted for each in (cat, dog)]
    mean = (cat.f1_miou * both[0] + dog.f1_miou * both[1]) / sum(both)
    assert scores.f1_miou == pytest.approx(mean)


@pytest.mark.req("EVAL-01")
def test_a_higher_threshold_has_its_own_hits() -> None:
    """The truth is 100 bins wide: IoU 0.9 and 0.7."""
    truth = box("cat", 0, 0, 100, 100)
    found = breakdown(
        answers(([truth], [box("cat", 0, 0, 90, 100)]), ([truth], [box("cat", 0, 0, 70, 100)]))
    )
    by_iou = {row.iou: (row.hits, row.f1) for row in found.thresholds}
    assert list(by_iou) == [0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95]
    assert (by_iou[0.7], by_iou[0.75], by_iou[0.95]) == ((2, 1.0), (1, 0.5), (0, 0.0))


@pytest.mark.req("EVAL-01")
def test_sizes_are_areas_in_pixels_of_the_image() -> None:
    """An image of 999 pixels a side, so that a bin is a pixel; 32^2 is the last small area."""
    small, above = box("cat", 0, 0, 32, 32), box("cat", 100, 0, 132, 33)
    large = box("cat", 200, 0, 297, 97)
    stray = box("cat", 0, 500, 20, 520)
    half = box("cat", 200, 0, 297, 60)  # a hit of the large one, itself of medium size
    found = breakdown(answers(([small, above, large], [above, half, stray]), side=999))
    rows = {row.size: (row.hits, row.predicted, row.ground_truths) for row in found.sizes}
    assert rows == {"small": (0, 1, 1), "medium": (1, 1, 1), "large": (1, 1, 1)}
    triangle = poly("cat", 0, 0, 64, 0, 0, 32)  # half of a rectangle of 2048 pixels: 32^2
    found = breakdown(answers(([triangle], []), side=999), polygons=True)
    assert [row.ground_truths for row in found.sizes] == [1, 0, 0]


@pytest.mark.req("RES-20")
def test_two_forms_of_a_description_are_one_row_and_one_category() -> None:
    forms = [unicodedata.normalize(form, "café") for form in ("NFD", "NFC")]
    there, said = (box(form, *CAT.shape.coords) for form in forms)
    (row,) = breakdown(answers(([there], [said]))).descriptions
    assert (row.name, row.f1) == (forms[1], 1.0)
    assert row.ap == pytest.approx(1)


OBJECTS = st.lists(
    st.builds(
        lambda name, x, y, w, h: box(name, x, y, x + w, y + h),
        st.sampled_from(["cat", "dog", "bird"]),
        *[st.integers(0, 12)] * 2,
        *[st.integers(1, 12)] * 2,
    ),
    max_size=6,
)


@pytest.mark.req("EVAL-01", "RES-20")
@given(st.lists(st.tuples(OBJECTS, OBJECTS), max_size=3))
def test_every_part_adds_up_to_the_scores(
    cases: list[tuple[list[GroundTruthObject], list[GroundTruthObject]]],
) -> None:
    found = answers(*cases, side=999)
    whole, parts = Scores.of(found), breakdown(found)
    sums = (whole.hits, whole.predicted, whole.ground_truths)
    for rows in (parts.descriptions, parts.sizes, parts.thresholds[:1]):
        assert sums == tuple(
            sum(getattr(row, name) for row in rows)
            for name in ("hits", "predicted", "ground_truths")
        )
    hits = [row.hits for row in parts.thresholds]
    assert hits == sorted(hits, reverse=True)
    assert whole.located >= whole.hits
    paired = Counter({(row.truth, row.predicted): row.count for row in parts.confusion})
    assert sum(n for (truth, _), n in paired.items() if truth is not None) == whole.ground_truths
    assert sum(n for (_, said), n in paired.items() if said is not None) == whole.predicted
    assert sum(n for (truth, said), n in paired.items() if truth == said) == whole.hits
    json.dumps(parts.numbers(), allow_nan=False)
