"""Which answers a page shows, in which order, and what it says of each."""

import base64
import io
import random
import unicodedata
from pathlib import Path

import pytest
from PIL import Image

from learner.analysis.report.answers import Chooser, FaultName, choose, faults_of, read_answers
from learner.analysis.report.gallery import LONGEST, cards_of, embed, embed_all, shown_objects
from learner.runs.rollout_log import LoggedAnswer, StepAnswer, f1_of
from tests.unit.eval_answers import answered, box
from tests.unit.eval_answers import sample as eval_sample
from tests.unit.report_folder import MadeRun, answer, draw_image

FAR = (700, 700, 900, 900)
CAT = ("cat", (100, 100, 400, 400))


def missing(count: int, sample: str = "train.jsonl:1", step: int = 1) -> StepAnswer:
    """Nothing was predicted, of so many objects."""
    return answer(sample, step, truths=[CAT] * count, predicted=[], pairs=[])


def good(count: int, step: int = 1) -> list[StepAnswer]:
    return [answer(f"train.jsonl:{place}", step) for place in range(count)]


def test_a_match_of_another_name_is_no_hit() -> None:
    assert f1_of(answer()) == 1.0
    named = answer(predicted=[("dog", (110, 100, 400, 400))])
    assert f1_of(named) == 0.0
    assert faults_of(named) == ["wrong_desc"]
    half = answer(predicted=[CAT, ("owl", FAR)], pairs=[(0, 0)])
    assert f1_of(half) == pytest.approx(2 / 3)
    assert f1_of(answer(truths=[], predicted=[], pairs=[])) == 1.0


@pytest.mark.parametrize(
    ("made", "fault"),
    [
        (answer(truncated=True), "truncated"),
        (answer(invalid=True), "no_object"),
        (answer(repeat_terminated=True), "repeated"),
        (answer(dropped=[("object_2", "bbox_invalid")]), "dropped"),
        (answer(truths=[CAT, ("owl", FAR)]), "missed"),
        (answer(predicted=[CAT, ("owl", FAR)]), "false_positive"),
        (answer(supervised=False), "not_supervised"),
    ],
)
def test_each_fault_is_known(made: StepAnswer, fault: FaultName) -> None:
    assert faults_of(answer()) == []
    assert faults_of(made) == [fault]


def test_an_evaluation_trains_on_nothing_and_that_is_no_fault() -> None:
    step = answer(supervised=False)
    alone = LoggedAnswer(**step.model_dump(exclude={"step", "rank", "chunk", "segment"}))
    assert faults_of(alone) == []


@pytest.mark.req("REPORT-01")
def test_the_worst_is_first_by_f1_then_by_what_was_missed() -> None:
    best, one, three = answer("a:1"), missing(1, "b:1"), missing(3, "c:1")
    half = answer("d:1", predicted=[CAT, ("owl", FAR)])
    assert choose([best, half, one, three]) == [three, one, half, best]


def test_of_many_answers_the_worst_and_a_share_of_the_rest_are_chosen() -> None:
    bad = [missing(1, f"bad:{place}") for place in range(50)]
    many = [*good(500), *bad]
    random.Random(3).shuffle(many)
    chosen = choose(many, most=90)
    assert len(chosen) == 90
    assert {each.sample_id for each in chosen} >= {each.sample_id for each in bad}
    assert chosen == choose(many, most=90)
    assert len({each.sample_id for each in chosen}) == 90


@pytest.mark.req("REPORT-01")
def test_each_third_of_a_run_has_its_worst_shown_and_the_ends_and_the_middle_a_share() -> None:
    steps = list(range(0, 300, 2))
    chooser = Chooser[StepAnswer](steps, most=90)
    for place, step in enumerate(steps):
        worst = missing(9 if place < 50 else 1, f"worst:{step}", step)
        chooser.offer(step, [worst, *good(40, step)])
    chosen = chooser.chosen()
    assert len(chosen) == 90
    assert len({id(each) for each in chosen}) == 90
    of_thirds = [
        sum(
            each.sample_id.startswith("/data/worst") and low <= each.step < low + 100
            for each in chosen
        )
        for low in (0, 100, 200)
    ]
    assert of_thirds == [20, 20, 20]
    drawn = {each.step for each in chosen if "worst" not in each.sample_id}
    assert drawn == {0, 150, 298}
    assert chooser.offered == 150 * 41


def test_a_short_run_is_shown_whole() -> None:
    chooser = Chooser[StepAnswer]([0, 1], most=100)
    chooser.offer(0, good(50, 0))
    chooser.offer(1, good(50, 1))
    assert len(chooser.chosen()) == 100
    assert Chooser[StepAnswer]([]).chosen() == []


def test_all_answers_are_counted_whatever_is_shown(tmp_path: Path) -> None:
    cut = answer("a:1", 1, truncated=True, finish_reason="length")
    answers = [*good(3, 1), cut, missing(2, "b:1", 3), answer("c:1", 3, rank=1)]
    read = read_answers(MadeRun(tmp_path, answers=answers).write())
    assert (read.tally.answers, read.tally.cut_short) == (6, 1)
    assert read.tally.finishes == {"stop": 5, "length": 1}
    assert read.tally.predicted == {0: 1, 1: 5}
    assert [read.chosen[0].sample_id, read.steps, read.read] == ["/data/b:1", 2, 2]
    few = read_answers(MadeRun(tmp_path / "again", answers=good(1, 0) + answers).write(), 2)
    assert (few.steps, few.read, few.tally.answers) == (3, 2, 3)


def test_shapes_know_what_they_are_and_their_partner() -> None:
    made = answer(
        truths=[CAT, ("dog", FAR)],
        predicted=[("owl", (0, 0, 50, 50)), ("cat", (100, 100, 400, 250))],
        pairs=[(1, 0)],
    )
    stray, match, truth, appended = shown_objects(made, 256)
    assert [each.role for each in (stray, match, truth, appended)] == [
        "stray",
        "match",
        "truth",
        "appended",
    ]
    assert (match.pair, truth.pair, stray.pair) == (2, 1, None)
    assert match.iou == truth.iou == pytest.approx(0.5, abs=0.01)
    assert (match.key, truth.key, match.coords) == (
        "object_2",
        "ground truth 1",
        [100, 100, 400, 250],
    )
    left_out = shown_objects(answer(predicted=[], pairs=[], supervised=False), 256)
    assert [each.role for each in left_out] == ["missed"]


@pytest.mark.req("RES-20")
def test_an_evaluations_card_shows_the_overlap_that_was_scored() -> None:
    """On a canvas of 256 pixels the two boxes of 6 bins are one."""
    asked = eval_sample(1, [box("cat", 0, 0, 6, 6)])
    made = answered(asked, [box("cat", 1, 0, 7, 6)])
    match, truth = shown_objects(made, 256)
    assert match.iou == truth.iou == pytest.approx(5 / 7, abs=1e-4)


@pytest.mark.req("RES-20")
def test_an_old_log_with_another_form_of_a_description_has_its_hit() -> None:
    forms = [unicodedata.normalize(form, "café") for form in ("NFD", "NFC")]
    made = answer(truths=[(forms[0], FAR)], predicted=[(forms[1], FAR)], pairs=[(0, 0)])
    assert (f1_of(made), "wrong_desc" in faults_of(made)) == (1.0, False)
    assert len({item.desc for item in shown_objects(made, 256)}) == 1


def test_a_card_can_be_pointed_at(tmp_path: Path) -> None:
    cards, _ = cards_of([answer("a b/träin.jsonl:7", 5), answer("träin.jsonl:7", 5)], 256)
    assert [card["slug"] for card in cards] == [
        "sample-5-träin.jsonl-7",
        "sample-5-träin.jsonl-7--2",
    ]
    assert (cards[0]["step"], cards[0]["name"]) == (5, "träin.jsonl:7")
    assert cards[0]["replay"] == "--step 5 --sample 'träin.jsonl:7'"


def test_an_image_of_several_answers_is_embedded_once(tmp_path: Path) -> None:
    file = draw_image(tmp_path / "a.png", (64, 48), (0, 0, 500, 500))
    lost = tmp_path / "lost.png"
    answers = [answer("a:1", image=file), answer("a:2", image=lost), answer("a:3", image=file)]
    cards, pictures = cards_of(answers, 256)
    assert [card["picture"] for card in cards] == [0, 1, 0]
    assert (pictures[0].width, pictures[0].height, pictures[0].problem) == (64, 48, "")
    assert pictures[1].src == ""
    assert "lost.png cannot be read (No such file or directory)" in pictures[1].problem


def test_a_picture_is_the_image_made_smaller_and_never_larger(tmp_path: Path) -> None:
    flat = draw_image(tmp_path / "flat.png", (2000, 1000), (0, 0, 500, 999))
    noise = tmp_path / "noise.png"
    Image.frombytes("RGB", (900, 900), random.Random(0).randbytes(900 * 900 * 3)).save(noise)
    large, busy = embed_all([flat, noise])
    assert (large.width, large.height) == (LONGEST, LONGEST // 2)
    assert large.src.startswith("data:image/png;base64,")
    assert busy.src.startswith("data:image/jpeg;base64,")
    decoded = Image.open(io.BytesIO(base64.b64decode(large.src.partition(",")[2])))
    assert decoded.size == (LONGEST, LONGEST // 2)
    assert decoded.convert("RGB").getpixel((10, 10)) == (255, 0, 0)
    (tmp_path / "text.png").write_text("no image")
    assert "is no image of a known format" in embed(tmp_path / "text.png").problem
