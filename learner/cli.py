"""The `learner` command: assembles the commands of `learner/commands`."""

from typing import Annotated

import typer

from learner.commands import prepare, run
from learner.commands.config import config_app
from learner.commands.data import data_app, toy_app
from shared_contracts.cli import HELP_OPTIONS, print_version, run_program
from shared_contracts.errors import ContractError

# Commands of earlier versions, and what to use.
REMOVED = {
    "probe": "`learner doctor` checks a server and requests one answer",
    "simulate": "`learner estimate` prints the seconds of a step for 1 to N servers",
    "data stats": "`learner data look FILE` prints the numbers",
    "data from-coco": "`learner data convert --from coco FILE OUT.jsonl` converts it",
    "data preview": "`learner data look FILE --out FOLDER` shows samples on a page",
    "watch": "`learner train` shows its progress; TensorBoard and `learner report RUN` show a run",
}

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, context_settings=HELP_OPTIONS
)


@app.callback()
def learner(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Fine-tune a vision-language detector by rollout matching."""


_RUN, _LOOK, _PREPARE, _CHECK = "Run", "Look", "Prepare", "Check"
app.command(rich_help_panel=_RUN)(run.train)
app.command(rich_help_panel=_RUN)(run.launch)
app.command("eval", rich_help_panel=_RUN)(run.evaluate)
app.command(rich_help_panel=_RUN)(run.demo)
app.command(rich_help_panel=_LOOK)(run.report)
app.command(rich_help_panel=_LOOK)(run.replay)
app.command(rich_help_panel=_LOOK)(run.compare)
app.command(rich_help_panel=_PREPARE)(prepare.init)
app.command(rich_help_panel=_PREPARE)(prepare.export)
app.command(rich_help_panel=_PREPARE)(prepare.estimate)
app.command(rich_help_panel=_PREPARE)(prepare.preflight)
app.add_typer(data_app, name="data", rich_help_panel=_PREPARE)
app.add_typer(toy_app, name="toy", rich_help_panel=_PREPARE)
app.command(rich_help_panel=_CHECK)(prepare.doctor)
app.add_typer(config_app, name="config", rich_help_panel=_CHECK)


def _add_removed(name: str, instead: str) -> None:
    """Add a hidden command that raises ContractError, whatever its arguments."""

    def removed(context: typer.Context) -> None:
        raise ContractError(f"learner {name}", "the command was removed", instead)

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    group, _, command = name.rpartition(" ")
    of = data_app if group else app
    of.command(command, hidden=True, context_settings=anything)(removed)


for _name, _instead in REMOVED.items():
    _add_removed(_name, _instead)


def main() -> None:
    """Console entry: a contract error is a three-part message and exit code 2."""
    run_program(app)
