"""Text of files, of models and of other programs does not steer a terminal."""

import pytest

from shared_contracts.cli import printable, run_cli
from shared_contracts.errors import ContractError, ContractErrors, RunError


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


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (
            ContractError("--config", "a\x1b]0;b.yaml", "Name\ta file"),
            "error: --config\n  found: a\\x1b]0;b.yaml\n  do: Name\\ta file\n",
            2,
        ),
        (
            ContractErrors([ContractError(where, "\r", "Go") for where in "ab"]),
            "error: a\n  found: \\r\n  do: Go\nerror: b\n  found: \\r\n  do: Go\n",
            2,
        ),
        (RunError("it said \x07\nand ended"), "error: it said \\x07\nand ended\n", 1),
    ],
)
def test_an_error_of_a_command_does_not_steer_the_terminal(
    error: Exception, message: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_cli(fails)
    assert ended.value.code == code
    assert capsys.readouterr().err == message
