"""`learner replay`: build logged steps again, and see whether they are the same (REPLAY-01)."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shared_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from learner.replay import Difference, LoggedStep, Rebuilder, StepLog
    from learner.rollout_log import StepAnswer


def replay(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    step: Annotated[
        int | None,
        typer.Option(help="Step of channel B, counted from 1. (every step that is logged)", min=1),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(help="Tell all that became of the answer to this sample, e.g. train.jsonl:12"),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with the tokenizer of the run. (that of its model.model)"),
    ] = None,
) -> None:
    """Build logged steps again from their answers, and say whether they are identical."""
    from learner.replay import Rebuilder, StepLog
    from learner.replay.show import notes_on
    from learner.replay.tokenizer import find_tokenizer, load_tokenizer
    from learner.run_folder import RunFolder

    folder = RunFolder.open(run)
    config, log = folder.config(), StepLog(folder)
    if step is None and sample is not None:
        step = log.step_with(sample)
    logged = None if step is None else log.step(step)
    answered = [] if logged is None or sample is None else logged.sample(sample)
    steps = log.steps if logged is None else [logged.step]
    found = find_tokenizer(folder, config, tokenizer)
    for note in (found.note, *notes_on(folder.facts(), steps[0])):
        if note:
            typer.echo(f"note: {note}", err=True)
    rebuilder = Rebuilder(config, load_tokenizer(found.folder))
    same = _all(log, rebuilder) if logged is None else _one(logged, answered, rebuilder)
    if not same:
        raise typer.Exit(1)


def _one(logged: "LoggedStep", answered: "Sequence[StepAnswer]", rebuilder: "Rebuilder") -> bool:
    """One step, with the stories of some of its answers."""
    from learner.data.show import print_tables
    from learner.replay import compare
    from learner.replay.show import difference_table, step_table, verdict
    from learner.replay.story import story

    replayed, tokenizer = compare(logged, rebuilder), rebuilder.tokenizer
    tables = [
        table
        for answer in answered
        for table in story(answer, replayed.judged(answer), logged.mates(answer), tokenizer)
    ]
    tables.append(step_table(replayed))
    if replayed.first is not None:
        tables.append(difference_table(replayed.first, tokenizer))
    print_tables(tables)
    typer.echo(f"\n{verdict(replayed)}")
    return replayed.first is None


def _all(log: "StepLog", rebuilder: "Rebuilder") -> bool:
    """Every step; what cannot be read is told and left out, unless that is all there is."""
    from rich.console import Console
    from rich.progress import track

    from learner.data.show import print_tables
    from learner.replay import compare
    from learner.replay.show import DifferingStep, difference_table, steps_table, verdict_on_all

    bar = Console(stderr=True)
    first: Difference | None = None
    different: list[DifferingStep] = []
    identical: list[int] = []
    refused: list[ContractError] = []
    hidden = not bar.is_terminal
    for step in track(log.steps, "Steps", console=bar, transient=True, disable=hidden):
        try:
            found = compare(log.step(step), rebuilder).first
        except ContractError as error:
            refused.append(error)
            typer.echo(f"note: step {step} is left out: {error}", err=True)
            continue
        if found is None:
            identical.append(step)
        else:
            first = first or found
            different.append(DifferingStep.of(step, found))
    if refused and not (identical or different):
        raise refused[0]
    tables = [steps_table(different, identical)]
    if first is not None:
        tables.append(difference_table(first, rebuilder.tokenizer))
    print_tables(tables)
    typer.echo(f"\n{verdict_on_all(len(different), len(identical), len(refused))}")
    return not different
