"""The messages that docs/troubleshooting.md quotes are those of the programs."""

import pytest

from tests.docs import documents, messages
from tests.docs.documents import Block
from tests.docs.messages import Template, quoted, templates, unexplained


@pytest.mark.req("CFG-02")
@pytest.mark.parametrize("block", quoted(), ids=lambda block: block.start[:60])
def test_a_quoted_message_is_made_by_the_code(block: Block) -> None:
    assert unexplained(block, templates()) == []


def test_every_symptom_is_quoted_or_described() -> None:
    assert len(quoted()) > 25


SOURCE = """
raise ContractError(
    "training.output_dir",
    f"{folder} holds another run",
    "Name a new folder or move the old run away; to go on with that run, set "
    "training.resume to auto",
)
_LOG.warning("rollout server %s is lost: %s", url, reason)
"""
SAID = """error: training.output_dir
  found: runs/my_run holds another run
  do: Name a new folder or move the old run away; to go on with that run, set training.resume \
to auto
"""


def block_of(text: str) -> Block:
    (block,) = documents.parse(messages.PAGE, f"```text\n{text}\n```\n").blocks
    return block


@pytest.mark.parametrize(
    ("now", "lost"),
    [
        (SOURCE, []),
        (SOURCE.replace("holds another run", "is occupied"), ["runs/my_run holds another run"]),
        (SOURCE.replace("move the old run away", "remove it"), [SAID.splitlines()[2][6:]]),
    ],
)
def test_a_message_that_changes_is_noticed(now: str, lost: list[str]) -> None:
    made = list(messages.of_source("a.py", now))
    assert unexplained(block_of(SAID), made) == lost


def test_the_format_of_a_log_is_understood() -> None:
    made = list(messages.of_source("a.py", SOURCE))
    assert (
        unexplained(block_of("rollout server http://h:1 is lost: Connection refused"), made) == []
    )
    assert (
        unexplained(block_of("rollout server http://h:1 is gone: Connection refused"), made) != []
    )


def test_two_parts_of_different_errors_are_no_message() -> None:
    found = Template("a.py", ("holds another run",))
    do = Template("b.py", ("Name a new folder or move the old run away",))
    assert unexplained(block_of(SAID), [found, do]) != []
