"""`learner config`: what a training YAML says, what is wrong with it, what may stand in it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shared_contracts.cli import BAD_INPUT, describe
from shared_contracts.errors import ContractError, ContractErrors

if TYPE_CHECKING:
    from rich.console import Console

config_app = typer.Typer(help="Look at a training YAML without running it.", no_args_is_help=True)


@config_app.command()
def show(
    config: Annotated[Path, typer.Option(help="Training YAML.")],
    all_origins: Annotated[
        bool, typer.Option("--all-origins", help="Also name the lines that were overridden.")
    ] = False,
) -> None:
    """Print every key with its effective value, and beside it where that comes from.

    That is a file and line, `default`, or `derived` from another key.
    """
    from rich.console import Console

    from learner.config.show import show_config

    text = show_config(config, all_origins)
    console = Console()
    if console.is_terminal:
        _print_coloured(console, text)
    else:
        typer.echo(text, nl=False)


def _print_coloured(console: "Console", text: str) -> None:
    """YAML in colours; lines that no file sets are dim."""
    from rich.syntax import Syntax

    colours = Syntax("", "yaml", theme="ansi_dark", background_color="default").highlight(text)
    colours.highlight_regex(r"(?m)^.* # (default|derived)$", "dim")
    console.print(colours, soft_wrap=True, end="")


@config_app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Training YAMLs.")],
) -> None:
    """Name everything that is wrong with training YAMLs, at once."""
    verdicts = [_check(path) for path in files]
    if not all(verdicts):
        raise typer.Exit(BAD_INPUT)


def _check(path: Path) -> bool:
    """Say what is wrong with a file; false if anything is."""
    from learner.config import load_config

    try:
        load_config(path)
    except ContractError as error:
        count = len(error.errors) if isinstance(error, ContractErrors) else 1
        print(f"{path}: {count} problem{'s' * (count > 1)}\n{describe(error)}", file=sys.stderr)
        return False
    typer.echo(f"{path}: valid")
    return True


@config_app.command()
def schema(
    out: Annotated[Path | None, typer.Option(help="File to write; else it is printed.")] = None,
) -> None:
    """Print the JSON Schema of a training YAML, for editors."""
    from learner.config.json_schema import schema_text

    if out is None:
        typer.echo(schema_text(), nl=False)
        return
    _write(out, schema_text())


def _write(out: Path, text: str) -> None:
    """Replace the file of `--out` whole."""
    from learner.publish import publish_text

    do = "Name a file in a folder that exists and may be written"
    if out.is_dir():
        raise ContractError("--out", f"{out} is a folder", do)
    try:
        publish_text(out, text)
    except OSError as error:
        found = f"{out} cannot be written ({error.strerror})"
        raise ContractError("--out", found, do) from error
