"""Shows a run until it has ended: a screen that is drawn anew, or plain lines.

A screen fits the terminal of the moment (SIGWINCH); where output goes to a file, a pipe or a
terminal without a cursor, there is a line for each new step instead.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import RawIOBase, TextIOWrapper
from types import FrameType
from typing import TextIO

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live

from learner.console import tell
from learner.metrics.figures import duration, score
from learner.metrics.step_line import step_line
from learner.run_folder import RunFolder
from learner.watch.frame import frame
from learner.watch.spark import ASCII, BLOCKS, Glyphs
from learner.watch.watched import Numbers, Watched
from shared_contracts.errors import RunError
from shared_contracts.printable import printable

_EVERY_S = 1.0
_LOOK_S = 0.05
_WIDTH_OF_A_FILE = 100
_ENDED_BY_SIGNAL = 128


def watch_run(folder: RunFolder, once: bool, follow: bool) -> None:
    """Show the run until it has finished.

    once: print one frame and return. follow: stay when it has ended.

    Raises:
        RunError: the process that writes the folder is gone, or the folder is.
    """
    run = Watched(folder)
    console = _console()
    glyphs = ASCII if console.options.ascii_only else BLOCKS
    if once:
        run.look()
        console.print(_drawn(run, console.width, None, glyphs))
        return
    if console.is_terminal and not console.is_dumb_terminal:
        _screen(run, console, glyphs, follow)
    else:
        _lines(run, console, follow)
    _say_how_it_ended(run)


def _console() -> Console:
    """Of standard output, whose size is asked of the terminal every time."""
    if sys.stdout.isatty():
        for name in ("COLUMNS", "LINES"):
            os.environ.pop(name, None)
    elif not os.environ.get("COLUMNS"):
        os.environ["COLUMNS"] = str(_WIDTH_OF_A_FILE)
    return Console(file=_output(sys.stdout), highlight=False, emoji=False)


def _output(standard: TextIO) -> TextIO:
    """Shows a run's name also where there is no Unicode, and writes everything.

    With PYTHONUNBUFFERED a write is one of the system's, and what a signal, such as that of a
    resize, leaves of it is never written.
    """
    if not isinstance(standard, TextIOWrapper):
        return standard
    if not isinstance(standard.buffer, RawIOBase):
        standard.reconfigure(errors="replace")
        return standard
    return open(standard.fileno(), "w", encoding=standard.encoding, errors="replace", closefd=False)


def _drawn(run: Watched, width: int, height: int | None, glyphs: Glyphs) -> Group:
    lines = frame(run, width, height, glyphs)
    for line in lines:
        line.no_wrap, line.overflow = True, "crop"
    return Group(*lines)


def _screen(run: Watched, console: Console, glyphs: Glyphs, follow: bool) -> None:
    """On the terminal's other screen; the last frame stays on the usual one."""
    wake = _Wake()
    with (
        _on_signals(wake),
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        while True:
            run.look()
            # Asked once a frame: rich would ask again, and a resize may come in between.
            console.size = width, height = ConsoleDimensions(*shutil.get_terminal_size())
            live.update(_drawn(run, width, height, glyphs), refresh=True)
            if _over(run, follow):
                break
            wake.pause(_EVERY_S)
    console.print(_drawn(run, console.width, None, glyphs))


def _lines(run: Watched, console: Console, follow: bool) -> None:
    """The last step there is, then every new one."""

    def say(text: str) -> None:
        tell(console, text)
        console.file.flush()

    told = 0
    say(f"{printable(run.config.training.run_name)}: {printable(run.path)}")
    wake = _Wake()
    with _on_signals(wake):
        new = run.look()[-1:]
        while True:
            for line in new:
                say(_said(line, run))
            for event in [event for event in run.events if event.number > told]:
                at = "evaluation" if event.at is None else f"step {event.at}"
                say(f"{at}: {printable(event.what)}")
                told = event.number
            if _over(run, follow):
                return
            wake.pause(_EVERY_S)
            new = run.look()


def _said(line: Numbers, run: Watched) -> str:
    if "loss" in line:
        return step_line(line["step"], run.total, line)
    scores = {key.removeprefix("eval/"): value for key, value in line.items() if "/" in key}
    if "f1" in scores:
        named = [n for n in ("f1", "precision", "recall") if scores.get(n) is not None]
        shown = " ".join(f"{name} {score(scores[name])}" for name in named)
        return f"step {line['step']} evaluation {shown}"
    ended = f"step {line['step']} training has ended after {duration(line.get('train_runtime'))}"
    went_on = run.facts.get("started_at_step", 0)
    return f"{ended}, counted from step {went_on}" if went_on else ended


def _over(run: Watched, follow: bool) -> bool:
    return not follow and run.state in ("finished", "gone", "removed")


def _say_how_it_ended(run: Watched) -> None:
    if run.state == "gone":
        mark = run.facts["process"]
        raise RunError(
            f"{run.path}: process {mark['pid']} on {printable(mark['host'])} is gone, and the run "
            f"has not finished: no step for {duration(run.silent_s)}, at step {run.step}. With "
            "training.resume: auto the same command goes on"
        )
    if run.state == "removed":
        raise RunError(f"{run.path} is no run folder any more")


class _Wake:
    """Ends a pause early. now: set by a signal, where taking a lock might wait for ever."""

    def __init__(self) -> None:
        self.now = False

    def pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.now and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_S))
        self.now = False


@contextmanager
def _on_signals(wake: _Wake) -> Iterator[None]:
    """A new size is shown at once, and whoever ends this gives the terminal back first."""

    def resized(number: int, frame: FrameType | None) -> None:
        wake.now = True

    def ended(number: int, frame: FrameType | None) -> None:
        raise SystemExit(_ENDED_BY_SIGNAL + number)

    handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
        signal.SIGWINCH: resized,
        signal.SIGTERM: ended,
        signal.SIGHUP: ended,
    }
    former = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
