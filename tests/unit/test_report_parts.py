"""Answers, charts, findings and headline of a run's report."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly.graph_objects import Figure

from learner.analysis.report.answers import Chooser, FaultName, Tally, choose, faults_of
from learner.analysis.report.charts import (
    curves,
    histogram,
    present,
    push_charts,
    quantile,
    step_chart,
    thinned,
)
from learner.analysis.report.findings import Highlight, findings
from learner.analysis.report.run_view import (
    RunView,
    Tile,
    evaluations_of,
    headline,
    how_to_evaluate,
    state,
    tiles,
)
from learner.runs.rollout_log import LoggedAnswer, StepAnswer
from tests.unit.report_folder import B, MadeRun, answer, call_line, step_line

FAR = (700, 700, 900, 900)
CAT = ("cat", (100, 100, 400, 400))


def missing(count: int, sample: str = "train.jsonl:1", step: int = 1) -> StepAnswer:
    """Nothing was predicted, of so many objects."""
    return answer(sample, step, truths=[CAT] * count, predicted=[], pairs=[])


def good(count: int, step: int = 1) -> list[StepAnswer]:
    return [answer(f"train.jsonl:{place}", step) for place in range(count)]


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
def test_faults_of_an_answer_are_named(made: StepAnswer, fault: FaultName) -> None:
    assert faults_of(answer()) == []
    assert faults_of(made) == [fault]
    alone = LoggedAnswer(**made.model_dump(exclude={"step", "rank", "chunk", "segment"}))
    expected = [] if fault == "not_supervised" else [fault]
    assert faults_of(alone) == expected, "an evaluation trains on nothing"


@pytest.mark.req("REPORT-01")
def test_answers_are_ordered_by_f1_then_by_missed_objects() -> None:
    best, one, three = answer("a:1"), missing(1, "b:1"), missing(3, "c:1")
    half = answer("d:1", predicted=[CAT, ("owl", FAR)])
    assert choose([best, half, one, three]) == [three, one, half, best]


@pytest.mark.req("REPORT-01")
def test_each_third_of_a_run_shows_its_worst_answers() -> None:
    steps = list(range(0, 300, 2))
    chooser = Chooser[StepAnswer](steps, most=90)
    for place, step in enumerate(steps):
        worst = missing(9 if place < 50 else 1, f"worst:{step}", step)
        chooser.offer(step, [worst, *good(40, step)])
    chosen = chooser.chosen()
    assert len({id(each) for each in chosen}) == len(chosen) == 90
    worst_of = [each.step // 100 for each in chosen if "worst" in each.sample_id]
    assert [worst_of.count(third) for third in range(3)] == [20, 20, 20]
    assert {each.step for each in chosen if "worst" not in each.sample_id} == {0, 150, 298}


VALUES = st.one_of(st.none(), st.floats(-1e6, 1e6))


@given(st.lists(VALUES, min_size=50, max_size=400))
def test_thinned_series_keeps_extremes_order_and_gaps(values: list[float | None]) -> None:
    points = list(enumerate(values, start=1))
    short = thinned(points, most=40)
    known = [value for value in values if value is not None]
    kept = [value for _, value in short if value is not None]
    assert len(short) <= 60  # lowest, highest and a gap of each of 20 stretches
    assert [x for x, _ in short] == sorted({x for x, _ in short})
    assert set(short) <= set(points)
    assert (min(kept), max(kept)) == (min(known), max(known)) if known else not kept
    assert (None in values) == any(value is None for _, value in short)


@given(st.dictionaries(st.integers(0, 5000), st.integers(1, 9), min_size=1))
def test_histogram_counts_every_answer_once(counts: dict[int, int]) -> None:
    chart = histogram("a", "A", "tokens", counts, 1)
    assert chart is not None
    (trace,) = chart.figure["data"]
    assert sum(trace["y"]) == sum(counts.values())
    assert len(trace["customdata"]) == len(trace["y"]) <= 42
    assert histogram("a", "A", "tokens", {}, 1) is None
    assert [quantile({1: 1, 2: 2, 10: 1}, q) for q in (0.25, 0.5, 0.75, 1.0)] == [1, 2, 2, 10]


@pytest.mark.req("REPORT-01")
def test_sequential_phases_add_up_to_the_step(tmp_path: Path) -> None:
    lines = [step_line(1, "A"), step_line(2), step_line(3)]
    chart = step_chart(RunView.of(MadeRun(tmp_path, lines).write()))
    assert chart is not None
    traces = chart.figure["data"]
    above = {trace["name"]: trace["y"] for trace in traces if trace["yaxis"] == "y1"}
    below = {trace["name"]: trace["y"] for trace in traces if trace["yaxis"] == "y2"}
    assert set(above) == {"push", "wait", "learn", "other"}
    assert set(below) == {"rollout", "target", "pack"}
    for place, line in enumerate(lines):
        together = sum(heights[place] or 0 for heights in above.values())
        assert together == pytest.approx(line["time/step_s"])


@pytest.mark.req("REPORT-01", "LOGP-01")
def test_run_of_two_channels_has_all_charts_as_valid_plotly_figures(tmp_path: Path) -> None:
    lines = [step_line(step, "AB"[step % 2]) for step in range(1, 60)]
    lines[1] |= {"loss": None}
    lines[2] |= dict.fromkeys(["mismatch/tokens", "mismatch/all_mean", "mismatch/all_p99"], 0.5)
    lines.append({"step": 59, "eval/f1": 0.5, "eval/precision": 0.5, "eval/recall": 0.5})
    run = RunView.of(MadeRun(tmp_path, lines, [call_line(2), call_line(4)]).write())
    drawn = {chart.slug: chart for chart in curves(run)}
    assert set(drawn) >= {
        *("loss", "loss-a", "loss-b", "scores", "match-rate", "parse-rates", "lengths"),
        *("learning-rate", "grad-norm", "mismatch-mean", "mismatch-p99"),
    }
    assert [row.name for row in drawn["loss"].table] == ["channel A", "channel B"]
    assert None in drawn["loss"].figure["data"][0]["y"], "a loss that is no number is a gap"
    limit = next(row for row in drawn["lengths"].table if row.name == "max_new_tokens")
    assert limit.highest == "16"
    lengths = histogram("a", "A", "tokens", {1: 2, 3: 4}, 1)
    for chart in [*drawn.values(), *present(step_chart(run), lengths), *push_charts(run)]:
        text = re.sub(r"var\(--[a-z0-9-]+\)|transparent", "black", json.dumps(chart.figure))
        figure = json.loads(text)
        Figure(figure["data"], figure["layout"])  # raises ValueError for an unknown name


END = {"train_runtime": 115.2, "train_loss": 1.0}


def steps(count: int = 30, **more: Any) -> list[dict[str, Any]]:
    return [step_line(step, **more) for step in range(1, count + 1)]


def found(
    path: Path,
    lines: list[dict[str, Any]],
    answers: list[StepAnswer] | None = None,
    unreadable: int = 0,
    **run: Any,
) -> list[Highlight]:
    error = run.pop("error", None)
    view = RunView.of(MadeRun(path, lines, **run).write(), error)
    tally = Tally()
    tally.offer(answers or [])
    return findings(view, tally, unreadable)


def texts(found: list[Highlight]) -> list[str]:
    return [f"{finding.weight} {finding.section}: {finding.text}" for finding in found]


def spoilt(step: int, **more: Any) -> list[dict[str, Any]]:
    lines = steps(time__wait_s=0.1)
    lines[step - 1] |= more
    return lines


def worsening() -> list[dict[str, Any]]:
    """Loss, drop reason and match rate get worse; the last evaluation is not the best."""
    lines = steps()
    for line in lines:
        late = line["step"] > 20
        line[f"{B}/strict_drop/bbox_invalid"] = 4.0 if late else 1.0
        line[f"{B}/N_drop_invalid"] = 6.0 if late else 3.0
        line["loss"], line[f"{B}/match_rate"] = float(line["step"]), 1 / line["step"]
    scores = [{"step": 10 * at, "eval/f1": f1} for at, f1 in enumerate([0.2, 0.8, 0.75], start=1)]
    return [*lines, *scores]


@pytest.mark.req("REPORT-01")
@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (
            spoilt(7, loss=None),
            "bad curves: The loss was not a finite number in 1 step (first: step 7)",
        ),
        (spoilt(3, **{"rollout/servers_lost": 2.0}), "bad sync: Servers were lost 2 times"),
        (
            spoilt(9, **{"time/push_s": 0.9}),
            "look timeline: 1 push took longer than the step's training",
        ),
        (steps(), "look timeline: Steps with answers spent 33% of their time waiting for packs"),
        (
            steps(rollout__parse_truncated_rate=0.12),
            "look answers: 12.0% of the answers were truncated",
        ),
        (
            spoilt(4, **{f"{B}/prose_before": 12.0}),
            "look answers: 12 answers with other text before the first bracket (prose_before)",
        ),
        (
            worsening(),
            "look answers: Drop reason bbox_invalid rises: 2.33% of the predicted objects in the "
            "first third, 8.70% in the last",
        ),
        (worsening(), "look curves: The best F1 was 0.800 at step 20; the last is 0.750"),
    ],
)
def test_each_fault_of_a_run_has_a_finding(
    lines: list[dict[str, Any]], text: str, tmp_path: Path
) -> None:
    found_here = found(tmp_path, lines)
    assert text in texts(found_here)
    weights = [finding.weight for finding in found_here]
    assert weights == sorted(weights, key=["bad", "look", "good"].index)
    good = found(tmp_path / "good", steps(time__wait_s=0.1), [answer()] * 50)
    assert [finding.weight for finding in good] == ["good"]


def test_faults_of_answers_have_findings(tmp_path: Path) -> None:
    answers = [
        *[answer()] * 80,
        *[answer(truncated=True, finish_reason="length")] * 12,
        *[answer(invalid=True), answer(supervised=False)],
        *[answer(predicted=[("dog", (110, 100, 400, 400))])] * 15,
    ]
    assert {text for text in texts(found(tmp_path, steps(), answers, 3)) if "answer" in text} >= {
        "look answers: 11.0% of the answers were truncated at max_new_tokens (16)",
        "look answers: 0.9% of the answers are no JSON object at all",
        "look gallery: 1 answer could not be trained on and were left out",
        "look gallery: 13.8% of the answers describe an object they found by a wrong name",
        "look gallery: 3 images of the answers shown cannot be read any more",
    }


def view(path: Path, lines: list[dict[str, Any]], error: str | None = None, **run: Any) -> RunView:
    return RunView.of(MadeRun(path, lines, **run).write(), error)


def test_state_of_a_run(tmp_path: Path) -> None:
    lines = steps(2)
    assert state(view(tmp_path / "none", [])) == "No step is logged yet."
    going_on = state(view(tmp_path / "on", lines))
    assert going_on.startswith("Not finished: step 2 of 3. The last line was logged 2")
    over = [*lines, {"step": 2, **END}]
    assert state(view(tmp_path / "end", over)) == "Finished: 2 steps in 1m55s."
    failed = state(view(tmp_path / "failed", lines, "no server is left"))
    assert failed == "Ended by an error at step 2 of 3."


@pytest.mark.req("REPORT-01")
def test_run_without_an_evaluation_names_the_command_for_one(tmp_path: Path) -> None:
    run = view(tmp_path, steps())
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-100").mkdir()
    found = evaluations_of(run)
    first = tiles(run, headline(found, run.config.data.val_jsonl), "#evaluations")[0]
    assert first == Tile(
        "Held-out F1", "none yet", "this run has no evaluation; how to get one", "#evaluations"
    )
    assert how_to_evaluate(run) == (
        f"learner eval --config {tmp_path}/resolved_config.yaml "
        f"--checkpoint {tmp_path}/checkpoint-100"
    )


def evaluated(run: RunView, name: str, checkpoint: Path, data: Path, f1: float = 0.5) -> None:
    """As `learner eval` leaves it in the folder of a run."""
    folder = run.folder.path / "evaluations" / name
    folder.mkdir(parents=True)
    scores = {
        "checkpoint": str(checkpoint),
        "data": str(data),
        "scores": {"f1": f1, "precision": 0.25, "recall": 0.75},
        "coco": {"bbox": {"objects": {"ap": 0.125}}},
    }
    (folder / "scores.json").write_text(json.dumps(scores))
    (folder / "report.html").write_text("<title>Evaluation</title>")


@pytest.mark.req("REPORT-01")
def test_headline_is_the_newest_score_of_held_out_data(tmp_path: Path) -> None:
    own = {"step": 20, "eval/f1": 0.6, "eval/precision": 0.6, "eval/recall": 0.6}
    path = tmp_path / "the run"
    run = view(path, [*steps(), own])
    data = run.config.data
    assert data.val_jsonl is not None
    evaluated(run, "a", path / "checkpoint-10", data.val_jsonl, 0.9)
    evaluated(run, "b", path / "checkpoint-30", Path(data.train_jsonl), 1.0)
    evaluated(run, "c", run.config.model.model, data.val_jsonl, 0.1)
    evaluated(run, "d", path / "checkpoint-31", data.val_jsonl, 0.8)  # of steps thrown away
    evaluated(run, "e", tmp_path / "other" / "checkpoint-30", data.val_jsonl, 0.7)
    found = evaluations_of(run)
    assert [(each.step, each.f1, each.held_out) for each in found] == [
        (0, 0.1, True),
        (10, 0.9, True),
        (20, 0.6, True),
        (30, 1.0, False),
    ]
    assert headline(found, data.val_jsonl) is found[2]
    evaluated(run, "f", path / "checkpoint-30", data.val_jsonl, 0.65)
    first = headline(evaluations_of(run), data.val_jsonl)
    assert first is not None
    assert (first.f1, first.precision, first.recall, first.ap) == (0.65, 0.25, 0.75, 0.125)
    assert first.link(path / "report.html") == "evaluations/f/report.html"
