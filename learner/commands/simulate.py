"""`learner simulate`: how long the steps of a run would take, on which machines."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shared_contracts.errors import ContractError

if TYPE_CHECKING:
    from learner.config.schema import Config
    from learner.simulate import Outcome
    from learner.simulate.fit import Fitted
    from learner.simulate.lengths import Lengths
    from learner.simulate.logged import LoggedRun
    from learner.simulate.speeds import Speeds
    from learner.simulate.vary import Given, Values


def simulate(
    config: Annotated[Path, typer.Option(help="Training YAML; all hyperparameters live there.")],
    speeds: Annotated[
        Path | None, typer.Option(help="YAML of speeds; see docs/simulate.md. (round numbers)")
    ] = None,
    from_run: Annotated[
        Path | None, typer.Option(help="Run folder: fit speeds and lengths to what it logged.")
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(help="YAML of length quantiles. (those of --from-run, or of the data)"),
    ] = None,
    servers: Annotated[
        int | None, typer.Option(help="Rollout servers. (as many as the config has)", min=1)
    ] = None,
    ranks: Annotated[int, typer.Option(help="Learner processes.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Steps that are simulated.", min=1)] = 50,
    vary: Annotated[
        list[str] | None,
        typer.Option(help="A key and values, e.g. servers=1,2,4; may be given several times."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="New file: the same numbers.")] = None,
    save_speeds: Annotated[
        Path | None, typer.Option(help="New YAML: the speeds that were simulated, for --speeds.")
    ] = None,
) -> None:
    """Simulate a run: expected step time, utilisation, and what other machines would change."""
    from json import dumps

    from learner.config import load_config, load_mapping
    from learner.config.yaml12 import dump_mapping
    from learner.data.show import print_tables
    from learner.publish import require_new_file
    from learner.simulate import Setting
    from learner.simulate import simulate as run
    from learner.simulate.machines import declared_servers
    from learner.simulate.tables import as_json, outcome_tables, sources_table, sweep_table
    from learner.simulate.vary import Given, parse_variation, sweep

    for option, file in (("--json", json), ("--save-speeds", save_speeds)):
        if file is not None:
            require_new_file(option, file)
    if speeds is not None and from_run is not None:
        raise ContractError("--speeds", "given beside --from-run", "Give one of them")
    variations = [parse_variation(option) for option in vary or ()]
    parsed = load_config(config)
    logged, fitted = _logged(from_run)
    at = Setting(
        parsed,
        fitted.speeds if fitted is not None else _speeds(speeds, parsed),
        _lengths(parsed, lengths, logged),
        servers or declared_servers(parsed),
        ranks,
        steps,
    )
    if fitted is not None:
        print_tables([("Speeds fitted from the run", sources_table(fitted.sources))])
    if save_speeds is not None:
        _publish(save_speeds, dump_mapping(at.speeds.model_dump()))
    report: dict[str, object] = {"speeds": at.speeds.model_dump()}
    if variations:
        given = Given(load_mapping(config), at)
        rows = list(_rows(given, sweep(variations)))
        print_tables([("What if", sweep_table(rows))])
        report["rows"] = [{"values": dict(v), **as_json(outcome)} for v, outcome in rows]
    else:
        outcome = run(at)
        print_tables(outcome_tables(outcome))
        report |= as_json(outcome)
    if json is not None:
        _publish(json, dumps(report, indent=2, allow_nan=False) + "\n")


def _rows(given: "Given", combinations: "list[Values]") -> "Iterator[tuple[Values, Outcome]]":
    """What no run could have is told and left out, unless that is all there is."""
    from learner.simulate import simulate as run

    refused: list[ContractError] = []
    for values in combinations:
        try:
            yield values, run(given.with_values(values))
        except ContractError as error:
            refused.append(error)
            chosen = " ".join(f"{name}={value}" for name, value in values.items())
            typer.echo(f"note: {chosen} is left out: {error}", err=True)
    if len(refused) == len(combinations):
        raise refused[0]


def _logged(folder: Path | None) -> "tuple[LoggedRun | None, Fitted | None]":
    if folder is None:
        return None, None
    from learner.simulate.fit import fit
    from learner.simulate.logged import read_run
    from learner.simulate.machines import declared_shape

    run = read_run(folder)
    return run, fit(run, declared_shape(run.config))


def _speeds(file: Path | None, config: "Config") -> "Speeds":
    from learner.simulate.machines import declared_shape
    from learner.simulate.speeds import Speeds, load_speeds

    return Speeds(server=declared_shape(config)) if file is None else load_speeds(file)


def _lengths(config: "Config", file: Path | None, run: "LoggedRun | None") -> "Lengths":
    from learner.simulate.lengths import OfData, read_lengths
    from learner.simulate.logged import pool_of

    seed = config.training.seed
    if file is not None:
        return read_lengths(file, seed)
    if run is not None:
        return pool_of(run, config, seed)
    from learner.data.jsonl import read_samples
    from learner.run_lengths import lengths_of_run

    samples = read_samples(config.data.train_jsonl, allow_poly=config.allow_poly)
    return OfData(samples, lengths_of_run(config))


def _publish(path: Path, text: str) -> None:
    from learner.publish import publish_text

    path.parent.mkdir(parents=True, exist_ok=True)
    publish_text(path, text)
