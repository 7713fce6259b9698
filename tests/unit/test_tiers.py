"""`make test` and `make test-slow` have every test between them."""

import re
import shlex
import subprocess

import pytest

from tests.conftest import APART, FIRST, TOGETHER
from tests.unit.deployment import ROOT


def run_by(target: str, *variables: str) -> list[list[str]]:
    """The words after `pytest` of each time that a target runs it."""
    done = subprocess.run(
        ["make", "--silent", "-n", target, *variables],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = map(shlex.split, done.stdout.splitlines())
    return [words[words.index("pytest") + 1 :] for words in lines if "pytest" in words]


def test_every_test_is_in_one_tier() -> None:
    """The two commands differ in one expression, and one is the other's negation."""
    tiers = [*run_by("test"), *run_by("test-slow")]
    assert run_by("check") == tiers
    assert [words.pop(words.index("-m") + 1) for words in tiers] == ["not slow", "slow"]
    assert tiers[0] == tiers[1]
    assert "--durations=25" in tiers[0]


@pytest.mark.parametrize("target", ["test", "test-slow"])
def test_arguments_come_last_and_so_win(target: str) -> None:
    (words,) = run_by(target, "ARGS=-k parsing")
    assert words[-2:] == ["-k", "parsing"]


def test_files_that_start_engines_are_slow_but_for_the_one_whole_loop() -> None:
    """What shares the server of `tests/conftest.py` starts none."""
    starts = re.compile(r"\b(running_server|start_server|ServerProcess|SupervisedServer)\(")
    files = [
        file
        for folder in ("contract", "integration", "docs")
        for file in (ROOT / "tests" / folder).glob("test_*.py")
    ]
    texts = {file.stem: file.read_text(encoding="utf-8") for file in files}
    starting = {name for name, text in texts.items() if starts.search(text)}
    assert len(starting) > 5
    assert {name for name in starting if "mark.slow" not in texts[name]} == {"test_loop"}


def test_files_that_are_scheduled_specially_are_there() -> None:
    scopes = set(TOGETHER.values())
    for name in {*TOGETHER, *APART, *FIRST} - scopes:
        assert (ROOT / "tests" / f"{name}.py").is_file(), name
    assert scopes <= set(FIRST)
