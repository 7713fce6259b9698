"""The page of a run: its answers, plots, findings and headline; text of answers is inert."""

import html
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from learner.analysis.report.answers import (
    MOST,
    Finding,
    Tally,
    faults_of,
    findings,
    read_answers,
    unread_answers,
)
from learner.analysis.report.page import Tile
from learner.analysis.report.run_page import plots, renew, reported, thinned, write_report
from learner.analysis.report.run_view import RunView, evaluations_of, headline, tiles
from learner.commands.run import report as report_command
from learner.runs.rollout_log import LoggedAnswer, StepAnswer
from shared_contracts.errors import ContractError, RunError
from tests.unit.report_folder import B, MadeRun, answer, step_line
from tests.unit.test_learner_cli import command

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
        (answer(invalid=True), "no start of the format"),
        (answer(repeat_terminated=True), "ended by the repeat guard"),
        (answer(dropped=[("object_2", "bbox_invalid")]), "dropped objects"),
        (answer(truths=[CAT, ("owl", FAR)]), "missed objects"),
        (answer(predicted=[CAT, ("owl", FAR)]), "false positives"),
        (answer(predicted=[("dog", CAT[1])]), "wrong description"),
        (answer(supervised=False), "not trained on"),
    ],
)
def test_faults_of_an_answer_are_named(made: StepAnswer, fault: str) -> None:
    assert faults_of(answer()) == []
    assert faults_of(made) == [fault]
    alone = LoggedAnswer(**made.model_dump(exclude={"step", "rank", "chunk", "segment"}))
    expected = [] if fault == "not trained on" else [fault]
    assert faults_of(alone) == expected, "an evaluation trains on nothing"


def test_answers_that_were_not_read_are_counted_by_their_reasons() -> None:
    fenced, other = answer(fault="fenced", invalid=True), answer(invalid=True)
    read = unread_answers([answer(), fenced, other, *[answer(fault="text_behind")] * 2])
    assert [(each.name, each.count, each.share) for each in read] == [
        ("fenced", 1, "20.00%"),
        ("text_behind", 2, "40.00%"),
        ("invalid_rollout", 1, "20.00%"),
    ]
    assert faults_of(answer(fault="fenced")) == ["not read, or only in part"]


@pytest.mark.req("REPORT-01")
def test_each_step_of_a_run_shows_its_worst_answers_and_some_others(tmp_path: Path) -> None:
    answers: list[StepAnswer] = []
    for step in range(1, 31):
        worst = [missing(9 if step <= 10 else 1, f"worst:{step}-{n}", step) for n in range(4)]
        answers += [*worst, *good(40, step)]
    run = MadeRun(tmp_path, answers=answers).write()
    tally, shown = read_answers(run)
    assert tally.answers == len(answers)
    assert len({id(each) for each in shown}) == len(shown) == 30 * (MOST // 30)
    assert shown[0].sample_id.startswith("/data/worst:")
    for step in range(1, 31):
        own = ["worst" in each.sample_id for each in shown if each.step == step]
        assert sorted(own) == [False] * 2 + [True] * 4
    tally, shown = read_answers(run, most_steps=3)
    assert (tally.answers, {each.step for each in shown}) == (3 * 44, {10, 20, 30})


@pytest.mark.req("REPORT-01")
def test_a_long_run_shows_its_worst_answer_and_good_ones(tmp_path: Path) -> None:
    answers: list[StepAnswer] = []
    for step in range(1, MOST + 1):
        answers += [missing(1 + (step == 150), f"worst:{step}-{n}", step) for n in range(2)]
        answers += good(2, step)
    _, shown = read_answers(MadeRun(tmp_path, answers=answers).write())
    assert len(shown) == MOST
    assert shown[0].step == 150
    assert 60 <= sum("worst" not in each.sample_id for each in shown) <= 70


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


@pytest.mark.req("REPORT-01", "LOGP-01")
def test_every_logged_metric_has_a_line_in_the_plot_of_its_group(tmp_path: Path) -> None:
    lines = [step_line(step, "AB"[step % 2]) for step in range(1, 60)]
    lines[1] |= {"loss": None}
    lines[2] |= dict.fromkeys(["mismatch/tokens", "mismatch/all_mean", "mismatch/all_p99"], 0.5)
    lines.append({"step": 59, "eval/f1": 0.5, "eval/precision": 0.5, "eval/recall": 0.5})
    drawn = {plot.slug: plot for plot in plots(RunView.of(MadeRun(tmp_path, lines).write()))}
    names = {slug: {line["name"] for line in plot.lines} for slug, plot in drawn.items()}
    assert names["training-loss"] == {"loss (A)", "loss (B)"}
    assert names["evaluation-1"] == {"eval/f1", "eval/precision", "eval/recall"}
    assert names["the-step-s"] >= {"time/push_s", "time/step_s (A)", "time/step_s (B)"}
    assert names["log-probabilities-of-engine-and-trainer-nats"] == {
        "mismatch/all_mean",
        "mismatch/all_p99",
    }
    assert f"{B}/strict_drop/bbox_invalid" not in set().union(*names.values()), "it is always 0"
    (loss_of_a,) = (line for line in drawn["training-loss"].lines if "A" in line["name"])
    assert None in loss_of_a["y"], "a loss that is no number is a gap"
    json.dumps([plot.lines for plot in drawn.values()], allow_nan=False)


def steps(count: int = 30, **more: Any) -> list[dict[str, Any]]:
    return [step_line(step, **more) for step in range(1, count + 1)]


def found(
    path: Path,
    lines: list[dict[str, Any]],
    answers: list[StepAnswer] | None = None,
    unreadable: int = 0,
    **run: Any,
) -> list[Finding]:
    error = run.pop("error", None)
    view = RunView.of(MadeRun(path, lines, **run).write(), error)
    tally = Tally()
    tally.add(answers or [])
    return findings(view, tally, unreadable)


def texts(found: list[Finding]) -> list[str]:
    return [f"{finding.weight} {finding.section}: {finding.text}" for finding in found]


def spoilt(step: int, **more: Any) -> list[dict[str, Any]]:
    lines = steps()
    lines[step - 1] |= more
    return lines


@pytest.mark.req("REPORT-01")
@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (
            spoilt(7, loss=None),
            "bad curves: The loss was not a finite number in 1 step (first: step 7)",
        ),
        (spoilt(3, **{"rollout/servers_lost": 2.0}), "bad curves: Servers were lost 2 times"),
        (
            steps(rollout__parse_truncated_rate=0.12),
            "look gallery: 12.0% of the answers were truncated",
        ),
        (
            spoilt(4, **{f"{B}/prose_before": 12.0}),
            "look gallery: 12 answers with prose_before (10.00%): "
            "other text before the first bracket",
        ),
    ],
)
def test_each_fault_has_a_finding(lines: list[dict[str, Any]], text: str, tmp_path: Path) -> None:
    found_here = found(tmp_path, lines)
    assert text in texts(found_here)
    weights = [finding.weight for finding in found_here]
    assert weights == sorted(weights)
    assert found(tmp_path / "good", steps(), [answer()] * 50) == []
    calls = [{"step": 2, "sync_fallback": "it failed"}]
    assert texts(found(tmp_path / "full", steps(), calls=calls)) == [
        "bad curves: Full weights replaced the adapter: it failed"
    ]


def view(path: Path, lines: list[dict[str, Any]], error: str | None = None, **run: Any) -> RunView:
    return RunView.of(MadeRun(path, lines, **run).write(), error)


@pytest.mark.req("REPORT-01")
def test_run_without_an_evaluation_links_to_the_way_to_get_one(tmp_path: Path) -> None:
    run = view(tmp_path, steps())
    found = evaluations_of(run)
    first = tiles(run, headline(found, run.config.data.val_jsonl), "#evaluations")[0]
    assert first == Tile(
        "Held-out F1", "none yet", "this run has no evaluation; how to get one", "#evaluations"
    )


def evaluated(run: RunView, name: str, checkpoint: Path, data: Path, f1: float = 0.5) -> None:
    """Write what `learner eval` writes into the folder of a run."""
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
    assert [(each.step, each.scores["f1"], each.held_out) for each in found] == [
        (0, 0.1, True),
        (10, 0.9, True),
        (20, 0.6, True),
        (30, 1.0, False),
    ]
    assert headline(found, data.val_jsonl) is found[2]
    evaluated(run, "f", path / "checkpoint-30", data.val_jsonl, 0.65)
    first = headline(evaluations_of(run), data.val_jsonl)
    assert first is not None
    assert first.scores == {"f1": 0.65, "precision": 0.25, "recall": 0.75, "ap": 0.125}
    assert first.link(path / "report.html") == "evaluations/f/report.html"


EVIL = '</script><script>alert("x")</script><img src=x onerror=alert(1)> & \'"'


def made(path: Path) -> MadeRun:
    """Both channels, answers, an evaluation, an end."""
    lines = [step_line(step, "AB"[step % 2]) for step in range(1, 21)]
    lines.append({"step": 20, "eval/f1": 0.5, "eval/precision": 0.5, "eval/recall": 0.5})
    lines.append({"step": 20, "train_runtime": 60.0})
    answers = [answer(f"train.jsonl:{step}", step) for step in range(1, 20, 2)]
    return MadeRun(path, lines, answers=answers)


def report(run: MadeRun) -> str:
    return write_report(run.write()).read_text(encoding="utf-8")


@pytest.mark.req("REPORT-01")
def test_text_of_answers_is_never_markup(tmp_path: Path) -> None:
    """tests/integration/test_report_page.py has a browser look at such a page."""
    run = made(tmp_path)
    run.answers = [
        answer(
            f"日本_{EVIL[:60]}.jsonl:1".replace("/", "_"),
            truths=[(EVIL, (1, 2, 3, 4)), ("ловушка", (5, 6, 7, 8))],
            predicted=[(EVIL, (1, 2, 3, 4))],
            dropped=[(EVIL, "key_invalid")],
            text=EVIL,
        )
    ]
    run.facts = {"rollouts": EVIL, "versions": {EVIL: EVIL}}
    run.sections = {"training": {"run_name": EVIL}}
    plain, page = report(made(tmp_path / "plain")), report(run)
    assert page.count("<script") == plain.count("<script")
    assert page.count("<img") == plain.count("<img")
    assert EVIL in html.unescape(page)
    assert "content=\"default-src 'none'; script-src 'sha256-" in html.unescape(page)


B_RATIO_0 = {"stage2_ab": {"schedule": {"b_ratio": 0.0}}}


@pytest.mark.req("REPORT-01")
@pytest.mark.parametrize(
    ("run", "text"),
    [
        (MadeRun(Path(), [step_line(1, "A")], sections=B_RATIO_0), "No answers are logged"),
        (MadeRun(Path()), "No step is logged yet."),
        (MadeRun(Path()), "resolved_config.yaml --checkpoint CHECKPOINT --data FILE"),
        (replace(made(Path()), answers=[]), "No answers are logged"),
        (MadeRun(Path(), [step_line(1), step_line(2)]), "Not finished: step 2 of 3. The last line"),
        (made(Path()), "Finished: 20 steps in 1m00s."),
    ],
    ids=["channel A", "nothing", "no evaluation", "no answers", "going on", "over"],
)
def test_every_kind_of_run_has_a_report(run: MadeRun, text: str, tmp_path: Path) -> None:
    assert text in report(replace(run, path=tmp_path))


@pytest.mark.req("REPORT-01")
def test_command_writes_the_page_without_importing_torch(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "new" / "other.html"
    made(run).write()
    done = command("learner.cli", "report", str(run), "--out", str(out))
    assert done.code == 0, done.stderr
    assert not done.heavy & {"torch", "transformers", "vllm"}
    assert out.is_file()


@pytest.mark.parametrize(
    ("run", "out", "found"),
    [
        ("no-such-run", None, "it has no run.json"),
        ("run", "run/run.json/page.html", "cannot be made"),
    ],
)
def test_bad_input_is_refused(run: str, out: str | None, found: str, tmp_path: Path) -> None:
    made(tmp_path / "run").write()
    with pytest.raises(ContractError, match=re.escape(found)):
        report_command(tmp_path / run, tmp_path / out if out else None)
    assert not list(tmp_path.rglob("*.html"))


def going_on(path: Path) -> Path:
    run = made(path)
    run.metrics = run.metrics[:7]
    run.sections = {"training": {"max_steps": 20}}
    return run.write().path


@pytest.mark.req("MET-03")
def test_failed_run_has_a_report_and_raises_its_own_error(tmp_path: Path) -> None:
    console = Console(record=True, width=300)
    renew(going_on(tmp_path), console)
    assert not (tmp_path / "report.html").exists(), "only the page of a finished run is renewed"
    assert f"run: learner report {tmp_path}" in console.export_text()
    with pytest.raises(RunError, match="no server is left"), reported(tmp_path, console):
        raise RunError("no server is left\nand more")
    assert not list(tmp_path.glob("*.part"))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Ended by an error at step 7 of 20." in text
    assert "The run was ended by an error: no server is left" in text
    assert "and more" not in text


@pytest.mark.parametrize("error", [None, RunError("no server is left")])
def test_failed_report_warns_and_fails_no_run(error: RunError | None, tmp_path: Path) -> None:
    console = Console(record=True, width=500)
    (going_on(tmp_path) / "rollouts" / "step_000002.jsonl").write_text('{"step": 2}\n')
    ends = pytest.raises(RunError, match="no server is left") if error else nullcontext()
    with ends, reported(tmp_path, console):
        if error is not None:
            raise error
    (line,) = console.export_text().splitlines()
    assert line.startswith("Warning: no report.html: ")
    assert line.endswith(f"try learner report {tmp_path}")
