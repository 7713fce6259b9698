"""The live view in a real terminal: it fits, follows, and gives the terminal back."""

import json
import os
import signal
from pathlib import Path

import pytest

from learner.runs.atomic_files import append_line
from tests.unit.watch_terminal import OTHER_SCREEN, SHOW_CURSOR, USUAL_SCREEN, Terminal, watching
from tests.unit.watched_runs import WrittenRun


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    return WrittenRun(tmp_path / "run")


def shows(*words: str) -> "Shows":
    return Shows(words)


class Shows:
    """All of the words are on the screen."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self._words = words

    def __call__(self, terminal: Terminal) -> bool:
        return all(word in terminal.last for word in self._words)


class Fits:
    """The newest frame is of this size, to the cell."""

    def __init__(self, width: int, height: int) -> None:
        self._width = width
        self._height = height

    def __call__(self, terminal: Terminal) -> bool:
        frame = terminal.frames[-1] if terminal.frames else []
        return len(frame) == self._height and {len(line) for line in frame} == {self._width}


def is_even(frame: list[str]) -> bool:
    """All lines are of one width."""
    return len(set(map(len, frame))) <= 1


def test_a_screen_follows_the_run_and_every_size_of_its_terminal(run: WrittenRun) -> None:
    with watching(run.folder, (200, 50)) as terminal:
        terminal.until(shows("before its first step"))
        run.steps(4)
        terminal.until(shows("step 4/200", "Seconds of a step", "http://127.0.0.1:8000"))
        for width, height in ((80, 24), (40, 12), (200, 50), (9, 3), (120, 30)):
            terminal.resize(width, height)
            terminal.until(Fits(width, height))
            run.steps(2)
            terminal.until(shows(f"step {run.step}/200"[:width]))
        frames = terminal.frames
        uneven = [frame for frame in frames[:-1] if not is_even(frame)]
        assert uneven == [], "no line wraps"
        run.metrics(train_runtime=75.0)
        assert terminal.exit_code() == 0
    screen, _, after = terminal.output.partition(USUAL_SCREEN)
    assert OTHER_SCREEN in screen
    assert "finished" in after
    assert "took 1m15s" in after, "the last frame stays"
    assert SHOW_CURSOR in terminal.output


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_frame_that_a_resize_interrupts_is_whole(run: WrittenRun, unbuffered: str) -> None:
    """The kernel ends a write at a signal, and says how much of it is left."""
    run.steps(30)
    with watching(run.folder, (100, 30), "--follow", PYTHONUNBUFFERED=unbuffered) as terminal:
        terminal.until(Fits(100, 30))
        for width in (90, 80, 70):
            terminal.resize(300, 80)
            terminal.until_it_waits()
            terminal.resize(width, 30)
            terminal.until(Fits(width, 30))
        assert [frame for frame in terminal.frames[:-1] if not is_even(frame)] == []


def test_a_run_that_goes_back_to_a_checkpoint_is_followed(run: WrittenRun) -> None:
    run.steps(10)
    with watching(run.folder, (100, 30)) as terminal:
        terminal.until(shows("step 10/200"))
        for path in run.folder.glob("*.jsonl"):
            lines = path.read_bytes().splitlines(keepends=True)
            os.truncate(path, len(b"".join(lines[: len(lines) * 6 // 10])))
        terminal.until(shows("step 6/200"))
        run.step = 6
        run.steps(5)
        terminal.until(shows("step 11/200"))
        run.metrics(train_runtime=75.0)
        assert terminal.exit_code() == 0


@pytest.mark.parametrize(
    ("end", "code"),
    [("ctrl-c", 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["ctrl-c", "term", "hang-up"],
)
def test_whoever_ends_it_gets_the_terminal_back(
    run: WrittenRun, end: str | signal.Signals, code: int
) -> None:
    with watching(run.folder, (80, 24), "--follow") as terminal:
        terminal.until(shows("before its first step"))
        if isinstance(end, str):
            terminal.type("\x03")
        else:
            terminal.signal(end)
        assert terminal.exit_code() == code
    assert "Traceback" not in terminal.output
    assert USUAL_SCREEN in terminal.output
    assert terminal.output.rindex(SHOW_CURSOR) > terminal.output.index(OTHER_SCREEN)


def test_a_folder_that_is_removed_ends_the_view(run: WrittenRun) -> None:
    run.steps(2)
    with watching(run.folder, (80, 24)) as terminal:
        terminal.until(shows("step 2/200"))
        run.folder.rename(run.folder.with_name("elsewhere"))
        assert terminal.exit_code() == 1
    assert "is no run folder any more" in terminal.output
    assert "Traceback" not in terminal.output


def test_a_terminal_without_a_cursor_gets_lines(run: WrittenRun) -> None:
    run.steps(2)
    with watching(run.folder, (80, 24), TERM="dumb") as terminal:
        terminal.until(lambda terminal: "step 2/200" in terminal.output)
        run.steps(2)
        run.metrics(**{"eval/f1": 0.5, "eval/precision": 0.75, "eval/recall": 0.375})
        run.metrics(train_runtime=75.0)
        assert terminal.exit_code() == 0
    assert "\x1b" not in terminal.output
    lines = terminal.output.splitlines()
    assert [line.split(" loss")[0] for line in lines[1:4]] == [
        "step 2/200 channel B",
        "step 3/200 channel A",
        "step 4/200 channel B",
    ]
    assert lines[4:] == [
        "step 4 evaluation f1 0.500 precision 0.750 recall 0.375",
        "step 4 training has ended after 1m15s",
    ]


def test_lines_tell_every_event_once(run: WrittenRun) -> None:
    run.steps(2, loss=None)
    with watching(run.folder, (80, 24), TERM="dumb") as terminal:
        terminal.until(lambda terminal: "step 2: the loss" in terminal.output)
        line = {"evaluation_seed": 7, "lost": [["http://a", "connection refused"]]}
        append_line(run.folder / "rollout_calls.jsonl", json.dumps(line))
        terminal.until(lambda terminal: "evaluation: lost http://a" in terminal.output)
        run.calls(rank=1, step=1, lost=[["http://b", "connection refused"]])
        terminal.until(lambda terminal: "step 1: lost http://b" in terminal.output)
        run.metrics(train_runtime=75.0)
        assert terminal.exit_code() == 0
    told = [line for line in terminal.output.splitlines() if ": lost" in line or ": the" in line]
    assert len(told) == len(set(told)) == 4
