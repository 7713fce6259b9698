"""`learner toy`: make toy data and toy models."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from learner.commands.config import NewFolder, Seed
from learner.runs.atomic_files import require_free

toy_app = typer.Typer(
    help="Make toy data and a toy model: coloured shapes, a tiny Qwen-VL.", no_args_is_help=True
)


@toy_app.command()
def make_data(
    out: NewFolder,
    train: Annotated[int, typer.Option(help="Number of scenes to train on.", min=1)] = 2048,
    val: Annotated[int, typer.Option(help="Number of held-out scenes.", min=1)] = 128,
    seed: Seed = 0,
    polygons: Annotated[
        bool, typer.Option("--polygons", help="Annotate triangles by their corners, not by a box.")
    ] = False,
    world: Annotated[
        Literal["plain", "distinct", "crowded"],
        typer.Option(
            help="plain: one or two separate shapes; crowded: 6 to 20 that overlap and repeat; "
            "distinct: 3 to 8 of those, each of its own kind."
        ),
    ] = "plain",
    unlabelled: Annotated[
        float,
        typer.Option(
            help="Probability that an object of a training scene is not annotated.",
            min=0.0,
            max=0.9,
        ),
    ] = 0.0,
) -> None:
    """Draw scenes; write train.jsonl, val.jsonl and their COCO exports."""
    from learner.data import toy

    files = toy.make_data(
        out, train, val, seed, world=world, polygons=polygons, unlabelled=unlabelled
    )
    typer.echo(f"{train} scenes to train on: {files.train_jsonl}")
    typer.echo(f"{val} scenes held out: {files.val_jsonl}")


@toy_app.command()
def make_model(
    out: NewFolder,
    seed: Seed = 0,
    expand_vocab: Annotated[
        Path | None, typer.Option(help="Add the coordinate tokens to this checkpoint instead.")
    ] = None,
    family: Annotated[
        Literal["qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"],
        typer.Option(help="Model family of the toy."),
    ] = "qwen3_vl",
    tie: Annotated[
        bool | None,
        typer.Option(
            "--tie/--untie",
            help="Share input embedding and output head, or not."
            " (tied; with --expand-vocab as in the source)",
        ),
    ] = None,
) -> None:
    """Make a tiny random model with 1000 coordinate tokens."""
    require_free(out)
    if expand_vocab is None:
        from learner.models import toy

        toy.make_model(out, seed, tie is not False, family)
    else:
        from learner.models import coord_tokens as expansion

        expansion.expand_vocab(expand_vocab, out, seed, tie)
    typer.echo(f"Model: {out}")


@toy_app.command()
def pretrain_vision(
    model: Annotated[Path, typer.Option(help="A toy model.", exists=True, file_okay=False)],
    data: Annotated[Path, typer.Option(help="JSONL of toy scenes.", exists=True, dir_okay=False)],
    out: NewFolder,
    steps: Annotated[int, typer.Option(help="Number of steps of 16 scenes.", min=1)] = 2400,
    seed: Seed = 0,
) -> None:
    """Pretrain the vision tower of a toy model to locate objects."""
    from learner.data.jsonl import read_samples
    from learner.models import toy_vision

    require_free(out)
    samples = read_samples(data, allow_poly=False)
    toy_vision.pretrain_vision(
        model, samples, out, steps, seed, lambda step, losses: typer.echo(losses.line(step, steps))
    )
    typer.echo(f"Model: {out}")
