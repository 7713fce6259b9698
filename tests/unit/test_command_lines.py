"""What the two programs say of themselves: help, completion, the YAML of a command."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import learner.cli
import rollout_server.cli
from shared_contracts.cli import describe, without_flag_types
from shared_contracts.errors import ContractError

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "vllm", "transformers", "fastapi", "numpy", "peft"}
PROGRAMS = {"learner": learner.cli.app, "rollout-server": rollout_server.cli.app}


def help_pages(name: str, asked: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What a program and every command below it answer to `-h` or `--help`."""
    program = without_flag_types(typer.main.get_command(PROGRAMS[name]))
    pages: dict[str, str] = {}
    pending: list[tuple[tuple[str, ...], Any]] = [((), program)]
    while pending:
        words, found = pending.pop()
        program.main([*words, asked], prog_name=name, standalone_mode=False)
        pages[" ".join((name, *words))] = capsys.readouterr().out
        below = getattr(found, "commands", {})
        pending += [((*words, word), command) for word, command in below.items()]
    return pages


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_command_answers_to_both_spellings_of_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short = help_pages(name, "-h", capsys)
    assert len(short) > (20 if name == "learner" else 1)
    assert short == help_pages(name, "--help", capsys)
    for command_line, page in short.items():
        assert f"Usage: {command_line} " in page
        assert re.search(r"--help +-h ", page), page


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_flag_is_shown_without_the_type_of_a_value(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = help_pages(name, "-h", capsys)
    assert not [page for page in pages.values() if "<bool>" in page]
    assert any("<path>" in page for page in pages.values())


def test_commands_are_told_by_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    page = help_pages("learner", "-h", capsys)["learner"]
    panels = re.findall(r"─ (\w+) ─", page)
    assert panels == ["Options", "Run", "Look", "Prepare", "Check"]


@pytest.mark.parametrize(
    ("name", "typed", "offered"),
    [
        ("learner", "learner tr", {"train"}),
        ("learner", "learner data ", {"check", "convert", "stats", "preview"}),
        ("learner", "learner train --con", {"--config"}),
        ("rollout-server", "rollout-server serve --max-num", {"--max-num-seqs"}),
    ],
)
def test_a_shell_completes_commands_and_options(name: str, typed: str, offered: set[str]) -> None:
    """A real bash, with the script that `--show-completion` prints for it."""
    program = f"""
PATH={Path(sys.executable).parent}:$PATH
eval "$({name} --show-completion)"
COMP_WORDS=({typed}{'""' if typed.endswith(" ") else ""})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
$(complete -p {name} | sed -E 's/.* -F ([^ ]+).*/\\1/') {name}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert offered <= set(done.stdout.split()), done


@pytest.mark.req("ARCH-01")
@pytest.mark.parametrize(
    ("module", "words", "offered"),
    [
        ("learner.cli", "command train --co", "--config"),
        ("rollout_server.cli", "command serve --max-lo", "--max-lora-rank"),
    ],
)
def test_completing_loads_nothing_heavy(
    module: str, words: str, offered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_COMMAND_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", "2")
    program = f"""
import sys
sys.argv = ["command"]
from {module} import main
try:
    main()
finally:
    print(*sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr.split()) == (0, []), done.stderr
    assert done.stdout.split() == [offered]


# Commands of the learner that read a training YAML, each with its other required words.
READERS = [
    "config check", "config show", "doctor", "eval", "launch", "preflight", "probe", "simulate",
    "train",
]  # fmt: skip


@pytest.mark.req("CFG-01")
@pytest.mark.parametrize("words", READERS)
def test_every_command_takes_its_yaml_as_a_word_or_as_an_option(words: str) -> None:
    def told(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(learner.cli.app, [*words.split(), *arguments])
        error = done.exception
        shown = describe(error) if isinstance(error, ContractError) else done.stderr
        return done.exit_code, shown

    _, word = told("none.yaml")
    _, option = told("--config", "none.yaml")
    assert word == option
    assert "error: none.yaml\n  found: cannot be read" in word
    _, both = told("none.yaml", "--config", "other.yaml")
    assert both.startswith("error: --config\n  found: other.yaml beside none.yaml\n")
    _, neither = told()
    assert neither.startswith("error: --config\n  found: no training YAML is named\n")


LEFT_BEHIND = """
import atexit, sys, threading, time
import torch
from shared_contracts.cli import run_program

def compute():
    while True:
        torch.nn.functional.interpolate(torch.ones(1, 3, 320, 320), size=(224, 224), mode="bicubic")

def app():
    atexit.register(print, "cleaned up")
    threading.Thread(target=compute, daemon=True).start()
    time.sleep(0.2)
    print("said", end=" ")
    ENDING

run_program(app)
"""


@pytest.mark.req("SRV-04", "FULL-07")
@pytest.mark.parametrize("given", ["FASTEST_FIRST", None])
def test_both_programs_count_gpus_as_nvidia_smi_does(given: str | None) -> None:
    """Whatever starts them; the engines and servers that they start inherit it."""
    told = {} if given is None else {"CUDA_DEVICE_ORDER": given}
    show = "import os; from shared_contracts.cli import run_program; run_program(lambda: print("
    script = f"{show}os.environ['CUDA_DEVICE_ORDER']))"
    shown = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | told, capture_output=True, text=True
    )
    assert shown.stdout.split() == ["PCI_BUS_ID"]


@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        ("return", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(130)", 130, ""),
        ("sys.exit('why')", 1, "why"),
        ("raise ValueError('why')", 1, "ValueError: why"),
    ],
)
def test_a_program_ends_with_its_code_though_a_thread_computes(
    ending: str, code: int, last: str
) -> None:
    script = LEFT_BEHIND.replace("ENDING", ending)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (code, "said cleaned up\n"), ended.stderr
    assert ended.stderr.strip().rpartition("\n")[2] == last


INTERRUPTED_IN_A_FINALIZER = """
import signal, time
from shared_contracts.cli import run_program

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def app():
    try:
        Finalized()
        time.sleep(30)
        print("not interrupted")
    except KeyboardInterrupt:
        print("interrupted")

run_program(app)
"""


@pytest.mark.req("SRV-05")
def test_an_interrupt_in_a_finalizer_is_not_lost() -> None:
    script = INTERRUPTED_IN_A_FINALIZER
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "interrupted\n", "")
