"""Both programs: help, completion, the YAML of a command, exit codes, and terminal output."""

import io
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import typer
from rich.console import Console
from rich.text import Text
from transformers import TrainerControl, TrainerState, TrainingArguments
from typer.testing import CliRunner

import learner.cli
import rollout_server.cli
from learner.runs.console import counted, duration, fraction, number, score, tell
from learner.training.run_log import ProgressDisplay
from shared_contracts.cli import describe, printable, run_cli
from shared_contracts.errors import ContractError, ContractErrors, RunError

PROGRAMS = {"learner": learner.cli.app, "rollout-server": rollout_server.cli.app}


def help_pages(name: str, option: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    program: Any = typer.main.get_command(PROGRAMS[name])
    pages: dict[str, str] = {}
    pending: list[tuple[tuple[str, ...], Any]] = [((), program)]
    while pending:
        words, found = pending.pop()
        program.main([*words, option], prog_name=name, standalone_mode=False)
        pages[" ".join((name, *words))] = capsys.readouterr().out
        below = getattr(found, "commands", {})
        pending += [((*words, word), command) for word, command in below.items()]
    return pages


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_command_has_help_under_both_spellings(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = help_pages(name, "-h", capsys)
    assert len(pages) > 1
    assert pages == help_pages(name, "--help", capsys)
    for command_line, page in pages.items():
        assert f"Usage: {command_line} " in page


READERS = ["config check", "config show", "doctor", "eval", "launch", "preflight", "train"]


@pytest.mark.req("CFG-01")
@pytest.mark.parametrize("words", READERS)
def test_a_command_takes_its_yaml_as_a_word_or_as_an_option(words: str) -> None:
    def message(*arguments: str) -> str:
        done = CliRunner().invoke(learner.cli.app, [*words.split(), *arguments])
        error = done.exception
        return describe(error) if isinstance(error, ContractError) else done.stderr

    assert "error: none.yaml\n  found: cannot be read" in message("none.yaml")
    assert message("none.yaml") == message("--config", "none.yaml")
    both = message("none.yaml", "--config", "other.yaml")
    assert both.startswith("error: --config\n  found: other.yaml beside none.yaml\n")
    assert message().startswith("error: --config\n  found: no training YAML is named\n")


@pytest.mark.req("SRV-04", "FULL-07")
@pytest.mark.parametrize("given", ["FASTEST_FIRST", None])
def test_both_programs_count_gpus_in_the_order_of_nvidia_smi(given: str | None) -> None:
    inherited = {} if given is None else {"CUDA_DEVICE_ORDER": given}
    script = (
        "import os; from shared_contracts.cli import run_program\n"
        "run_program(lambda: print(os.environ['CUDA_DEVICE_ORDER']))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | inherited, capture_output=True, text=True
    )
    assert shown.stdout.split() == ["PCI_BUS_ID"]


COMPUTING_THREAD = """
import atexit, sys, threading
import torch
from shared_contracts.cli import run_program

computing = threading.Event()

def compute():
    while True:
        torch.nn.functional.interpolate(torch.ones(1, 3, 320, 320), size=(224, 224), mode="bicubic")
        computing.set()

def app():
    atexit.register(print, "cleaned up")
    threading.Thread(target=compute, daemon=True).start()
    computing.wait()
    print("printed", end=" ")
    ENDING

run_program(app)
"""


@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [("return", 0, ""), ("raise ValueError('why')", 1, "ValueError: why")],
)
def test_program_ends_with_its_code_while_a_thread_runs(ending: str, code: int, last: str) -> None:
    script = COMPUTING_THREAD.replace("ENDING", ending)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (code, "printed cleaned up\n"), ended.stderr
    assert ended.stderr.strip().rpartition("\n")[2] == last


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a cat, 猫 \U0001f408", "a cat, 猫 \U0001f408"),
        ("\x1b[31m\x9b\tb\r\nc", r"\x1b[31m\x9b\tb\r\nc"),
        ("left\u202eright\ud800", r"left\u202eright\ud800"),
    ],
)
def test_unprintable_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(text, lines=True) == shown.replace(r"\n", "\n")


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (
            ContractErrors([ContractError(where, "\r", "Name\ta file") for where in "ab"]),
            "error: a\n  found: \\r\n  do: Name\\ta file\n"
            "error: b\n  found: \\r\n  do: Name\\ta file\n",
            2,
        ),
        (RunError("it printed \x07\nand ended"), "error: it printed \\x07\nand ended\n", 1),
        (
            PermissionError(13, "Permission denied", "model/config.json"),
            f"error: model/config.json\n  found: the user {os.geteuid()} may not access it "
            "(Permission denied)\n  do: Give this user access to it and to the folders above it\n",
            2,
        ),
    ],
)
def test_an_error_message_has_no_control_characters(
    error: Exception, message: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_cli(fails)
    assert ended.value.code == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    "words", [["watch", "runs/x", "--once"], ["simulate", "--gpu"], ["data", "from-coco", "a.json"]]
)
def test_a_removed_command_names_what_to_use(words: list[str]) -> None:
    result = CliRunner().invoke(learner.cli.app, words)
    assert isinstance(result.exception, ContractError)
    assert result.exception.found == "the command was removed"
    assert "`learner " in result.exception.do


AWKWARD = "/data/:car:/[red]run[/red]/" + 30 * "long " + "end"


@pytest.mark.parametrize("line", [AWKWARD, Text(AWKWARD)], ids=["str", "text"])
def test_line_is_printed_unchanged(line: str | Text) -> None:
    out = io.StringIO()
    tell(Console(file=out, width=40, force_terminal=True, color_system="truecolor"), line)
    assert out.getvalue() == AWKWARD + "\n"


def shown_steps(console: Console, name: str, steps: int, **logs: Any) -> None:
    display = ProgressDisplay(console, name)
    state, control = TrainerState(max_steps=30), TrainerControl()
    arguments = TrainingArguments(output_dir="none")
    display.on_train_begin(arguments, state, control)
    for state.global_step in range(1, steps + 1):
        display.on_log(arguments, state, control, logs=logs)
    display.stop()


def test_progress_shows_the_name_of_the_run_unchanged() -> None:
    shown, name = io.StringIO(), "lr{1e-4} a[/b] x[lora]"
    logs = {"step/channel_b": 1.0, "loss": 0.25, "rollout/per_second": 3.5}
    shown_steps(Console(file=shown, force_terminal=True, width=100), name, 2, **logs)
    line = Text.from_ansi(shown.getvalue().replace("\r", "\n")).plain
    assert name in line
    assert "2/30 channel B loss 0.2500 3.5 rollouts/s" in line


def test_a_step_names_the_reasons_of_answers_that_were_not_read() -> None:
    shown, reasons = io.StringIO(), {"fenced": 3.0, "text_behind": 0.0, "invalid_rollout": 4.0}
    counts = {f"stage2_ab/channel_b/{name}": count for name, count in reasons.items()}
    shown_steps(
        Console(file=shown, width=100), "run", 20, **counts, loss=0.25, **{"step/channel_b": 1}
    )
    assert "loss 0.2500 (answers: 3 fenced, 4 invalid_rollout) " in shown.getvalue()


def test_no_progress_line_is_in_a_log_file() -> None:
    shown = io.StringIO()
    shown_steps(Console(file=shown), "run", 30, **{"step/channel_b": 0.0, "loss": None})
    lines = shown.getvalue().splitlines()
    assert [line[:20] for line in lines] == ["step 20/30 channel A", "step 30/30 channel A"]
    assert "loss not finite" in lines[-1]


def test_figures_are_formatted() -> None:
    seconds = {0.4: "0s", 59.7: "1m00s", 7800: "2h10m", 442_800: "5d03h", math.inf: "?"}
    assert {value: duration(value) for value in seconds} == seconds
    numbers = {None: "not a number", 1920.0: "1,920", 12.3456: "12.35", 1e-4: "1.000e-04"}
    assert {value: number(value) for value in numbers} == numbers
    assert (score(0.78125), score(None)) == ("0.781", "-")
    assert (fraction(1, 3), fraction(1, 0), counted(1200, "step")) == ("33.3%", "-", "1,200 steps")
