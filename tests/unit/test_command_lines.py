"""Both programs: help, completion, the YAML of a command, exit codes, and safe terminal output."""

import os
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import learner.cli
import rollout_server.cli
from shared_contracts.cli import describe, printable, run_cli
from shared_contracts.errors import ContractError, ContractErrors, RunError

PROGRAMS = {"learner": learner.cli.app, "rollout-server": rollout_server.cli.app}


def help_pages(name: str, option: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The help of a program and of every command below it, by command line."""
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
def test_a_program_ends_with_its_code_while_a_thread_computes(
    ending: str, code: int, last: str
) -> None:
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
