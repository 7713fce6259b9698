"""Text of files and of models does not steer a terminal."""

import pytest

from learner.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a cat, 猫 \U0001f408", "a cat, 猫 \U0001f408"),
        ("\x1b[31mred\x9b2J\x07", r"\x1b[31mred\x9b2J\x07"),
        ("a\tb\r\nc", r"a\tb\r\nc"),
        ("left\u202eright\ud800", r"left\u202eright\ud800"),
    ],
)
def test_what_is_not_printable_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(text, lines=True) == shown.replace(r"\n", "\n")
