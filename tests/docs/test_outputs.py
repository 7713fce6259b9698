"""What a document shows a command to print is what it prints."""

import re
from collections.abc import Iterator
from itertools import groupby

import pytest

from tests.docs import documents
from tests.docs.commands import command, is_synopsis
from tests.docs.documents import ROOT, Block
from tests.docs.world import World

# Errors shown without their command, by the first line, and the command and folder they come of.
ERRORS = {
    ("README.md", "error: rollout_matching.vllm.server.servers[0].base_ulr"): (
        "learner train --config my_run.yaml",
        "wrong",
    ),
    ("docs/first-run.md", "error: training.max_step"): (
        "learner launch --device cpu --config runs/first/two_channel.yaml",
        "wrong",
    ),
}
# Outputs that take minutes: their words are in the file that prints them.
DEAR = {
    ("README.md", "128 held-out scenes"): "learner/operate/demo.py",
}
# Drawings and summaries in no language, by the start of their first line.
DRAWN = {
    ("README.md", "learner  "),
    ("docs/architecture.md", "a rank's samples of the step"),
    ("docs/architecture.md", "prefetcher, a thread of each process"),
    ("docs/architecture.md", "learner (rank 0)"),
    ("docs/server.md", "start  "),
    ("docs/weight-sync.md", "learner  "),
}
# Commands and files of programs that are not installed here; they were held against their sources.
FOREIGN = {
    ("docs/openai.md", "python -m lmms_eval"),
    ("docs/openai.md", "python run.py"),
    ("docs/openai.md", "{"),
}
# Messages belong to tests/docs/test_messages.py, generated pages to the tests of their scripts.
MESSAGES = "docs/troubleshooting.md"
PLAIN = [
    b
    for b in documents.blocks("", "text", "console")
    if b.document != MESSAGES and not documents.read(b.document).generated
]
TRANSCRIPTS = [b for b in PLAIN if b.start.startswith("$ ")]


def named(block: Block, names: Iterator[tuple[str, str]]) -> tuple[str, str] | None:
    """The entry of a table that is about this block."""
    found = (n for n in names if n[0] == block.document and block.start.startswith(n[1]))
    return next(found, None)


def turns(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Each command of a transcript with the lines it printed."""
    number = 0

    def turn(line: str) -> int:
        nonlocal number
        number += line.startswith("$ ")
        return number

    for _, group in groupby(block.text.splitlines(), turn):
        first, *printed = group
        yield first.removeprefix("$ "), printed


def matches(shown: list[str], real: list[str]) -> bool:
    """Line by line; `...` stands for any lines, and blanks at an end for nothing."""
    pattern = "".join("(?:.*\n)*?" if s == "..." else re.escape(s.rstrip()) + "\n" for s in shown)
    return re.fullmatch(pattern, "".join(f"{line.rstrip()}\n" for line in real)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("block", TRANSCRIPTS, ids=str)
def test_a_transcript_is_what_a_terminal_shows(block: Block, world: World) -> None:
    for text, shown in turns(block):
        done = world.run(command(block.document, block.line, text, str(block)))
        real = (done.err + done.out).replace(str(world.folder), "").splitlines()
        assert matches(shown, real), "\n".join(real)


@pytest.mark.slow
@pytest.mark.req("CFG-02")
@pytest.mark.parametrize(("name", "made_by"), ERRORS.items(), ids=str)
def test_an_error_that_is_shown_is_the_one_that_comes(
    name: tuple[str, str], made_by: tuple[str, str], world: World
) -> None:
    if name[0] not in documents.paths():
        pytest.skip("the document is not there")
    (block,) = (b for b in PLAIN if named(b, iter([name])))
    text, folder = made_by
    asked = command(block.document, block.line, f"cd {world.folder / folder}; {text}", str(block))
    done = world.run(asked)
    assert done.code == 2, done.shown
    assert matches(block.text.splitlines(), done.err.splitlines()), done.err


@pytest.mark.parametrize(("name", "source"), DEAR.items(), ids=str)
def test_the_words_of_a_dear_output_are_in_its_program(name: tuple[str, str], source: str) -> None:
    (block,) = (b for b in PLAIN if named(b, iter([name])))
    program = (ROOT / source).read_text()
    for line in block.text.splitlines():
        for cell in re.split(r"\s{2,}", line):
            words = re.sub(r"^\d+ (?=held-out)", "", cell)
            assert re.fullmatch(r"\d\.\d{3}", words) or words in program, words


@pytest.mark.parametrize("block", PLAIN, ids=str)
def test_every_plain_block_is_of_a_known_kind(block: Block) -> None:
    tables = (iter(ERRORS), iter(DEAR), iter(DRAWN), iter(FOREIGN))
    known = [name for table in tables if (name := named(block, table))]
    assert len(known) + (block in TRANSCRIPTS) + is_synopsis(block) == 1, block.start


def test_a_stale_output_is_caught() -> None:
    assert matches(["a  b", "...", "d"], ["a  b  ", "c", "c", "d"])
    assert not matches(["a  b", "d"], ["a  b", "c", "d"])
    assert not matches(["a  b", "...", "d"], ["a  c", "d"])
