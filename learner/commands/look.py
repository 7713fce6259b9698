"""`learner report`, `replay` and `compare`: what shows runs, from their folders alone."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shared_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from learner.analysis.replay.compare import Difference
    from learner.analysis.replay.rebuild import LoggedStep, Rebuilder, StepLog
    from learner.runs.rollout_log import StepAnswer


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
    if file.suffix != ".html":
        raise ContractError("--out", f"{file} does not end in .html", "Name an HTML file")
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
        typer.Option(help="Print everything about the answer to this sample, e.g. train.jsonl:12"),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with the tokenizer of the run. (model.model of the run)"),
    ] = None,
) -> None:
    """Compute logged steps again from their answers, and compare every bit."""
    from learner.analysis.replay.rebuild import (
        Rebuilder,
        StepLog,
        find_tokenizer,
        load_tokenizer,
    )
    from learner.analysis.replay.show import notes_on
    from learner.runs.run_folder import RunFolder

    folder = RunFolder.open(run)
    config, log = folder.config(), StepLog(folder)
    if step is None and sample is not None:
        step = log.step_with(sample)
    logged = None if step is None else log.step(step)
    answered = [] if logged is None or sample is None else logged.sample(sample)
    found = find_tokenizer(folder, config, tokenizer)
    for note in notes_on(folder.facts()):
        typer.echo(f"note: {note}", err=True)
    rebuilder = Rebuilder(config, load_tokenizer(found))
    same = (
        _replay_all(log, rebuilder) if logged is None else _replay_step(logged, answered, rebuilder)
    )
    if not same:
        raise typer.Exit(1)


def compare(
    first: Annotated[Path, typer.Argument(help="Run folder, or the folder of an evaluation.")],
    second: Annotated[Path, typer.Argument(help="Another one, of the same samples.")],
    seed: Annotated[int, typer.Option(help="Of the samples that are drawn.", min=0)] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two evaluations: scores, differences and their 95 % intervals over samples.

    Of a run, its newest evaluation with answers is taken.
    """
    from json import dumps

    from learner.analysis.evaluation.comparison import Comparison, comparison_table
    from learner.data.show import print_tables

    found = Comparison.of(first, second, seed)
    if json:
        print(dumps(found.numbers(), indent=2))
    else:
        typer.echo(f"first: {found.first}\nsecond: {found.second}\n")
        title = f"{found.samples} samples; difference: second - first"
        print_tables([(title, comparison_table(found))])


def _replay_step(
    logged: "LoggedStep", answered: "Sequence[StepAnswer]", rebuilder: "Rebuilder"
) -> bool:
    """One step, with the stories of some of its answers."""
    from learner.analysis.replay.compare import compare
    from learner.analysis.replay.show import difference_table, step_table, story, verdict
    from learner.data.show import print_tables

    replayed, tokenizer = compare(logged, rebuilder), rebuilder.tokenizer
    tables = [
        table
        for answer in answered
        for table in story(answer, replayed.assessed(answer), tokenizer)
    ]
    tables.append(step_table(replayed))
    if replayed.first is not None:
        tables.append(difference_table(replayed.first))
    print_tables(tables)
    typer.echo(f"\n{verdict(replayed)}")
    return replayed.first is None


def _replay_all(log: "StepLog", rebuilder: "Rebuilder") -> bool:
    """Every step; what cannot be read is told and left out, unless that is all there is."""
    from rich.console import Console
    from rich.progress import track

    from learner.analysis.replay.compare import compare
    from learner.analysis.replay.show import about, difference_table, steps_table, verdict_on_all
    from learner.data.show import print_tables

    bar = Console(stderr=True)
    first: Difference | None = None
    differences: dict[int, str] = {}
    refused: list[ContractError] = []
    hidden = not bar.is_terminal
    for step in track(log.steps, "Steps", console=bar, transient=True, disable=hidden):
        try:
            found = compare(log.step(step), rebuilder).first
        except ContractError as error:
            refused.append(error)
            typer.echo(f"note: step {step} is left out: {error}", err=True)
            continue
        first = first or found
        differences[step] = f"{found.field}, {about(found)}" if found else ""
    if refused and not differences:
        raise refused[0]
    tables = [steps_table(differences)]
    if first is not None:
        tables.append(difference_table(first))
    print_tables(tables)
    typer.echo(f"\n{verdict_on_all([*differences.values()], len(refused))}")
    return first is None
