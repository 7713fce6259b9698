"""What a watched run folder is taken for, and what of it is shown where."""

import json
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from learner.analysis import watched
from learner.analysis.watch import Sparkline, View
from learner.analysis.watched import Tail, Watched
from learner.cli import app
from learner.runs.run_folder import RESOLVED, RunFolder, identity_of_this_process, is_alive
from shared_contracts.errors import ContractError, RunError
from tests.unit.watched_runs import SERVER, WrittenRun

# No process has it: the kernel's own limit is 2^22.
NO_PID = 2**22 + 1


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    return WrittenRun(tmp_path / "run")


def looked_at(run: WrittenRun) -> Watched:
    watched = Watched(RunFolder.open(run.folder))
    watched.look()
    return watched


def shown(run: WrittenRun, width: int = 100, height: int | None = None) -> str:
    return "\n".join(frame(looked_at(run), width, height))


def frame(
    run: Watched, width: int, height: int | None = None, encoding: str = "utf-8"
) -> list[str]:
    """Lines as a terminal of this size shows them."""
    file = TextIOWrapper(BytesIO(), encoding)
    console = Console(file=file, width=width, height=height, legacy_windows=False)
    options = console.options.update(height=height)
    lines = console.render_lines(View(run), options, pad=False)
    return ["".join(segment.text for segment in line) for line in lines]


# --- the tail of a log


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_tail_gives_every_whole_line_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = Tail(log)
    assert tail.read().lines == []
    append(log, '{"a": 1}\n{"a": 2}\n{"a"')
    assert [tail.read().lines, tail.read().lines] == [[{"a": 1}, {"a": 2}], []]
    append(log, ": 3}\n")
    new = tail.read()
    assert (new.lines, new.anew) == ([{"a": 3}], False)


@pytest.mark.req("RUN-01")
def test_a_tail_notices_a_log_that_was_cut_back_even_if_it_is_longer_by_now(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = [f'{{"step": {n}, "took": 0.5}}\n' for n in range(100)]
    log.write_text("".join(lines))
    tail = Tail(log)
    tail.read()
    os.truncate(log, len("".join(lines[:40])))
    new = tail.read()
    assert (len(new.lines), new.anew) == (40, True)
    os.truncate(log, len("".join(lines[:10])))
    append(log, "".join(line.replace("0.5", "0.7") for line in lines[10:90]))
    new = tail.read()
    assert (len(new.lines), new.anew) == (90, True)
    log.unlink()
    assert tail.read().anew
    assert not tail.read().anew
    log.write_text(lines[0])
    assert tail.read().lines == [{"step": 0, "took": 0.5}]


def test_of_a_long_log_only_the_end_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "PIECE", 1000)
    log = tmp_path / "log"
    log.write_text("".join(f'{{"step": {n:05}}}\n'.replace(" 0", " 1") for n in range(10_000)))
    tail = Tail(log)
    read = tail.read().lines
    assert 40 < len(read) < 70
    assert read[-1] == {"step": 19999}
    append(log, '{"step": 7}\n')
    assert tail.read().lines == [{"step": 7}]


@pytest.mark.parametrize("piece", [1, 7, 100, 10_000])
def test_a_long_log_that_is_read_whole_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(watched, "PIECE", piece)
    log = tmp_path / "log"
    log.write_text("".join(f'{{"step": {n}}}\n' for n in range(100)) + '{"st')
    tail = Tail(log, whole=True)
    reads = [tail.read()]
    while reads[-1].more:
        reads.append(tail.read())
    assert [line["step"] for read in reads for line in read.lines] == list(range(100))
    assert [read.anew for read in reads] == [True] + [False] * (len(reads) - 1)
    assert (len(reads) > 1) == (piece < 10_000)
    append(log, 'ep": 100}\n')
    assert tail.read().lines == [{"step": 100}]


def test_lines_that_are_no_objects_are_counted_and_passed_over(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b'{"a": 1}\n\x00\x00\xff\n[1]\n{"a": 2}\n')
    new = Tail(log).read()
    assert (new.lines, new.unreadable) == ([{"a": 1}, {"a": 2}], 2)


# --- what a run is taken for


def test_a_run_before_its_first_step_is_starting(run: WrittenRun) -> None:
    watched = looked_at(run)
    assert (watched.state, watched.step, watched.total) == ("starting", 0, 200)
    assert "before its first step" in shown(run)


def test_steps_are_read_as_they_come(run: WrittenRun) -> None:
    watched = looked_at(run)
    for step in (1, 2, 3):
        run.steps(1)
        assert [line["step"] for line in watched.look()] == [step]
        assert (watched.state, watched.step) == ("running", step)
    assert watched.seconds_per_step == pytest.approx(4 / 3)
    assert watched.seconds_left == pytest.approx(197 * 4 / 3)


def test_the_length_of_a_run_of_epochs_follows_from_its_first_step(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run", max_steps=None, num_train_epochs=2.5)
    assert looked_at(run).total is None
    run.steps(3)
    assert looked_at(run).total == 250


def test_a_run_that_wrote_its_summary_has_finished_until_it_goes_on(run: WrittenRun) -> None:
    run.steps(4)
    size = (run.folder / "metrics.jsonl").stat().st_size
    run.metrics(train_runtime=90.0, train_loss=1.0)
    watched = looked_at(run)
    assert watched.state == "finished"
    assert "took 1m30s" in shown(run)
    os.truncate(run.folder / "metrics.jsonl", size)
    run.steps(1)
    watched.look()
    assert (watched.state, watched.step) == ("running", 5)


@pytest.mark.req("RUN-01")
def test_the_time_of_a_run_that_went_on_is_that_of_its_last_process(run: WrittenRun) -> None:
    run.facts(started_at_step=3, process=identity_of_this_process())
    run.steps(4)
    run.metrics(train_runtime=90.0)
    assert "took 1m30s since step 3" in shown(run)
    ended = command(str(run.folder)).output.splitlines()[-1]
    assert ended == "step 4 training has ended after 1m30s, counted from step 3"


@pytest.mark.req("RUN-01")
def test_logs_that_are_cut_back_are_read_anew(run: WrittenRun) -> None:
    run.steps(10)
    watched = looked_at(run)
    sizes = {path: path.stat().st_size for path in run.folder.glob("*.jsonl")}
    run.steps(10)
    watched.look()
    assert (watched.step, watched.servers[SERVER].calls) == (20, 10)
    for path, size in sizes.items():
        os.truncate(path, size)
    run.facts(started_at_step=10, process=identity_of_this_process())
    watched.look()
    assert (watched.step, watched.servers[SERVER].calls) == (10, 5)
    assert [line["step"] for line in watched.steps] == list(range(1, 11))


def test_a_process_that_is_gone_is_told_and_so_is_a_folder(run: WrittenRun) -> None:
    run.steps(3)
    run.facts(process={**identity_of_this_process(), "pid": NO_PID})
    watched = looked_at(run)
    assert watched.state == "gone"
    assert "process gone" in shown(run)
    assert re.search(r"no step for \d{1,2}s", shown(run))
    shutil.rmtree(run.folder)
    watched.look()
    assert str(watched.state) == "removed"


def test_whether_a_process_lives_is_known_only_where_it_can_be_seen() -> None:
    identity = identity_of_this_process()
    assert is_alive(identity) is True
    other = {**identity, "start_ticks": identity["start_ticks"] - 1}
    assert is_alive(other) is False, "its pid was given on"
    assert is_alive({**identity, "host": "elsewhere"}) is None
    assert is_alive({**identity, "pid_namespace": "pid:[1]"}) is None
    assert is_alive({**identity, "boot_id": "of another machine"}) is None
    dead = {**identity, "pid": NO_PID}
    assert is_alive(dead) is False
    del dead["boot_id"]
    assert is_alive(dead) is False, "an earlier run"


def test_a_folder_without_the_mark_of_a_process_is_just_running(run: WrittenRun) -> None:
    run.facts()
    run.steps(2)
    os.utime(run.folder / "metrics.jsonl", (0, 0))
    assert looked_at(run).state == "running"
    assert "no step for" in shown(run, width=140)


def test_servers_and_what_happened_to_them_are_those_of_all_processes(run: WrittenRun) -> None:
    run.steps(2)
    failed = {"server": SERVER, "count": 8, "attempt": 1, "outcome": "503: replica 0 is dead"}
    run.calls(rank=1, pushes=[], calls=[failed], lost=[[SERVER, "connection refused"]])
    watched = looked_at(run)
    server = watched.servers[SERVER]
    assert (server.state, server.calls, server.failed, server.requests) == ("lost", 2, 1, 8)
    assert [event.what for event in watched.events] == [
        f"lost {SERVER}: connection refused",
        f"{SERVER}, attempt 1: 503: replica 0 is dead",
    ]
    run.calls(rank=1)
    watched.look()
    assert watched.servers[SERVER].state == "serving"


def test_calls_are_counted_from_the_first_one_on(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "PIECE", 1000)
    run.steps(200)
    server = looked_at(run).servers[SERVER]
    assert (server.calls, server.requests, server.pushes) == (100, 800, 100)


def lost_in_an_evaluation(run: WrittenRun, why: str) -> None:
    """As a line of an evaluation is: without a step."""
    line = {"evaluation_seed": 7, "servers": [], "lost": [[SERVER, why]], "calls": []}
    append(run.folder / "rollout_calls.jsonl", json.dumps(line) + "\n")


def test_events_of_evaluations_have_their_place_among_those_of_steps(run: WrittenRun) -> None:
    run.steps(2, loss=None)
    lost_in_an_evaluation(run, "the first time")
    run.steps(2, loss=None)
    lost_in_an_evaluation(run, "the second time")
    watched = looked_at(run)
    nan, first, second = (
        "the loss is no finite number",
        f"lost {SERVER}: the first time",
        f"lost {SERVER}: the second time",
    )
    expected = [(1, nan), (2, nan), (None, first), (3, nan), (4, nan), (None, second)]
    assert [(event.at, event.what) for event in watched.events] == expected
    assert [event.number for event in watched.events] == [1, 2, 3, 4, 5, 6]
    lost_in_an_evaluation(run, "the third time")
    run.calls(rank=1, lost=[[SERVER, "by another process"]], step=1)
    watched.look()
    newest = [event.what.partition(": ")[2] for event in watched.events if event.number > 6]
    assert sorted(newest) == ["by another process", "the third time"]
    assert [event.number for event in watched.events] == list(range(1, 9))


def test_events_that_a_log_that_was_cut_back_still_has_are_not_new(run: WrittenRun) -> None:
    run.steps(4, loss=None)
    watched = looked_at(run)
    metrics = run.folder / "metrics.jsonl"
    os.truncate(metrics, len(b"".join(metrics.read_bytes().splitlines(keepends=True)[:2])))
    run.step = 2
    run.steps(2, loss=None)
    watched.look()
    assert [(event.at, event.number) for event in watched.events] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
    ]
    run.steps(1, loss=None)
    watched.look()
    assert watched.events[-1].number == 5


def test_events_are_numbered_on_when_the_first_ones_are_forgotten(run: WrittenRun) -> None:
    run.steps(700, loss=None)
    watched = looked_at(run)
    run.steps(1, loss=None)
    watched.look()
    numbers = [event.number for event in watched.events]
    assert numbers == list(range(102, 702))


def test_lines_that_are_no_json_are_told(run: WrittenRun) -> None:
    run.steps(3)
    append(run.folder / "metrics.jsonl", "\0\0\n")
    assert "3 1 lines of metrics.jsonl are no JSON" in shown(run)


def test_what_stands_out_of_a_step_is_an_event(run: WrittenRun) -> None:
    run.steps(1, **{"rollout/repeat_terminate_triggered_sequences": 3.0})
    run.steps(1, loss=None)
    said = shown(run)
    assert "1 3 answers repeated themselves and were ended" in said
    assert "2 the loss is no finite number" in said
    assert "nan" in said


def test_scores_drop_reasons_checkpoints_and_versions_are_shown(run: WrittenRun) -> None:
    run.steps(20)
    run.metrics(**{"eval/f1": 0.5, "eval/precision": 0.75, "eval/recall": 0.375})
    run.steps(2)
    (run.folder / "checkpoint-20").mkdir()
    said = shown(run, width=140)
    assert "dropped: missing_desc 22" in said
    assert "wrong_arity" not in said
    assert "checkpoint-20" in said
    assert "weights 22" in said
    assert "     20     0.500     0.750     0.375" in said
    assert "B_coord/bbox_ciou" in said
    assert f"{SERVER}  serving       0       88       22  0.25 s" in said


def test_names_of_a_run_do_not_steer_the_terminal(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run", run_name="\x1b[31mred\n[bold]")
    said = shown(run)
    assert "\x1b" not in said
    assert r"\x1b[31mred\n[bold]" in said.splitlines()[0]


# --- what fits


@settings(max_examples=150)
@given(st.integers(1, 260), st.integers(1, 80), st.booleans())
def test_a_frame_never_is_larger_than_the_terminal(
    rich_run: Watched, width: int, height: int, ascii_only: bool
) -> None:
    lines = frame(rich_run, width, height, "ascii" if ascii_only else "utf-8")
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    if ascii_only:
        assert all(line.isascii() for line in lines)


@pytest.fixture(scope="module")
def rich_run(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """A run with something in every section."""
    run = WrittenRun(tmp_path_factory.mktemp("watched") / "run", run_name="a run " * 9)
    for _ in range(4):
        run.steps(20)
        run.metrics(**{"eval/f1": 0.5, "eval/precision": 0.75, "eval/recall": 0.375})
    run.calls(lost=[[SERVER, "connection refused"]], sync_fallback="no adapter here")
    return looked_at(run)


@pytest.mark.parametrize(
    ("width", "height", "there", "not_there"),
    [
        (200, 50, ["B_coord/bbox_ciou", "learn, A", "connection refused", "whole push"], []),
        (80, 24, ["loss, A", "step, B", "full weights are", "ETA"], ["verify"]),
        (40, 12, ["loss, A", "loss, B"], ["learn, A"]),
        (20, 6, ["step 80/200", "loss, A"], ["connection"]),
    ],
)
def test_a_small_terminal_has_what_matters_most(
    rich_run: Watched, width: int, height: int, there: list[str], not_there: list[str]
) -> None:
    said = "\n".join(frame(rich_run, width, height))
    assert [word for word in there if word not in said] == []
    assert [word for word in not_there if word in said] == []


def test_sparklines_are_between_their_extremes_and_as_long_as_there_is_room() -> None:
    assert Sparkline([0, 1, 2, 3, 4, 5, 6, 7]).bars(8) == "▁▂▃▄▅▆▇█"
    assert Sparkline([0, 0, 7, 7]).bars(2) == "▁█"
    assert Sparkline([1, None, math.inf, 3]).bars(9) == "▁  █"
    assert Sparkline([5, 5]).bars(9, ascii_only=True) == "__"
    assert Sparkline([]).bars(9) == Sparkline([1]).bars(0) == ""


# --- the command, without a terminal


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["watch", *arguments], env={"COLUMNS": None})


def test_once_prints_one_frame(run: WrittenRun) -> None:
    run.steps(6)
    result = command(str(run.folder), "--once")
    assert result.exit_code == 0
    assert "step 6/200" in result.output
    assert "loss, B" in result.output
    assert max(map(len, result.output.splitlines())) == 100


def test_without_a_terminal_there_are_plain_lines_until_the_run_has_finished(
    run: WrittenRun,
) -> None:
    run.steps(3)
    run.metrics(train_runtime=61.0)
    result = command(str(run.folder))
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        f"shapes: {run.folder}",
        "step 3 training has ended after 1m01s",
    ]


def test_a_run_whose_process_is_gone_ends_the_view_with_an_error(run: WrittenRun) -> None:
    run.steps(3)
    run.facts(process={**identity_of_this_process(), "pid": NO_PID})
    result = command(str(run.folder))
    assert isinstance(result.exception, RunError)
    assert f"process {NO_PID} on" in str(result.exception)
    assert "at step 3" in str(result.exception)
    assert "step 3/200 channel A loss 3.3333" in result.output


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photo.png").touch()
    for path in (tmp_path, tmp_path / "photo.png"):
        result = command(str(path))
        assert isinstance(result.exception, ContractError)
        assert "is no run folder" in result.exception.found


def test_a_run_that_does_not_start_in_time_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        result = command(str(path), "--wait", "0.1")
        assert result.output.startswith(f"waiting for {path} to start (at most ")
        assert isinstance(result.exception, ContractError)
        assert result.exception.where == str(path)
        assert "no run has started there" in result.exception.found
        assert isinstance(command(str(path), "--once").exception, ContractError)


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "half of it"])
def test_a_run_that_starts_is_waited_for(tmp_path: Path, there: str) -> None:
    folder, other = tmp_path / "run", WrittenRun(tmp_path / "other")
    if there != "nothing":
        folder.mkdir()
    if there == "half of it":
        (folder / "logs").mkdir()
        (folder / RESOLVED).write_bytes((other.folder / RESOLVED).read_bytes())
    other.steps(2)
    other.metrics(train_runtime=61.0)

    def start() -> None:
        folder.mkdir(exist_ok=True)
        for name in ("metrics.jsonl", RESOLVED, "run.json"):
            (folder / name).write_bytes((other.folder / name).read_bytes())

    with soon(start):
        result = command(str(folder), "--wait", "60")
    assert result.exit_code == 0, result.exception
    assert result.output.splitlines() == [
        f"waiting for {folder} to start (at most 1m00s)",
        f"{folder} has started",
        f"shapes: {folder}",
        "step 2 training has ended after 1m01s",
    ]


@contextmanager
def soon(work: Callable[[], None]) -> Iterator[None]:
    """Done in a thread, while the block waits for it."""
    timer = threading.Timer(1.5, work)
    timer.start()
    yield
    timer.join()


def test_lines_tell_that_the_first_step_is_waited_for(run: WrittenRun) -> None:
    with soon(lambda: run.metrics(train_runtime=61.0)):
        result = command(str(run.folder))
    assert result.output.splitlines() == [
        f"shapes: {run.folder}",
        "waiting for the first step",
        "step 0 training has ended after 1m01s",
    ]


@pytest.mark.req("RUN-01")
def test_a_run_that_goes_on_is_told_with_its_step(run: WrittenRun) -> None:
    run.steps(10)
    seen = looked_at(run)
    log = run.folder / "metrics.jsonl"
    os.truncate(log, len(b"".join(log.read_bytes().splitlines(keepends=True)[:4])))
    run.facts(started_at_step=4, process={**identity_of_this_process(), "pid": 1})
    seen.look()
    assert [(event.at, event.what) for event in seen.events] == [(4, "resumed at step 4")]
    run.facts(started_at_step=0, process=identity_of_this_process(), again=True)
    os.utime(run.folder / "run.json", (1, 1))
    seen.look()
    assert [event.what for event in seen.events][-1] == "started again from the beginning"


def test_what_is_in_the_folder_is_not_written_to(run: WrittenRun) -> None:
    run.steps(3)
    before = {path: path.read_bytes() for path in run.folder.iterdir()}
    for _ in range(2):
        command(str(run.folder), "--once")
    assert {path: path.read_bytes() for path in run.folder.iterdir()} == before
    assert json.loads((run.folder / "run.json").read_text())["started_at_step"] == 0
