"""Lines that a person copies a path from."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from learner.runs.console import tell

AWKWARD = "/data/:car:/[red]run[/red]/" + 30 * "long " + "end"


@pytest.mark.parametrize("line", [AWKWARD, Text(AWKWARD)], ids=["str", "text"])
def test_is_printed_letter_for_letter(line: str | Text) -> None:
    out = io.StringIO()
    tell(Console(file=out, width=40, force_terminal=True, color_system="truecolor"), line)
    assert out.getvalue() == AWKWARD + "\n"
