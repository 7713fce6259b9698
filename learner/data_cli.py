"""`learner data`: look at data files and make them."""

from pathlib import Path
from typing import Annotated

import typer

data_app = typer.Typer(help="Check, convert, count and draw data files.", no_args_is_help=True)


@data_app.command()
def check(
    data: Annotated[Path, typer.Argument(help="JSONL file, one sample a line.")],
    boxes_only: Annotated[
        bool, typer.Option(help="Refuse polygons, as stage2_two_channel does.")
    ] = True,
) -> None:
    """Name everything that is wrong with a data file, each with its line."""
    from learner.data.jsonl import read_samples

    samples = read_samples(data, allow_poly=not boxes_only)
    typer.echo(f"{data}: {len(samples)} samples, all valid")
