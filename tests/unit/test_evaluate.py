"""Scores of a policy's answers, counted by hand."""

import io
import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from tokenizers.normalizers import NFC
from transformers import PreTrainedTokenizerFast

from learner.analysis.evaluation.folder import Scored
from learner.analysis.evaluation.scores import (
    IOU_THRESHOLDS,
    ScoredAnswer,
    Scores,
    assess_by_name,
    evaluate,
    most_pairs,
)
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.models.load import load_model
from learner.rollout.backend import Call, Journal
from learner.rollout.policy import Asking, OpenBackend, Policy, asking_of
from learner.stages.targets import build_ground_truth_target
from learner.training.run_log import CallLog, ProgressDisplay
from learner.training.start_checks import read_inputs
from learner.training.train import RunParts, build_runner, build_scorer, build_trainer
from learner.training.trainer import build_optimizer
from learner.types import GroundTruthObject, RolloutOutput, Sample, Shape
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from shared_contracts.rollout_config import ServerAddress
from tests.unit.answers import BIRD, CAT, DOG, coords, encode, entry
from tests.unit.eval_answers import answers, box
from tests.unit.scripted_rollouts import report
from tests.unit.small_run import rollout, small_config
from tests.unit.toy_bpe import train_toy_tokenizer

# A label as a Mac's file names have it, and as most texts do.
FORMS = [unicodedata.normalize(form, "café") for form in ("NFD", "NFC")]
CAT_BOX, DOG_BOX = CAT.shape.coords, DOG.shape.coords


def sample(*objects: GroundTruthObject) -> Sample:
    return Sample("a:1", (), 64, 64, objects)


def answer(
    tokenizer: PreTrainedTokenizerFast, text: str, objects: Sequence[GroundTruthObject]
) -> ScoredAnswer:
    said = rollout([], encode(tokenizer, text))
    return ScoredAnswer.scored(
        assess_by_name(sample(*objects), said, tokenizer, allow_poly=False, resolution=256), 256
    )


def scored(
    tokenizer: PreTrainedTokenizerFast, *answers: tuple[str, Sequence[GroundTruthObject]]
) -> Scores:
    return Scores.of(answer(tokenizer, text, objects) for text, objects in answers)


def counts(scores: Scores) -> tuple[int, ...]:
    """Predicted, ground truths, hits, located, dropped."""
    s = scores
    return s.predicted, s.ground_truths, s.hits, s.located, s.dropped


def test_a_hit_needs_the_place_and_the_description(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    text = f"{{{entry(1, 'cat', CAT_BOX)}, {entry(2, 'cat', DOG_BOX)}}}"
    found = scored(toy_tokenizer, (text, [CAT, DOG, BIRD]))
    assert counts(found) == (2, 3, 1, 2, 0)
    assert found.precision == pytest.approx(1 / 2)
    assert found.recall == pytest.approx(1 / 3)
    assert found.f1 == pytest.approx(2 * 1 / (2 + 3))
    assert found.box_precision == 1.0
    assert found.box_recall == pytest.approx(2 / 3)
    assert found.box_f1 == pytest.approx(2 * 2 / (2 + 3))


@pytest.mark.req("EVAL-01")
def test_an_answer_has_scores_of_its_own_by_the_same_matches(
    toy_tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = f"{{{entry(1, 'cat', CAT_BOX)}, {entry(2, 'cat', DOG_BOX)}}}"
    found = answer(toy_tokenizer, text, [CAT, DOG, BIRD])
    assert found.match.pairs == [(0, 0), (1, 1)]
    assert found.match.false_negatives == [2]
    assert (found.hits, found.precision) == (1, 1 / 2)
    assert found.recall == pytest.approx(1 / 3)
    assert found.f1 == pytest.approx(2 / 5)


@pytest.mark.req("EVAL-01")
@pytest.mark.parametrize(
    ("text", "objects", "own"),
    [("{}", [], (None, None, 1.0)), ("{}", [CAT], (None, 0.0, 0.0))],
    ids=["nothing there, nothing said", "nothing said"],
)
def test_a_score_that_divides_by_nothing_is_none(
    toy_tokenizer: PreTrainedTokenizerFast,
    text: str,
    objects: list[GroundTruthObject],
    own: tuple[float | None, ...],
) -> None:
    found = answer(toy_tokenizer, text, objects)
    assert (found.precision, found.recall, found.f1) == own


@pytest.mark.parametrize(("right_edge", "located"), [(560, 1), (440, 0)])
def test_a_box_is_located_from_half_its_overlap(
    toy_tokenizer: PreTrainedTokenizerFast, right_edge: int, located: int
) -> None:
    """The truth is 0..999 wide, so that the share of the width is the IoU."""
    text = f"{{{entry(1, 'bird!', (0, 0, right_edge, 999))}}}"
    assert scored(toy_tokenizer, (text, [BIRD])).located == located


def test_two_answers_for_one_object_are_one_hit(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    text = f"{{{entry(1, 'cat', CAT_BOX)}, {entry(2, 'cat', CAT_BOX)}}}"
    found = scored(toy_tokenizer, (text, [CAT]))
    assert (found.predicted, found.hits) == (2, 1)
    assert found.precision == 0.5
    assert found.recall == 1.0


@pytest.mark.req("RES-20")
def test_a_hit_is_not_lost_to_another_description_at_its_place(
    toy_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """The dog lies on the cat exactly, the cat one bin off."""
    x1, y1, x2, y2 = CAT_BOX
    text = f"{{{entry(1, 'dog', CAT_BOX)}, {entry(2, 'cat', (x1 + 1, y1, x2, y2))}}}"
    found = answer(toy_tokenizer, text, [CAT])
    assert (found.hits, found.match.pairs) == (1, [(1, 0)])
    assert found.match.false_positives == [0]
    assert scored(toy_tokenizer, (text, [CAT])).box_f1 == pytest.approx(2 / 3)


@pytest.mark.req("RES-20")
def test_the_most_hits_hold_even_where_one_of_them_is_better(
    toy_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Both predictions lie on the first cat, the first one better; only it lies on the second."""
    first, second = (GroundTruthObject("cat", Shape("bbox_2d", c)) for c in ROWS)
    text = f"{{{entry(1, 'cat', (0, 0, 110, 100))}, {entry(2, 'cat', (0, 0, 60, 100))}}}"
    found = answer(toy_tokenizer, text, [first, second])
    assert (found.hits, found.match.pairs) == (2, [(0, 1), (1, 0)])


ROWS = (0, 0, 100, 100), (20, 0, 160, 100)


@pytest.mark.req("RES-20")
@given(
    st.integers(0, 4).flatmap(
        lambda truths: st.lists(
            st.lists(
                st.sampled_from([None, 0.0, 0.25, 0.5, 1.0]), min_size=truths, max_size=truths
            ),
            max_size=4,
        )
    )
)
@example([[1.0, 0.0, None], [None, 1.0, 0.0], [0.0, None, None]])
def test_no_other_way_to_pair_has_more_pairs_or_as_many_that_lie_closer(
    rows: list[list[float | None]],
) -> None:
    """None: must not be paired. Every way is tried."""
    iou = np.array([[-1.0 if v is None else v for v in row] for row in rows])
    iou = iou.reshape(len(rows), len(rows[0]) if rows else 0)
    pairs = most_pairs(iou, iou >= 0)
    assert pairs == sorted(pairs)
    assert len({p for p, _ in pairs}) == len({g for _, g in pairs}) == len(pairs)
    assert all(iou[pair] >= 0 for pair in pairs)
    assert (len(pairs), sum(iou[pair] for pair in pairs)) == best_way(iou.tolist())


def best_way(iou: list[list[float]], taken: frozenset[int] = frozenset()) -> tuple[int, float]:
    """Most pairs, and the largest sum of IoUs of as many."""
    if not iou:
        return 0, 0.0
    best = best_way(iou[1:], taken)
    for g, value in enumerate(iou[0]):
        if value >= 0 and g not in taken:
            pairs, total = best_way(iou[1:], taken | {g})
            best = max(best, (pairs + 1, total + value))
    return best


@pytest.mark.req("RES-20")
def test_of_two_ways_to_the_same_hits_the_nearer_one_holds(
    toy_tokenizer: PreTrainedTokenizerFast,
) -> None:
    cats = [GroundTruthObject("cat", Shape("bbox_2d", (x, 0, x + 100, 100))) for x in (0, 10)]
    text = f"{{{entry(1, 'cat', (10, 0, 110, 100))}, {entry(2, 'cat', (0, 0, 100, 100))}}}"
    assert answer(toy_tokenizer, text, cats).match.pairs == [(0, 1), (1, 0)]


@pytest.mark.req("RES-20")
@pytest.mark.parametrize("x", [0, 1, 2, 3])
@pytest.mark.parametrize(("width", "shift"), [(4, 1), (6, 2), (9, 3), (16, 5)])
def test_the_overlap_of_small_boxes_is_exact(
    toy_tokenizer: PreTrainedTokenizerFast, x: int, width: int, shift: int
) -> None:
    """A shift of up to a third leaves half; no canvas of 256 pixels tells bins apart."""
    truth = GroundTruthObject("cat", Shape("bbox_2d", (x, 0, x + width, 4)))
    said = entry(1, "cat", (x + shift, 0, x + shift + width, 4))
    found = answer(toy_tokenizer, f"{{{said}}}", [truth])
    assert found.hits == 1
    iou = (width - shift) / (width + shift)
    assert found.hits_at == [int(iou >= least) for least in IOU_THRESHOLDS]


@pytest.mark.req("RES-20")
@pytest.mark.parametrize("shape", [(7, 7, 7, 90), (7, 7, 7, 7)])
def test_a_box_without_an_area_is_hit_by_its_equal_alone(
    toy_tokenizer: PreTrainedTokenizerFast, shape: tuple[int, int, int, int]
) -> None:
    truth = GroundTruthObject("cat", Shape("bbox_2d", shape))
    assert answer(toy_tokenizer, f"{{{entry(1, 'cat', shape)}}}", [truth]).hits == 1
    assert answer(toy_tokenizer, f"{{{entry(1, 'cat', (7, 7, 8, 90))}}}", [truth]).hits == 0


@pytest.mark.req("RES-20")
@pytest.mark.parametrize("there", FORMS)
@pytest.mark.parametrize("said", FORMS)
def test_descriptions_are_compared_in_nfc(
    toy_tokenizer: PreTrainedTokenizerFast, there: str, said: str
) -> None:
    truth = GroundTruthObject(there, CAT.shape)
    assert answer(toy_tokenizer, f"{{{entry(1, said, CAT_BOX)}}}", [truth]).f1 == 1.0


@pytest.mark.req("RES-20")
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_the_taught_answer_scores_1_whatever_form_the_label_has_in_the_file(
    tmp_path: Path, form: Literal["NFC", "NFD"]
) -> None:
    """By a tokenizer that normalizes to NFC, as Qwen's does."""
    tokenizer = train_toy_tokenizer()
    tokenizer.backend_tokenizer.normalizer = NFC()
    (tmp_path / "a.png").touch()
    label = {"desc": unicodedata.normalize(form, "Büro-Café"), "bbox_2d": list(CAT_BOX)}
    record = {"images": ["a.png"], "width": 64, "height": 64, "objects": [label]}
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    (read,) = read_samples(data, allow_poly=False)
    taught = build_ground_truth_target(read.objects, tokenizer, "desc_first").token_ids
    assessed = assess_by_name(
        read, rollout([], taught), tokenizer, allow_poly=False, resolution=256
    )
    found = Scored.of([ScoredAnswer.scored(assessed, 256)], data, polygons=False)
    assert found.scores.f1 == 1.0
    assert [row.name for row in found.breakdown.descriptions] == ["B\u00fcro-Caf\u00e9"]
    assert [c["name"] for c in found.files.ground_truth["categories"]] == ["B\u00fcro-Caf\u00e9"]
    assert found.detected["bbox"].objects.ap == pytest.approx(1)


@pytest.mark.req("RES-20")
def test_pairs_with_a_polygon_are_measured_on_the_canvas_of_the_yaml(
    toy_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """A box, and the same as a polygon beside it; the canvas of 2 x 2 cannot part them."""
    corners = coords(0, 0, 400, 0, 400, 400, 0, 400)
    text = f'{{"object_1": {{"desc": "cat", "poly": {corners}}}}}'
    truth = GroundTruthObject("cat", Shape("bbox_2d", (0, 0, 400, 180)))
    assessed = [
        assess_by_name(
            sample(truth),
            rollout([], encode(toy_tokenizer, text)),
            toy_tokenizer,
            allow_poly=True,
            resolution=resolution,
        )
        for resolution in (4, 1000)
    ]
    assert [ScoredAnswer.scored(each, 256).hits for each in assessed] == [1, 0]


def test_objects_of_all_samples_count_alike(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    right = f"{{{entry(1, 'cat', CAT_BOX)}}}"
    found = scored(toy_tokenizer, (right, [CAT]), ("{}", [CAT, DOG]), ("garbage", [DOG]))
    assert counts(found) == (1, 4, 1, 1, 0)


def test_a_dropped_object_is_counted_and_is_no_prediction(
    toy_tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = f"{{{entry(1, 'cat', CAT_BOX[:3])}}}"
    found = scored(toy_tokenizer, (text, [CAT]))
    assert counts(found) == (0, 1, 0, 0, 1)


@pytest.mark.parametrize(("text", "objects"), [("{}", []), ("", []), ("{}", [CAT])])
def test_nothing_predicted_or_nothing_there_scores_zero_without_dividing_by_it(
    toy_tokenizer: PreTrainedTokenizerFast, text: str, objects: list[GroundTruthObject]
) -> None:
    found = scored(toy_tokenizer, (text, objects))
    assert (found.precision, found.recall, found.f1, found.box_f1) == (0.0, 0.0, 0.0, 0.0)


def test_scores_are_logged_under_eval() -> None:
    scores = Scores(
        answers=2,
        predicted=4,
        ground_truths=4,
        hits_at=(3, 3, 3, 3, 3, 2, 2, 2, 1, 1),
        located=4,
        dropped=1,
        duplicates=1,
        oversized=3,
    )
    logged = scores.payload().metrics()
    assert logged == {
        "eval/precision": 0.75,
        "eval/recall": 0.75,
        "eval/f1": 0.75,
        "eval/f1_95": 0.25,
        "eval/f1_miou": pytest.approx(2.3 / 4),
        "eval/box_f1": 1.0,
        "eval/duplicates": 0.5,
        "eval/oversized": 1.5,
        "eval/predicted": 4.0,
        "eval/ground_truths": 4.0,
        "eval/dropped": 1.0,
    }
    own = (scores.precision, scores.f1, scores.f1_95, scores.f1_miou)
    names = ("precision", "f1", "f1_95", "f1_miou")
    assert own == tuple(logged[f"eval/{name}"] for name in names)


@pytest.mark.req("EVAL-02")
def test_f1_at_each_iou_and_their_mean(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    """The truth is 0..999 wide and the answer 0..800: its IoU is 0.8."""
    text = f"{{{entry(1, 'bird!', (0, 0, 800, 999))}}}"
    found = scored(toy_tokenizer, (text, [BIRD]))
    assert found.hits_at == (1, 1, 1, 1, 1, 1, 1, 0, 0, 0)
    assert (found.f1, found.f1_95) == (1.0, 0.0)
    assert found.f1_miou == pytest.approx(0.7)


@pytest.mark.req("EVAL-02")
@pytest.mark.parametrize(
    ("desc", "right", "repeats"),
    [("cat", 200, 1), ("cat", 192, 1), ("cat", 188, 0), ("dog", 200, 0)],
)
def test_a_duplicate_has_the_description_and_nearly_the_place_of_an_earlier_one(
    desc: str, right: int, repeats: int
) -> None:
    """The first is 100 wide, from 100 to 200."""
    said = [box("cat", 100, 0, 200, 99), box(desc, 100, 0, right, 99)]
    (found,) = answers(([CAT], said))
    assert found.duplicates == repeats
    (thrice,) = answers(([CAT], [*said, said[0]]))
    assert thrice.duplicates == repeats + 1


@pytest.mark.req("EVAL-02")
@pytest.mark.parametrize(
    ("there", "right", "oversized"),
    [
        (box("cat", 0, 0, 100, 100), 999, 1),
        (box("cat", 0, 0, 100, 100), 960, 1),
        (box("cat", 0, 0, 100, 100), 940, 0),
        (box("cat", 0, 0, 999, 900), 999, 0),
        (box("dog", 0, 0, 999, 900), 999, 1),
    ],
)
def test_an_object_of_the_whole_image_that_is_not_there_is_oversized(
    there: GroundTruthObject, right: int, oversized: int
) -> None:
    (found,) = answers(([there], [box("cat", 0, 0, right, 999)]))
    assert found.oversized == oversized


class Scripted:
    """A backend that gives the same answers and notes what was done, in order."""

    def __init__(self, answers: list[list[int]]) -> None:
        self.answers = answers
        self.done: list[str] = []

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        self.done.append(f"rollout {len(requests)} seed {request_config.seed}")
        return [
            RolloutOutput([], ids, "", "stop", False, (1, 1), None)
            for ids, _ in zip(self.answers, requests, strict=True)
        ]

    def push_weights(self, version: int) -> None:
        self.done.append(f"push {version}")

    def close(self) -> None:
        self.done.append("close")


@pytest.mark.req("SYNC-07", "SYNC-09")
def test_evaluation_asks_the_newest_weights_and_polygons_count_where_they_are_allowed(
    toy_tokenizer: PreTrainedTokenizerFast,
) -> None:
    roof = f'"object_1": {{"desc": "roof", "poly": {coords(0, 0, 500, 0, 500, 500)}}}'
    cat = entry(2, "cat", CAT_BOX)
    backend = Scripted([encode(toy_tokenizer, f"{{{roof}, {cat}}}")])
    policy = Policy(OpenBackend(backend), Asking("Detect.", None, RequestConfig()))
    roof_box = GroundTruthObject("roof", Shape("bbox_2d", (0, 0, 500, 500)))
    samples = [sample(CAT, roof_box)]
    policy.push_if_stale()

    def asked(*, allow_poly: bool) -> Scores:
        done = evaluate(policy, samples, 7, toy_tokenizer, allow_poly=allow_poly, resolution=256)
        return done.scores

    found = asked(allow_poly=False)
    assert backend.done == ["push 1", "rollout 1 seed 7"]
    assert counts(found) == (1, 2, 1, 1, 1)
    found = asked(allow_poly=True)
    assert (found.predicted, found.dropped) == (2, 0)


@pytest.mark.req("EVAL-01")
def test_evaluations_are_decoded_greedily_beside_sampled_rollouts(
    toy_checkpoint: Path, toy_data: ToyData, toy_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    class Recorder(Scripted):
        def rollout(
            self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
        ) -> list[RolloutOutput]:
            asked.append((request_config.temperature, request_config.top_p))
            return super().rollout(requests, request_config)

    asked: list[tuple[float | None, float | None]] = []
    sampled = {
        "decode_mode": "sampling",
        "decoding": {"temperature": 0.7, "top_p": 0.95},
        "eval_detection": {"greedy": True},
    }
    config = small_config(toy_checkpoint, toy_data, tmp_path, rollout_matching=sampled)
    backend = Recorder([encode(toy_tokenizer, "{}")])
    policy = Policy(OpenBackend(backend), asking_of(config))
    logged: list[dict[str, Any]] = []
    policy.push_if_stale()
    one = [sample(CAT)]
    evaluate(policy, one, 7, toy_tokenizer, logged.append, allow_poly=False, resolution=256)
    policy.answer(one, 7)
    assert asked == [(0.0, 1.0), (0.7, 0.95)]
    told = [logged[0]["decoding"], policy.take_notes()[0]["decoding"]]
    assert [each.get("temperature") for each in told] == [0.0, 0.7]


@pytest.mark.req("SEED-02", "MET-01")
def test_the_calls_of_an_evaluation_are_logged_with_it_and_not_with_the_next_step(
    toy_tokenizer: PreTrainedTokenizerFast,
) -> None:
    journal = Journal()
    journal.call(Call("http://a:1", 0, 1, 7, 2, "answered"))
    backend = Scripted([encode(toy_tokenizer, "{}")])
    policy = Policy(OpenBackend(backend, journal=journal), Asking("Detect.", None, RequestConfig()))
    logged: list[dict[str, Any]] = []
    samples = [sample(CAT)]
    policy.push_if_stale()
    done = evaluate(
        policy, samples, 7, toy_tokenizer, logged.append, allow_poly=False, resolution=256
    )
    (record,) = logged
    assert record["evaluation_seed"] == 7
    assert [call["attempt"] for call in record["calls"]] == [2]
    assert done.notes.metrics()["rollout/retries"] == 1
    assert policy.take_notes()[1].metrics()["rollout/retries"] == 0


@pytest.mark.req("SYNC-10", "DIST-05", "MET-01")
def test_what_calls_and_push_of_an_evaluation_took_is_logged_with_its_scores(
    toy_checkpoint: Path, toy_data: ToyData, toy_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    config = small_config(toy_checkpoint, toy_data, tmp_path)
    inputs, loaded = read_inputs(config), load_model(config)
    journal = Journal([ServerAddress(base_url="http://a:1", group_port=7)])
    journal.call(Call("http://a:1", 0, 4, 7, 2, "answered"))
    journal.push("http://a:1", False, report(1, "e-0", seconds=2.0))
    backend = Scripted([encode(toy_tokenizer, "{}") for _ in inputs.val])
    policy = Policy(OpenBackend(backend, journal=journal), Asking("Detect.", None, RequestConfig()))
    display = ProgressDisplay(Console(file=io.StringIO()), "evaluation")
    optimizer = build_optimizer(loaded.model, config.training)
    parts = RunParts(config, inputs, loaded, optimizer, policy, CallLog(tmp_path))
    build_trainer(parts, build_runner(parts), build_scorer(parts), display).evaluate()
    display.stop()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    logged = json.loads(line)
    assert logged["eval/f1"] == 0.0
    assert (logged["eval/rollout/retries"], logged["eval/sync/pushes"]) == (1, 1)
    assert logged["eval/sync/total_s"] == 2.0
