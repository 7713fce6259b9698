"""`learner config`: show, check, and print the schema of training YAMLs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from learner.runs.atomic_files import publish_text, require_file
from shared_contracts.cli import BAD_INPUT, describe
from shared_contracts.errors import ContractError, ContractErrors

config_app = typer.Typer(
    help="Check a training YAML, show its values, print its schema.", no_args_is_help=True
)

# The training YAML of a command, as argument or as option.
ConfigFile = Annotated[
    Path | None, typer.Argument(metavar="YAML", help="Training YAML. --config can name it instead.")
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="Training YAML.")]
# Options of several commands.
NewFolder = Annotated[Path, typer.Option(help="New folder. It must not exist, or must be empty.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same result.", min=0)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def only_config(file: Path | None, option: Path | None) -> Path:
    """Return the training YAML of a command line; raises ContractError for two or none."""
    if file is not None and option is not None:
        raise ContractError("--config", f"{option} beside {file}", "Name one training YAML")
    if (config := file or option) is None:
        do = "Name it, as in `learner train my_run.yaml`; `configs/` has complete ones"
        raise ContractError("--config", "no training YAML is named", do)
    return config


@config_app.command()
def show(
    file: ConfigFile = None,
    config: ConfigOption = None,
    all_origins: Annotated[
        bool, typer.Option("--all-origins", help="Also print the lines that were overridden.")
    ] = False,
) -> None:
    """Print every key with its value and where the value comes from.

    The origin is a file and line, `default`, or `derived` from another key.
    """
    from learner.config.load import show_config

    typer.echo(show_config(only_config(file, config), all_origins), nl=False)


@config_app.command()
def check(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="YAML", help="Training YAMLs. --config can name one instead."),
    ] = None,
    config: ConfigOption = None,
    keys_only: Annotated[
        bool, typer.Option("--keys-only", help="Do not check the files that a YAML names.")
    ] = False,
) -> None:
    """Report all mistakes in training YAMLs and all missing files at once."""
    first = only_config(files[0] if files else None, config)
    valid = [_check(path, keys_only) for path in files or [first]]
    if not all(valid):
        raise typer.Exit(BAD_INPUT)


def _check(path: Path, keys_only: bool) -> bool:
    from learner.config.load import check_written, located, read_written
    from learner.training.input_checks import check_files

    try:
        written = read_written(path)
        config = check_written(written)
        errors = [] if keys_only else check_files(config)
        if errors:
            raise ContractErrors([located(error, written.origins) for error in errors])
    except ContractError as error:
        count = len(error.errors)
        print(f"{path}: {count} problem{'s' * (count > 1)}\n{describe(error)}", file=sys.stderr)
        return False
    typer.echo(f"{path}: valid")
    return True


@config_app.command()
def schema(
    out: Annotated[Path | None, typer.Option(help="File to write. (the schema is printed)")] = None,
) -> None:
    """Print the JSON Schema of a training YAML, for editors."""
    from learner.config.load import schema_text

    if out is None:
        typer.echo(schema_text(), nl=False)
        return
    require_file("--out", out)
    out.parent.mkdir(parents=True, exist_ok=True)
    publish_text(out, schema_text())
