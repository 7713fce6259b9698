"""The command `rollout-server`, with an option for each field of `ServerSettings`.

    max_num_seqs: int                --max-num-seqs N
    enable_lora: bool                --enable-lora, --no-lora
    gpus: tuple[int, ...]            --gpus 0,1,2
    allowed_hosts: tuple[str, ...]   --allowed-host NAME, repeatable

An option that is not given is None. A text that cannot be parsed stays text: `load_settings`
reports it together with all other faults.

Slow imports come late: FastAPI and torch after the checks, and none for `--help`.
"""

import inspect
import os
from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typer import Option

from rollout_server.settings.options import ServerSettings, load_settings
from shared_contracts.cli import HELP_OPTIONS, print_version, run_program
from shared_contracts.strict_model import bare_type, is_model

_METAVARS = {int: "<integer>", float: "<number>", str: "<text>", Path: "<path>", bool: ""}


def _annotation(name: str, field: FieldInfo) -> Any:
    text, default = (field.description or "").replace("`", ""), default_text(field)
    text = f"{text[0].upper()}{text[1:]}{f' ({default})' if default else ''}."
    if bare_type(field.annotation) is bool:
        return Annotated[bool | None, Option(option_names(name, field), help=text)]
    repeatable = _is_repeatable(field)
    option = Option(
        option_names(name, field),
        help=f"{text} Repeatable." if repeatable else text,
        metavar=metavar(field),
        parser=None if repeatable else _parser(bare_type(field.annotation)),
    )
    return Annotated[list[str] | None if repeatable else Any, option]


def option_names(name: str, field: FieldInfo) -> str:
    """Return the name of a field's option; both names of a flag, with a slash between them."""
    words = name.replace("_", "-")
    if bare_type(field.annotation) is bool:
        return f"--{words}/--no-{words.removeprefix('enable-').removeprefix('allow-')}"
    return f"--{words.removesuffix('s') if _is_repeatable(field) else words}"


def metavar(field: FieldInfo) -> str:
    kind = bare_type(field.annotation)
    if get_origin(kind) is Literal:
        return f"[{'|'.join(map(str, get_args(kind)))}]"
    element = bare_type(get_args(kind)[0]) if _is_repeatable(field) else kind
    return _METAVARS.get(element, "<list>")


def default_text(field: FieldInfo) -> str:
    """Return the default of a field; empty for none."""
    default = field.default
    if isinstance(default, bool):
        return "yes" if default else "no"
    shown = f"{default:g}" if isinstance(default, float) else default
    return str(shown) if isinstance(shown, str | int) else ""


def _is_repeatable(field: FieldInfo) -> bool:
    kind = bare_type(field.annotation)
    return get_origin(kind) is tuple and get_args(kind)[0] is not int


def _parser(kind: Any) -> Callable[[str], Any]:
    """Return a parser of command-line text; the parser returns invalid text unchanged."""
    is_list, values = get_origin(kind) is tuple, get_args(kind)
    of = int if is_list or isinstance(next(iter(values), None), int) else kind

    def parse(text: str) -> Any:
        try:
            return TypeAdapter[Any](of).validate_python(text)
        except ValidationError:
            return text

    return (lambda text: list(map(parse, text.split(",")))) if is_list else parse


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
    """Replace the `**options` of a command by one option per setting, except nested ones."""
    *own, _ = inspect.signature(command).parameters.values()
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(name, field))
        for name, field in ServerSettings.model_fields.items()
        if not is_model(bare_type(field.annotation))
    ]
    vars(command)["__signature__"] = inspect.Signature([*own, *options])
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
    run_program(app)
