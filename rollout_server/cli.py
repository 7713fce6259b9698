"""The command `rollout-server`.

Slow imports come late: FastAPI and torch after the checks, and none for `--help`.
"""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from rollout_server.settings.command_line import option_parameters
from shared_contracts.cli import HELP_OPTIONS, print_version, run_program

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP_OPTIONS,
    rich_markup_mode=None,  # rich slows `--help` down by half
)


@app.callback()
def rollout_server(
    version: Annotated[
        bool,
        Option(
            "--version", callback=print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Generate rollouts of a vision-language model, and receive new weights in memory."""


def with_setting_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the `**options` of a command by one option per setting."""
    *own, _ = inspect.signature(command).parameters.values()
    vars(command)["__signature__"] = inspect.Signature([*own, *option_parameters()])
    return command


@app.command()
@with_setting_options
def serve(
    config: Annotated[Path | None, Option(help="YAML file of these options.")] = None,
    run_config: Annotated[
        Path | None, Option(help="Training YAML: its settings of the server.")
    ] = None,
    **options: Any,
) -> None:
    """Start the replicas behind one port. Defaults are in parentheses."""
    from rollout_server.runtime.logs import set_up_logging
    from rollout_server.runtime.processes import stop_with, use_scratch_folder
    from rollout_server.settings.options import load_settings
    from rollout_server.settings.preflight import bind, check_settings

    settings = load_settings(config, options, run_config)
    set_up_logging(settings.log_level, settings.log_format)
    settings = check_settings(settings)
    if settings.parent_pid is not None:
        stop_with(settings.parent_pid)
    bind(settings.host, settings.port).close()  # a busy port is found before a merge
    from rollout_server.engines import vllm  # FastAPI
    from rollout_server.engines.merge import with_merged_model

    use_scratch_folder()
    settings = with_merged_model(settings)
    listener = bind(settings.host, settings.port)
    os.environ.update(vllm.environment(settings))
    from rollout_server.serve import serve as run  # FastAPI and torch

    run(settings, listener)


def main() -> None:
    """Run the command line (see `run_program`)."""
    run_program(app)
