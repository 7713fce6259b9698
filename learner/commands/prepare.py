"""`learner export`, `estimate`, `simulate` and `preflight`: what comes before or after a run."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from learner.commands.config import ConfigFile, ConfigOption, only_config
from learner.distributed.waiting import use_passive_wait
from shared_contracts.errors import ContractError, ContractErrors

if TYPE_CHECKING:
    from learner.config.schema import Config
    from learner.operate.simulate import Outcome, Setting
    from learner.operate.simulate.inputs import Lengths, Speeds, Values
    from learner.operate.simulate.logged import LoggedRun


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="Folder of the checkpoint, e.g. RUN/checkpoint-500.")
    ],
    out: Annotated[Path, typer.Option(help="New folder. It must not exist, or must be empty.")],
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Data type of the weights; auto: that of the checkpoint."),
    ] = "auto",
    verify: Annotated[
        Literal["all", "transformers"],
        typer.Option(help="Compare in transformers and in vLLM, or only in transformers."),
    ] = "all",
    push_to_hub: Annotated[
        str | None,
        typer.Option(help="Repository of the Hugging Face Hub, e.g. my-name/my-detector."),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public. (private)")
    ] = False,
) -> None:
    """Write a checkpoint as a plain model with merged adapters, and check the result.

    The folder has a model card, README.md. The token for a push is that of HF_TOKEN, or of
    `hf auth login`.
    """
    from learner.runs.hub import require_hub_access

    if public and push_to_hub is None:
        raise ContractError("--public", "given without --push-to-hub", "Name the repository")
    use_passive_wait()
    from learner.operate.export import export as run  # torch: seconds
    from learner.operate.export import push_export, require_exportable

    require_exportable(checkpoint, out, verify)
    if push_to_hub is not None:
        require_hub_access("--push-to-hub", push_to_hub)
    for proof in run(checkpoint.absolute(), out.absolute(), dtype, verify):
        typer.echo(proof)
    typer.echo(f"Model: {out}")
    if push_to_hub is not None:
        typer.echo(f"Pushed: {push_export(out, push_to_hub, private=not public)}")


def preflight(file: ConfigFile = None, config: ConfigOption = None) -> None:
    """Print what a launcher script needs from a training YAML, as shell assignments."""
    from learner.config import load_config
    from learner.operate.launch_plan import shell_assignments

    typer.echo(shell_assignments(load_config(only_config(file, config))), nl=False)


def estimate(
    gpu: Annotated[str, typer.Option(help="GPU of learner and servers, e.g. H100.")],
    file: ConfigFile = None,
    config: ConfigOption = None,
    gpus: Annotated[int, typer.Option(help="Number of learner GPUs.", min=1)] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Estimate the memory and time of a run on a GPU, without one."""
    from json import dumps

    from learner.config import load_config
    from learner.models.gpus import gpu_named

    known = gpu_named(gpu)
    parsed = load_config(only_config(file, config))
    use_passive_wait()
    from learner.data.jsonl import read_samples
    from learner.data.show import print_tables
    from learner.operate.estimate.report import as_json, tables
    from learner.operate.estimate.report import estimate as run

    samples = read_samples(parsed.data.train_jsonl, allow_poly=parsed.allow_poly)
    found = run(parsed, samples, known, gpus)
    if json:
        print(dumps(as_json(found), indent=2))
    else:
        print_tables(tables(found))
    if refused := list(found.refusals()):
        raise ContractErrors(refused)


def simulate(
    file: ConfigFile = None,
    config: ConfigOption = None,
    speeds: Annotated[
        Path | None,
        typer.Option(help="YAML with speeds; see docs/simulate.md. (round numbers)"),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="GPU of learner and servers, e.g. H100: the speeds of its estimate."),
    ] = None,
    from_run: Annotated[
        Path | None, typer.Option(help="Run folder. Speeds and lengths are fitted to its logs.")
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(help="YAML with quantiles of lengths. (from --from-run, or from the data)"),
    ] = None,
    servers: Annotated[
        int | None, typer.Option(help="Number of rollout servers. (as in the config)", min=1)
    ] = None,
    ranks: Annotated[int, typer.Option(help="Number of learner processes.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Number of simulated steps.", min=1)] = 50,
    vary: Annotated[
        list[str] | None,
        typer.Option(help="A key and its values, e.g. servers=1,2,4. Can be repeated."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="New file for the same numbers as JSON.")
    ] = None,
    save_speeds: Annotated[
        Path | None, typer.Option(help="New YAML file for the speeds that were used.")
    ] = None,
) -> None:
    """Estimate the step time of a run for a number of servers and processes."""
    from itertools import product
    from json import dumps

    from learner.config import load_config, load_mapping
    from learner.config.yaml12 import dump_mapping
    from learner.data.show import print_tables
    from learner.operate.simulate import Setting
    from learner.operate.simulate import simulate as run
    from learner.operate.simulate.inputs import (
        Speeds,
        declared_servers,
        declared_shape,
        parse_variation,
        read_strict,
    )
    from learner.operate.simulate.outcome import as_json, outcome_tables, sources_table, sweep_table
    from learner.runs.atomic_files import publish_text, require_new_file

    for option, new in (("--json", json), ("--save-speeds", save_speeds)):
        if new is not None:
            require_new_file(option, new)
    given = {"--gpu": gpu, "--speeds": speeds, "--from-run": from_run}
    if len(several := [option for option, value in given.items() if value is not None]) > 1:
        raise ContractError(several[0], f"given beside {several[1]}", "Give one of them")
    variations = [parse_variation(option) for option in vary or ()]
    path = only_config(file, config)
    parsed = load_config(path)
    logged: LoggedRun | None = None
    if from_run is not None:
        from learner.operate.simulate.logged import fit, read_run  # scipy: a third of a second

        logged = read_run(from_run)
        fitted = fit(logged, declared_shape(logged.config))
        known, sources = fitted.speeds, fitted.sources
    else:
        shape = declared_shape(parsed)
        known = Speeds(server=shape) if speeds is None else read_strict(speeds, Speeds)
        if gpu is not None:
            known = _at_best(parsed, gpu, ranks, known)
        elif speeds is None:
            typer.echo(f"note: {_UNMEASURED}", err=True)
    own = _lengths(parsed, lengths, logged)
    at = Setting(parsed, known, own, servers or declared_servers(parsed), ranks, steps)
    if logged is not None:
        print_tables([("Speeds fitted from the run", sources_table(sources))])
    if save_speeds is not None:
        save_speeds.parent.mkdir(parents=True, exist_ok=True)
        publish_text(save_speeds, dump_mapping(at.speeds.model_dump()))
    report: dict[str, object] = {"speeds": at.speeds.model_dump()}
    if variations:
        names = [name for name, _ in variations]
        combinations = [
            dict(zip(names, row, strict=True)) for row in product(*(v for _, v in variations))
        ]
        rows = list(_rows(load_mapping(path), at, combinations))
        print_tables([("What if", sweep_table(rows))])
        report["rows"] = [{"values": dict(v), **as_json(outcome)} for v, outcome in rows]
    else:
        outcome = run(at)
        print_tables(outcome_tables(outcome))
        report |= as_json(outcome)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        publish_text(json, dumps(report, indent=2, allow_nan=False) + "\n")


_UNMEASURED = (
    "the speeds are round numbers that were not measured. Give --gpu for those of an estimate, "
    "--from-run or --speeds"
)


def _rows(
    mapping: dict[str, Any], at: "Setting", combinations: "Sequence[Values]"
) -> "Iterator[tuple[Values, Outcome]]":
    """What no run could have is reported and left out, unless that is all there is."""
    from learner.operate.simulate import simulate as run

    refused: list[ContractError] = []
    for values in combinations:
        try:
            yield values, run(at.varied(mapping, values))
        except ContractError as error:
            refused.append(error)
            chosen = " ".join(f"{name}={value}" for name, value in values.items())
            typer.echo(f"note: {chosen} is left out: {error}", err=True)
    if len(refused) == len(combinations):
        raise refused[0]


def _at_best(config: "Config", gpu: str, ranks: int, known: "Speeds") -> "Speeds":
    from learner.data.jsonl import read_samples
    from learner.models.gpus import gpu_named

    found = gpu_named(gpu)
    from learner.operate.estimate.report import estimate
    from learner.operate.estimate.speeds import speeds_at_best

    samples = read_samples(config.data.train_jsonl, allow_poly=config.allow_poly)
    return speeds_at_best(estimate(config, samples, found, ranks), known)


def _lengths(config: "Config", file: Path | None, run: "LoggedRun | None") -> "Lengths":
    from learner.operate.simulate.inputs import Drawn, LengthsFile, OfData, read_strict
    from learner.operate.simulate.logged import pool_of

    seed = config.training.seed
    if file is not None:
        return Drawn(read_strict(file, LengthsFile), seed)
    if run is not None:
        return pool_of(run, config, seed)
    from learner.data.jsonl import read_samples
    from learner.training.start_checks import lengths_of_run

    samples = read_samples(config.data.train_jsonl, allow_poly=config.allow_poly)
    return OfData(samples, lengths_of_run(config))
