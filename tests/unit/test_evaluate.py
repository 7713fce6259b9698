"""Scores of answers, counted by hand; two evaluations compared."""

import io
import json
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from tokenizers.normalizers import NFC
from typer.testing import CliRunner

from learner.analysis.evaluation.comparison import Compared, compare, find_answers
from learner.analysis.evaluation.folder import ANSWERS, Scored, write_evaluation
from learner.analysis.evaluation.scores import ScoredAnswer, Scores, assess_by_name, evaluate
from learner.cli import app
from learner.data.jsonl import read_samples
from learner.distributed.peers import SINGLE_PROCESS
from learner.models.load import load_model
from learner.rollout.backend import Call, Journal, RolloutBackend
from learner.rollout.policy import Policy, RequestSettings, request_settings
from learner.stages.matching import most_pairs
from learner.stages.targets import build_ground_truth_target
from learner.stages.tokens import Tokenizer
from learner.training.evaluation import build_scorer, evaluation_seed
from learner.training.input_checks import read_inputs
from learner.training.run_log import ProgressDisplay, log_calls
from learner.training.synchronous_rollouts import RolloutSource
from learner.training.train import RunParts, build_runner, build_trainer
from learner.training.trainer import build_optimizer
from learner.types import GroundTruthObject, RolloutOutput, Sample
from shared_contracts.errors import ContractError
from shared_contracts.infer import RequestConfig
from shared_contracts.rollout_config import ServerAddress
from tests.unit.answers import BIRD, CAT, DOG, encode, entry
from tests.unit.eval_answers import DATA, answers, box
from tests.unit.scripted_server import report
from tests.unit.small_run import ConfigOf, rollout
from tests.unit.test_forwards import Waiting
from tests.unit.toy_bpe import train_toy_tokenizer

CAT_BOX, DOG_BOX = CAT.shape.coords, DOG.shape.coords


def sample(*objects: GroundTruthObject) -> Sample:
    return Sample("a:1", (), 64, 64, objects)


def answer(tokenizer: Tokenizer, text: str, objects: Sequence[GroundTruthObject]) -> ScoredAnswer:
    output = rollout([], encode(tokenizer, text))
    return ScoredAnswer.scored(
        assess_by_name(sample(*objects), output, tokenizer, allow_poly=False, resolution=256), 256
    )


def scored(tokenizer: Tokenizer, *answers: tuple[str, Sequence[GroundTruthObject]]) -> Scores:
    return Scores.of(answer(tokenizer, text, objects) for text, objects in answers)


def ratios(scores: Scores) -> tuple[float, ...]:
    names = ("precision", "recall", "f1")
    return tuple(scores.ratio(kind + name) for kind in ("", "box_") for name in names)


def counts(scores: Scores) -> tuple[int, ...]:
    """Predicted, ground truths, hits, located, dropped."""
    s = scores
    return s.predicted, s.ground_truths, s.hits, s.located, s.dropped


@pytest.mark.req("EVAL-01")
def test_hit_needs_place_and_description(toy_tokenizer: Tokenizer) -> None:
    text = f"{{{entry(1, 'cat', CAT_BOX)}, {entry(2, 'cat', DOG_BOX)}}}"
    found = scored(toy_tokenizer, (text, [CAT, DOG, BIRD]))
    assert counts(found) == (2, 3, 1, 2, 0)
    assert ratios(found) == pytest.approx((1 / 2, 1 / 3, 2 / 5, 1, 2 / 3, 4 / 5))
    own = answer(toy_tokenizer, text, [CAT, DOG, BIRD])
    assert (own.hits, own.precision) == (1, 1 / 2)
    assert (own.recall, own.f1) == pytest.approx((1 / 3, 2 / 5))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (
            [(f"{{{entry(1, 'cat', CAT_BOX)}}}", [CAT]), ("{}", [CAT, DOG]), ("garbage", [DOG])],
            (1, 4, 1, 1, 0),
        ),
        ([(f"{{{entry(1, 'cat', CAT_BOX)}, {entry(2, 'cat', CAT_BOX)}}}", [CAT])], (2, 1, 1, 1, 0)),
        ([(f"{{{entry(1, 'cat', CAT_BOX[:3])}}}", [CAT])], (0, 1, 0, 0, 1)),
        ([(f"{{{entry(1, 'bird!', (0, 0, 560, 999))}}}", [BIRD])], (1, 1, 1, 1, 0)),
        ([(f"{{{entry(1, 'bird!', (0, 0, 440, 999))}}}", [BIRD])], (1, 1, 0, 0, 0)),
    ],
    ids=["several samples", "one object twice", "a dropped object", "IoU 0.56", "IoU 0.44"],
)
def test_counts_of_scores(
    toy_tokenizer: Tokenizer,
    answers: list[tuple[str, Sequence[GroundTruthObject]]],
    expected: tuple[int, ...],
) -> None:
    assert counts(scored(toy_tokenizer, *answers)) == expected


@pytest.mark.req("RES-20")
def test_hit_is_not_lost_to_another_description_at_its_place(toy_tokenizer: Tokenizer) -> None:
    x1, y1, x2, y2 = CAT_BOX
    text = f"{{{entry(1, 'dog', CAT_BOX)}, {entry(2, 'cat', (x1 + 1, y1, x2, y2))}}}"
    found = answer(toy_tokenizer, text, [CAT])
    assert (found.hits, found.match.pairs) == (1, [(1, 0)])
    assert found.match.false_positives == [0]
    assert scored(toy_tokenizer, (text, [CAT])).ratio("box_f1") == pytest.approx(2 / 3)


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
def test_pairs_are_as_many_and_as_close_as_the_best_of_all_pairings(
    rows: list[list[float | None]],
) -> None:
    """rows: None must not be paired. The reference tries all pairings."""
    iou = np.array([[-1.0 if v is None else v for v in row] for row in rows])
    iou = iou.reshape(len(rows), len(rows[0]) if rows else 0)
    pairs = most_pairs(iou, iou >= 0)
    assert pairs == sorted(pairs)
    assert len({p for p, _ in pairs}) == len({g for _, g in pairs}) == len(pairs)
    assert all(iou[pair] >= 0 for pair in pairs)
    assert (len(pairs), sum(iou[pair] for pair in pairs)) == best_way(iou.tolist())


def best_way(iou: list[list[float]], taken: frozenset[int] = frozenset()) -> tuple[int, float]:
    if not iou:
        return 0, 0.0
    best = best_way(iou[1:], taken)
    for g, value in enumerate(iou[0]):
        if value >= 0 and g not in taken:
            pairs, total = best_way(iou[1:], taken | {g})
            best = max(best, (pairs + 1, total + value))
    return best


@pytest.mark.req("RES-20")
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_taught_answer_scores_1_for_each_unicode_form_of_the_label(
    toy_tokenizer: Tokenizer, tmp_path: Path, form: Literal["NFC", "NFD"]
) -> None:
    """The tokenizer normalizes to NFC, as Qwen's does."""
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
    assert found.scores.ratio("f1") == 1.0
    assert [row["name"] for row in found.breakdown["descriptions"]] == ["B\u00fcro-Caf\u00e9"]
    assert [c["name"] for c in found.files.ground_truth["categories"]] == ["B\u00fcro-Caf\u00e9"]
    assert found.detected["bbox"].objects.ap == pytest.approx(1)
    other = GroundTruthObject(unicodedata.normalize("NFD", "café"), CAT.shape)
    text = f"{{{entry(1, unicodedata.normalize('NFC', 'café'), CAT_BOX)}}}"
    assert answer(toy_tokenizer, text, [other]).f1 == 1.0


@pytest.mark.req("EVAL-01")
def test_scores_with_a_zero_denominator(toy_tokenizer: Tokenizer) -> None:
    for there, own in (([], (None, None, 1.0)), ([CAT], (None, 0.0, 0.0))):
        found = answer(toy_tokenizer, "{}", there)
        assert (found.precision, found.recall, found.f1) == own
        pooled = scored(toy_tokenizer, ("{}", there))
        assert ratios(pooled) == (0.0,) * 6


@pytest.mark.req("EVAL-02")
@pytest.mark.parametrize(
    ("desc", "right", "repeats"),
    [("cat", 200, 1), ("cat", 192, 1), ("cat", 188, 0), ("dog", 200, 0)],
)
def test_duplicate_has_description_and_nearly_the_place_of_an_earlier_one(
    desc: str, right: int, repeats: int
) -> None:
    predicted = [box("cat", 100, 0, 200, 99), box(desc, 100, 0, right, 99)]
    (found,) = answers(([CAT], predicted))
    assert found.duplicates == repeats
    (thrice,) = answers(([CAT], [*predicted, predicted[0]]))
    assert thrice.duplicates == repeats + 1


@pytest.mark.req("EVAL-02")
@pytest.mark.parametrize(
    ("there", "right", "oversized"),
    [
        (box("cat", 0, 0, 100, 100), 940, 0),
        (box("cat", 0, 0, 999, 900), 999, 0),
        (box("dog", 0, 0, 999, 900), 999, 1),
    ],
)
def test_false_object_of_the_whole_image_is_oversized(
    there: GroundTruthObject, right: int, oversized: int
) -> None:
    (found,) = answers(([there], [box("cat", 0, 0, right, 999)]))
    assert found.oversized == oversized


class Scripted(RolloutBackend):
    """Gives the same answers. decoded: settings of each call, system message. done: in order."""

    def __init__(self, answers: list[list[int]], journal: Journal | None = None) -> None:
        super().__init__(journal)
        self.answers = answers
        self.decoded: list[tuple[object, ...]] = []
        self.done: list[object] = []

    @contextmanager
    def block(self, name: str) -> Iterator[None]:
        self.done.append(name)
        yield
        self.done.append(name)

    def serving(self) -> AbstractContextManager[None]:
        return self.block("serving")

    def rollout(self, requests: Any, request_config: RequestConfig) -> list[RolloutOutput]:
        self.done += [request_config.seed, *(request.uuid for request in requests)]
        system = requests[0].messages[0].content
        self.decoded.append((request_config.temperature, request_config.top_p, system))
        return [rollout([], ids) for ids, _ in zip(self.answers, requests, strict=True)]

    def push_weights(self, version: int) -> None:
        self.done.append(f"push {version}")

    def close(self) -> None: ...


@pytest.mark.req("EVAL-01")
def test_evaluations_are_greedy_although_rollouts_are_sampled(
    config_of: ConfigOf, toy_tokenizer: Tokenizer
) -> None:
    sampled = {
        "decode_mode": "sampling",
        "decoding": {"temperature": 0.7, "top_p": 0.95},
        "eval_detection": {"greedy": True},
    }
    config = config_of(rollout_matching=sampled, template={"system": "Be exact."})
    backend = Scripted([encode(toy_tokenizer, "{}")])
    policy = Policy(backend, request_settings(config))
    logged: list[dict[str, Any]] = []
    policy.push_if_stale()
    one = [sample(CAT)]
    evaluate(config, policy, one, 7, toy_tokenizer, logged.append)
    policy.answer(one, 7)
    assert backend.decoded == [(0.0, 1.0, "Be exact."), (0.7, 0.95, "Be exact.")]
    records = [logged[0]["decoding"], policy.take_notes()[0]["decoding"]]
    assert [record.get("temperature") for record in records] == [0.0, 0.7]


@pytest.mark.req("SEED-02", "SYNC-10", "DIST-05", "MET-01")
def test_calls_and_push_of_an_evaluation_are_logged_with_its_scores(
    config_of: ConfigOf, toy_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config = config_of(training={"output_dir": str(tmp_path)})
    inputs, loaded = read_inputs(config), load_model(config)
    journal = Journal([ServerAddress(base_url="http://a:1", group_port=7)])
    journal.call(Call("http://a:1", 0, 4, 7, 2, "answered"))
    journal.push("http://a:1", False, report(1, "e-0", seconds=2.0))
    backend = Scripted([encode(toy_tokenizer, "{}") for _ in inputs.val], journal)
    policy = Policy(backend, RequestSettings("Detect.", None, RequestConfig()))
    display = ProgressDisplay(Console(file=io.StringIO()), "evaluation")
    optimizer = build_optimizer(loaded.model, config.training)
    calls = partial(log_calls, tmp_path, 0)
    parts = RunParts(config, inputs, loaded, optimizer, policy, calls)
    runner = build_runner(parts)
    scorer = build_scorer(config, inputs.val, loaded, policy, calls, SINGLE_PROCESS, runner.source)
    build_trainer(parts, runner, scorer, display).evaluate()
    display.stop()
    (record,) = map(json.loads, (tmp_path / "rollout_calls.jsonl").read_text().splitlines())
    assert record["evaluation_seed"] is not None
    assert [call["attempt"] for call in record["calls"]] == [2]
    assert policy.take_notes()[1].metrics()["rollout/retries"] == 0, "they are not the next step's"
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    logged = json.loads(line)
    assert logged["eval/f1"] == 0.0
    assert (logged["eval/rollout/retries"], logged["eval/sync/pushes"]) == (1, 1)
    assert logged["eval/sync/total_s"] == 2.0


@pytest.mark.req("EVAL-01", "ASYNC-01", "ROLL-03", "SYNC-07")
@pytest.mark.parametrize(("rank", "count"), [(0, 1), (0, 2), (1, 2)])
def test_a_process_evaluates_its_own_samples_and_has_the_servers_for_itself(
    config_of: ConfigOf, toy_tokenizer: Tokenizer, rank: int, count: int
) -> None:
    config, peers = config_of(), Waiting()
    peers.rank, peers.count = rank, count
    val, loaded = read_inputs(config).val, load_model(config)
    own = [sample.sample_id for sample in val[rank::count]]
    backend = Scripted([encode(toy_tokenizer, "{}") for _ in own])

    class Source(RolloutSource):
        def exclusive_access(self) -> AbstractContextManager[None]:
            return backend.block("alone")

    policy = Policy(backend, request_settings(config))
    source, seed = Source(config, policy, cast(Any, None)), evaluation_seed(config, rank)
    build_scorer(config, val, loaded, policy, lambda _: None, peers, source)(0)
    assert backend.done == ["alone", "serving", "push 1", seed, *own, "serving", "alone"]
    assert (seed == evaluation_seed(config)) is (rank == 0)
    assert peers.repushes == 1, "to servers that restart while others are waited for"


ONE, OTHER = box("cat", 0, 0, 400, 400), box("dog", 500, 500, 900, 900)


def evaluation(*right: bool, there: GroundTruthObject = ONE) -> list[ScoredAnswer]:
    return answers(*(([there], [there if found else OTHER]) for found in right))


def by_name(first: list[ScoredAnswer], second: list[ScoredAnswer]) -> dict[str, Compared]:
    return {each.name: each for each in compare(first, second, seed=0)}


@pytest.mark.req("EVAL-02")
def test_interval_is_that_of_paired_differences() -> None:
    """Recall is a mean over 100 samples of one object: its deviation is known."""
    first = [i % 2 == 0 for i in range(100)]
    second = [right or i < 20 for i, right in enumerate(first)]  # right wherever the first is
    found = by_name(evaluation(*first), evaluation(*second))["recall"]
    assert found.difference == pytest.approx(0.1)
    deviation = np.std(np.subtract(second, first, dtype=float)) / 10
    assert found.low == pytest.approx(0.1 - 1.96 * deviation, abs=0.012)
    assert found.high == pytest.approx(0.1 + 1.96 * deviation, abs=0.012)


def written(folder: Path, found: list[ScoredAnswer]) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_evaluation(folder, Scored.of(found, DATA, polygons=False), {})
    return folder


@pytest.mark.req("EVAL-02")
def test_command_compares_the_newest_evaluation_of_a_run(tmp_path: Path) -> None:
    run, right = tmp_path / "run", [True] * 30
    other = written(tmp_path / "other", evaluation(*right))
    written(run / "evaluations" / "step_000010", evaluation(True))
    newest = written(run / "evaluations" / "step_000020", evaluation(*[False] * 30))
    shown = CliRunner().invoke(app, ["compare", str(run), str(other)])
    assert shown.exit_code == 0, shown.output
    assert f"first: {newest / ANSWERS}" in shown.output.replace("\n", "")
    f1 = next(line.split() for line in shown.output.splitlines() if line.startswith("F1 "))
    assert f1 == ["F1", "0.000", "1.000", "+1.000", "+1.000", "..", "+1.000", "*"]
    document = CliRunner().invoke(app, ["compare", str(run), str(other), "--json"])
    numbers = json.loads(document.output)
    assert (numbers["samples"], numbers["scores"][0]["difference"]) == (30, 1.0)


@pytest.mark.req("EVAL-02")
def test_evaluations_of_other_samples_are_refused(tmp_path: Path) -> None:
    two = written(tmp_path / "two", evaluation(True, True))
    three = written(tmp_path / "three", evaluation(True, True, True))
    dogs = written(tmp_path / "dogs", evaluation(True, True, there=OTHER))

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
