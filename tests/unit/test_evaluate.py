"""Scores of a policy's answers, counted by hand."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from learner.data.toy import ToyData
from learner.evaluation.scores import ScoredAnswer, Scores, evaluate, judge
from learner.model.load import load_model
from learner.preflight import read_inputs
from learner.rollout.journal import Call, Journal
from learner.rollout.policy import Asking, OpenBackend, Policy
from learner.train import RunParts, build_runner, build_scorer, build_trainer
from learner.trainer.optim import build_optimizer
from learner.trainer.progress import ProgressDisplay
from learner.trainer.runlog import CallLog
from learner.types import GroundTruthObject, RolloutOutput, Sample, Shape
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from shared_contracts.rollout_config import ServerAddress
from tests.unit.answers import BIRD, CAT, DOG, coords, encode, entry
from tests.unit.scripted_rollouts import report
from tests.unit.small_run import rollout, small_config

CAT_BOX, DOG_BOX = CAT.shape.coords, DOG.shape.coords


def sample(*objects: GroundTruthObject) -> Sample:
    return Sample("a:1", (), 64, 64, objects)


def answer(
    tokenizer: PreTrainedTokenizerFast, text: str, objects: Sequence[GroundTruthObject]
) -> ScoredAnswer:
    said = rollout([], encode(tokenizer, text))
    return ScoredAnswer.scored(judge(sample(*objects), said, tokenizer, allow_poly=False))


def scored(
    tokenizer: PreTrainedTokenizerFast, *answers: tuple[str, Sequence[GroundTruthObject]]
) -> Scores:
    return Scores.of(answer(tokenizer, text, objects) for text, objects in answers)


def test_a_hit_needs_the_place_and_the_description(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    text = f"{{{entry(1, 'cat', CAT_BOX)}, {entry(2, 'cat', DOG_BOX)}}}"
    found = scored(toy_tokenizer, (text, [CAT, DOG, BIRD]))
    assert found == Scores(predicted=2, ground_truths=3, hits=1, located=2, dropped=0)
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


def test_objects_of_all_samples_count_alike(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    right = f"{{{entry(1, 'cat', CAT_BOX)}}}"
    found = scored(toy_tokenizer, (right, [CAT]), ("{}", [CAT, DOG]), ("garbage", [DOG]))
    assert found == Scores(predicted=1, ground_truths=4, hits=1, located=1, dropped=0)


def test_a_dropped_object_is_counted_and_is_no_prediction(
    toy_tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = f"{{{entry(1, 'cat', CAT_BOX[:3])}}}"
    found = scored(toy_tokenizer, (text, [CAT]))
    assert found == Scores(predicted=0, ground_truths=1, hits=0, located=0, dropped=1)


@pytest.mark.parametrize(("text", "objects"), [("{}", []), ("", []), ("{}", [CAT])])
def test_nothing_predicted_or_nothing_there_scores_zero_without_dividing_by_it(
    toy_tokenizer: PreTrainedTokenizerFast, text: str, objects: list[GroundTruthObject]
) -> None:
    found = scored(toy_tokenizer, (text, objects))
    assert (found.precision, found.recall, found.f1, found.box_f1) == (0.0, 0.0, 0.0, 0.0)


def test_scores_are_logged_under_eval() -> None:
    scores = Scores(predicted=4, ground_truths=4, hits=3, located=4, dropped=1)
    assert scores.payload().metrics() == {
        "eval/precision": 0.75,
        "eval/recall": 0.75,
        "eval/f1": 0.75,
        "eval/box_f1": 1.0,
        "eval/predicted": 4.0,
        "eval/ground_truths": 4.0,
        "eval/dropped": 1.0,
    }


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
    found = evaluate(policy, samples, seed=7, tokenizer=toy_tokenizer, allow_poly=False).scores
    assert backend.done == ["push 1", "rollout 1 seed 7"]
    assert found == Scores(predicted=1, ground_truths=2, hits=1, located=1, dropped=1)
    found = evaluate(policy, samples, seed=7, tokenizer=toy_tokenizer, allow_poly=True).scores
    assert (found.predicted, found.dropped) == (2, 0)


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
    done = evaluate(policy, samples, 7, toy_tokenizer, logged.append, allow_poly=False)
    (record,) = logged
    assert record["evaluation_seed"] == 7
    assert [call["attempt"] for call in record["calls"]] == [2]
    assert done.notes.metrics()["rollout/retries"] == 1
    assert policy.take_notes()[1].metrics()["rollout/retries"] == 0


@pytest.mark.req("SYNC-10", "DIST-05", "MET-01")
def test_what_calls_and_push_of_an_evaluation_took_is_logged_with_its_scores(
    toy_checkpoint: Path,
    toy_data: ToyData,
    toy_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
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
