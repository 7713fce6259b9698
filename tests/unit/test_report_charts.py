"""Series are made short without a lie; seconds are added only where they follow each other."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly.graph_objects import Figure

from learner.analysis.report.charts import (
    MOST_POINTS,
    Bars,
    Chart,
    bar_chart,
    curve,
    curves,
    hidden,
    histogram,
    phase_rows,
    present,
    push_charts,
    quantile,
    running_mean,
    seconds,
    server_rows,
    step_chart,
    thinned,
)
from learner.analysis.report.run_view import Point, RunView
from tests.unit.report_folder import SERVER, MadeRun, call_line, step_line

VALUES = st.one_of(st.none(), st.floats(-1e6, 1e6))


def test_a_short_series_is_drawn_as_it_is() -> None:
    points: list[Point] = [(1, 3.0), (2, None), (3, 1.0)]
    assert thinned(points, most=3) == points


@given(st.lists(VALUES, min_size=50, max_size=400))
def test_a_long_series_keeps_its_extremes_its_order_and_a_gap(values: list[float | None]) -> None:
    points = list(enumerate(values, start=1))
    short = thinned(points, most=40)
    known = [value for value in values if value is not None]
    kept = [value for _, value in short if value is not None]
    assert len(short) <= 60  # lowest, highest and a gap of each of 20 stretches
    assert [x for x, _ in short] == sorted({x for x, _ in short})
    assert set(short) <= set(points)
    assert (min(kept), max(kept)) == (min(known), max(known)) if known else not kept
    assert (None in values) == any(value is None for _, value in short)


def test_a_single_spike_among_thousands_of_steps_is_drawn_and_the_chart_says_so() -> None:
    points: list[Point] = [(step, 1.0) for step in range(1, 20_001)]
    points[12_345] = (12_346, 99.0)
    chart = curve("a", "A", "a", {"a": points}, smooth=False)
    assert chart is not None
    (trace,) = chart.figure["data"]
    assert (12_346, 99.0) in zip(trace["x"], trace["y"], strict=True)
    assert len(trace["x"]) <= 2 * MOST_POINTS
    assert any("lowest and the highest" in note for note in chart.notes)
    assert (chart.table[0].count, chart.table[0].highest) == (20_000, "99")


def test_the_running_mean_has_a_gap_where_the_series_has_one() -> None:
    points: list[Point] = [(1, 2.0), (2, None), (3, 4.0), (4, 6.0), (5, 0.0), (6, 10.0), (7, 5.0)]
    means = running_mean(points)
    assert means[:4] == [(1, 2.0), (2, None), (3, 3.0), (4, 4.0)]
    assert means[5] == (6, 5.0)  # of steps 2 to 6, without the gap
    assert means[6] == (7, 5.0)  # of steps 3 to 7


def bars(steps: Sequence[int]) -> Chart | None:
    return bar_chart("a", "A", ["s"], steps, [Bars("a", 1, [float(step) for step in steps])])


def test_bars_of_many_steps_are_means_and_say_so() -> None:
    few, many = bars([1, 2, 3]), bars(range(1, 1001))
    assert few is not None
    assert few.notes == []
    assert many is not None
    assert many.notes == ["Each bar is the mean of 3 steps."]
    (trace,) = many.figure["data"]
    assert (trace["x"][0], trace["y"][0]) == (2, 2.0)
    assert (trace["x"][-1], trace["y"][-1]) == (1000, 1000.0)
    assert bars([]) is None


@given(st.dictionaries(st.integers(0, 5000), st.integers(1, 9), min_size=1))
def test_a_histogram_counts_every_answer_once(counts: dict[int, int]) -> None:
    chart = histogram("a", "A", "tokens", counts, 1)
    assert chart is not None
    (trace,) = chart.figure["data"]
    assert sum(trace["y"]) == sum(counts.values())
    assert len(trace["customdata"]) == len(trace["y"]) <= 42


def test_a_histogram_of_nothing_is_none_and_quartiles_are_those_of_the_answers() -> None:
    assert histogram("a", "A", "tokens", {}, 1) is None
    counts = {1: 1, 2: 2, 10: 1}
    assert [quantile(counts, share) for share in (0.25, 0.5, 0.75, 1.0)] == [1, 2, 2, 10]


@pytest.mark.req("REPORT-01")
def test_the_phases_of_a_step_that_follow_each_other_are_the_whole_step(tmp_path: Path) -> None:
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


def test_what_was_hidden_behind_learning_is_told_and_not_added_to_the_step(tmp_path: Path) -> None:
    line = step_line(1)  # 0.6 + 0.1 + 0.01 s of making packs, of which 0.4 s were waited for
    assert hidden(line) == pytest.approx(0.31)
    assert seconds(line, "other") == pytest.approx(0.1)
    chart = step_chart(RunView.of(MadeRun(tmp_path, [line]).write()))
    assert chart is not None
    assert "Hidden behind learning: 0.3000 of 0.7000 s (44%)." in chart.notes
    rows = phase_rows(RunView.of(MadeRun(tmp_path, [line]).write()))
    assert [len(part) for part in rows.values()] == [4, 3]


def test_pushes_are_drawn_by_server_and_by_clock(tmp_path: Path) -> None:
    other = "http://server-2:8000"
    calls = [call_line(2), call_line(4), call_line(4, other, lost=[[SERVER, "no answer"]])]
    calls[1]["calls"].append({**calls[1]["calls"][0], "outcome": "timed out"})
    run = RunView.of(MadeRun(tmp_path, [step_line(2)], calls).write())
    charts = push_charts(run)
    assert [chart.title for chart in charts] == [f"Pushes to {SERVER}", f"Pushes to {other}"]
    traces = charts[0].figure["data"]
    rows = {trace["name"]: trace["yaxis"] for trace in traces}
    assert {name for name, row in rows.items() if row == "y1"} == {"start", "send", "finish"}
    assert {name for name, row in rows.items() if row == "y2"} >= {"pause", "transfer", "load"}
    assert traces[0]["customdata"] == ["step 2, version 2", "step 4, version 4"]
    first, second = server_rows(run)
    assert first.items() >= {"server": SERVER, "pushes": 2, "calls answered": 2}.items()
    assert first.items() >= {"failed": 1, "requests answered": 16, "times lost": 1}.items()
    assert first["payload"] == "7 MB"
    assert (second["pushes"], second["times lost"]) == (1, 0)


@pytest.mark.req("REPORT-01")
def test_a_run_of_two_channels_has_a_curve_for_each_thing(tmp_path: Path) -> None:
    lines = [step_line(step, "AB"[step % 2]) for step in range(1, 60)]
    lines.append({"step": 59, "eval/f1": 0.5, "eval/precision": 0.5, "eval/recall": 0.5})
    drawn = {chart.slug: chart for chart in curves(RunView.of(MadeRun(tmp_path, lines).write()))}
    assert set(drawn) >= {
        "loss",
        "loss-a",
        "loss-b",
        "scores",
        "match-rate",
        "parse-rates",
        "lengths",
        "learning-rate",
        "grad-norm",
    }
    assert [row.name for row in drawn["loss"].table] == ["channel A", "channel B"]
    assert drawn["loss-b"].rows == 1
    limit = next(row for row in drawn["lengths"].table if row.name == "max_new_tokens")
    assert limit.highest == "16"


@pytest.mark.req("REPORT-01", "LOGP-01")
def test_the_mismatch_of_engine_and_trainer_has_curves_where_it_is_logged(tmp_path: Path) -> None:
    def drawn(lines: list[dict[str, Any]]) -> dict[str, list[str]]:
        charts = curves(RunView.of(MadeRun(tmp_path, lines).write()))
        own = (chart for chart in charts if chart.slug.startswith("mismatch"))
        return {chart.slug: [row.name for row in chart.table] for chart in own}

    keys = [
        f"mismatch/{kind}_{end}" for kind in ("all", "false_positive") for end in ("mean", "p99")
    ]
    values: dict[str, Any] = dict.fromkeys(["mismatch/tokens", *keys], 0.5)
    assert drawn([step_line(1), step_line(2)]) == {}
    assert drawn([step_line(1) | values, step_line(2, "A")]) == {
        "mismatch-mean": ["all", "false positive"],
        "mismatch-p99": ["all", "false positive"],
    }


def test_a_loss_that_was_no_number_is_a_gap_and_forbids_no_axis(tmp_path: Path) -> None:
    lines = [step_line(1), step_line(2, loss=None, grad_norm=None), step_line(3)]
    drawn = {chart.slug: chart for chart in curves(RunView.of(MadeRun(tmp_path, lines).write()))}
    (trace,) = drawn["loss"].figure["data"]
    assert trace["y"] == [6.0, None, 2.0]


def test_parts_of_very_different_sizes_share_a_logarithmic_axis(tmp_path: Path) -> None:
    lines = [step_line(step, loss__B_coord__coord_w1=1e-3) for step in range(1, 5)]

    def axis() -> dict[str, Any]:
        charts = curves(RunView.of(MadeRun(tmp_path, lines).write()))
        (found,) = (chart for chart in charts if chart.slug == "loss-b")
        shown: dict[str, Any] = found.figure["layout"]["yaxis1"]
        return shown

    assert axis()["type"] == "log"
    lines[0]["loss/B_coord/coord_w1"] = 0.0  # which such an axis does not have
    assert "type" not in axis()


def test_every_chart_is_a_figure_that_plotly_knows(tmp_path: Path) -> None:
    lines = [step_line(step, "AB"[step % 2]) for step in range(1, 60)]
    run = RunView.of(MadeRun(tmp_path, lines, [call_line(2), call_line(4)]).write())
    lengths = present(histogram("a", "A", "tokens", {1: 2, 3: 4}, 1))
    charts = [*curves(run), *present(step_chart(run)), *push_charts(run), *lengths]
    assert len(charts) > 10
    for chart in charts:
        text = re.sub(r"var\(--[a-z0-9-]+\)|transparent", "black", json.dumps(chart.figure))
        figure = json.loads(text)
        Figure(figure["data"], figure["layout"])  # raises ValueError for a name it does not have
