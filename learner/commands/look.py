"""`learner report`, `replay` and `compare`: views of run folders."""

from pathlib import Path
from typing import Annotated

import typer

from learner.commands.config import Json


def report(
    run: Annotated[Path, typer.Argument(help="Run folder: training.output_dir of a run.")],
    out: Annotated[
        Path | None, typer.Option(help="HTML file. (report.html in the run folder)")
    ] = None,
) -> None:
    """Write report.html, the page of a run, also during the run. It needs no network."""
    from learner.analysis.report.run_page import write_report
    from learner.analysis.report.run_view import REPORT
    from learner.runs.atomic_files import require_file
    from learner.runs.run_folder import RunFolder

    folder = RunFolder.open(run)
    file = out or run / REPORT
    require_file("--out", file)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_report(folder, file)
    typer.echo(f"Report: {file} ({file.stat().st_size / 1e6:.1f} MB)")


def replay(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    step: Annotated[
        int | None,
        typer.Option(help="Step of channel B, counted from 1. (all logged steps)", min=1),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(help="Print all details of the answers to this sample, e.g. train.jsonl:12"),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with the tokenizer of the run. (model.model of the run)"),
    ] = None,
) -> None:
    """Compute logged answers again from their ids, and compare every bit."""
    from learner.analysis import replay as replays
    from learner.runs.run_folder import RunFolder

    folder = RunFolder.open(run)
    config, steps = folder.config(), replays.logged_steps(folder, step)
    loaded = replays.load_tokenizer(replays.find_tokenizer(folder, config, tokenizer))
    if not replays.replay(folder, steps, sample, config, loaded):
        raise typer.Exit(1)


def compare(
    first: Annotated[Path, typer.Argument(help="Run folder, or the folder of an evaluation.")],
    second: Annotated[Path, typer.Argument(help="Another one, of the same samples.")],
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.", min=0)] = 0,
    json: Json = False,
) -> None:
    """Compare two evaluations: scores, differences and their 95 % intervals over samples.

    For a run folder, the newest evaluation with answers is used.
    """
    from json import dumps

    from learner.analysis.evaluation.comparison import Comparison, comparison_table
    from learner.data.show import print_tables

    comparison = Comparison.of(first, second, seed)
    if json:
        print(dumps(comparison.numbers(), indent=2))
    else:
        typer.echo(f"first: {comparison.first}\nsecond: {comparison.second}\n")
        print_tables([comparison_table(comparison)])
