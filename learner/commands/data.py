"""`learner data` (check, convert and show data files) and `learner toy` (toy data and models)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from learner.commands.config import NewFolder, Seed
from learner.data.files import Format, OutFormat
from learner.data.records import Corners, Order, Scale
from learner.runs.atomic_files import require_free
from learner.types import GeometryKind
from shared_contracts.errors import ContractError

if TYPE_CHECKING:
    from learner.config.schema import Config
data_app = typer.Typer(help="Check, convert and look at data files.", no_args_is_help=True)
toy_app = typer.Typer(
    help="Make toy data and a toy model: coloured shapes, a tiny Qwen-VL.", no_args_is_help=True
)

Files = Annotated[list[Path] | None, typer.Argument(help="JSONL files, one sample a line.")]


@data_app.command()
def check(
    files: Files = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Training YAML. Its files are checked as the run would read them."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Print only the first findings. All are counted.", min=0)
    ] = None,
) -> None:
    """Report every problem of data files with its line.

    Every image is decoded. Exit code 2 if there is a problem, 0 if there are only warnings.
    """
    from learner.config.rollout_matching import MatchingConfig
    from learner.data.check import check_files
    from learner.data.show import check_tables, format_problem, print_tables
    from learner.training.checkpoint_checks import lengths_of_run

    paths, run = _data_files(files, config)
    matching = MatchingConfig() if run is None else run.rollout_matching.matching
    reports = check_files(
        paths,
        allow_poly=run is None or run.allow_poly,
        lengths=None if run is None else lengths_of_run(run),
        canvas=matching.maskiou_resolution,
    )
    findings = sorted(
        (problem for report in reports for problem in report.findings),
        key=lambda problem: problem.warning,
    )
    for problem in findings[:limit]:
        typer.echo(format_problem(problem), err=True)
    if limit is not None and len(findings) > limit:
        typer.echo(f"... and {len(findings) - limit} more", err=True)
    print_tables(check_tables(reports))
    if any(not problem.warning for problem in findings):
        raise typer.Exit(2)


# Option -> the formats that are read or written with it.
_NUMBERS = ("coco", "lvis", "ms-swift", "sharegpt", "qwen")
_READ = (*_NUMBERS, "yolo", "voc")
_USED_BY = {
    "--images": (*_NUMBERS, "voc", "to coco", "to lvis", "to ms-swift"),
    "--scale": _NUMBERS,
    "--boxes": _NUMBERS,
    "--split": ("yolo", "voc"),
    "--left-out": _READ,
    "--geometry": ("coco", "lvis", "yolo", "to yolo"),
    "--order": _READ,
    "--skip-empty": _READ,
}


@data_app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="JSONL or JSON file, or folder of the data set.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New file; of yolo and voc a folder.")],
    from_format: Annotated[
        Format | None, typer.Option("--from", help="Format of IN. (found from its content)")
    ] = None,
    to_format: Annotated[OutFormat, typer.Option("--to", help="Format of OUT.")] = "jsonl",
    images: Annotated[
        Path | None,
        typer.Option(help="Folder that image names start at; not of yolo. (found beside the file)"),
    ] = None,
    scale: Annotated[
        Scale | None,
        typer.Option(
            help="Of the boxes. (coco, lvis: pixels; conversations: found from all boxes)"
        ),
    ] = None,
    boxes: Annotated[
        Corners | None,
        typer.Option(
            help="Two corners, or a corner with width and height. (coco, lvis: xywh; else found)"
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Part of a data set to read: a key of yolo's YAML, a list of voc."),
    ] = None,
    geometry: Annotated[
        GeometryKind,
        typer.Option(
            help="Boxes, or the polygon of each object that has exactly one; --to yolo: of each."
        ),
    ] = "bbox_2d",
    order: Annotated[
        Order,
        typer.Option(help="Order of an image's objects: as in the file, or by their boxes."),
    ] = "file",
    skip_empty: Annotated[
        bool, typer.Option("--skip-empty", help="Leave out images without objects.")
    ] = False,
    left_out: Annotated[
        Path | None,
        typer.Option(help="New file with one JSON line for each annotation that was left out."),
    ] = None,
) -> None:
    """Convert COCO, LVIS, YOLO, Pascal VOC or conversations to a data file, or a data file to them.

    ms-swift, sharegpt and qwen are conversations with boxes. What was changed or left out is
    counted.
    """
    from learner.data.conversion import convert, read_other, write_other, write_records
    from learner.data.files import detect_format, write_lines
    from learner.data.show import show_account
    from learner.runs.atomic_files import require_new_file

    if from_format is None:
        from_format = detect_format(source) if to_format == "jsonl" else "jsonl"
    if (from_format == "jsonl") == (to_format == "jsonl"):
        found = f"{source} is {from_format}, and OUT is to be {to_format}"
        do = "One of both is jsonl: name the other one."
        raise ContractError("--from, --to", found, do)
    form = f"to {to_format}" if from_format == "jsonl" else from_format
    changed = (geometry != "bbox_2d", order != "file", skip_empty)
    values = (images, scale, boxes, split, left_out, *changed)
    used = zip(_USED_BY.items(), values, strict=True)
    if unused := [name for (name, forms), value in used if value and form not in forms]:
        found = f"given from {from_format} to {to_format}"
        known = ", ".join(name for name, forms in _USED_BY.items() if form in forms)
        do = f"Leave it out; this conversion takes {known or 'no option'}."
        raise ContractError(", ".join(unused), found, do)
    if images is not None and not images.is_dir():
        raise ContractError("--images", f"{images} is no folder", "Name a folder.")
    if to_format in ("yolo", "voc"):
        require_free(out)
    else:
        require_new_file("OUT", out)
    if from_format == "jsonl":
        show_account(write_other(source, out, to_format, images or out.parent, geometry))
        typer.echo(f"Data set: {out}")
        return
    if left_out is not None:
        require_new_file("--left-out", left_out)
    read = read_other(source, from_format, images, split)
    conversion = convert(read, out, geometry, order, skip_empty, scale, boxes)
    show_account(conversion.account)
    if left_out is not None:
        lines = ({"file": str(source), **each} for each in conversion.account.left_out)
        write_lines(left_out, lines)
        typer.echo(f"Left out: {left_out}")
    write_records(conversion, out)
    typer.echo(f"Data file: {out}")


@data_app.command()
def look(
    files: Files = None,
    config: Annotated[
        Path | None, typer.Option(help="Training YAML. Gives the files, and the limits for tokens.")
    ] = None,
    top: Annotated[int, typer.Option(help="Number of descriptions to list.", min=1)] = 20,
    out: Annotated[
        Path | None, typer.Option(help="New folder for a page of samples of one data file.")
    ] = None,
    samples: Annotated[
        int, typer.Option(help="Number of samples on it; --seed chooses them.", min=1)
    ] = 16,
    seed: Annotated[int, typer.Option(help="The same seed chooses the same samples.")] = 0,
    lines: Annotated[
        str | None, typer.Option(help="Lines of the file to show instead, e.g. 3,17.")
    ] = None,
) -> None:
    """Count objects, descriptions, sizes and tokens; show samples on a page."""
    from learner.data.jsonl import read_samples
    from learner.data.look import choose_samples, stats_tables, write_page
    from learner.data.show import print_tables
    from learner.runs.atomic_files import require_free
    from learner.training.checkpoint_checks import lengths_of_run

    paths, run = _data_files(files, config)
    if out is not None:
        require_free(out)
        if len(paths) > 1:
            found = f"given with {len(paths)} data files"
            raise ContractError("--out", found, "Name one data file.")
    all_samples = [s for file in paths for s in read_samples(file, allow_poly=True)]
    chosen = choose_samples(all_samples, lines, samples, seed)
    lengths = None if run is None else lengths_of_run(run)
    print_tables(list(stats_tables(all_samples, lengths, top)))
    if out is None:
        return
    write_page(chosen, out)
    typer.echo(f"\nPage of {len(chosen)} samples: {out / 'index.html'}")


def _data_files(
    files: Sequence[Path] | None, config: Path | None
) -> tuple[Sequence[Path], "Config | None"]:
    """Return the given files or those of a config; raises ContractError for both or none."""
    from learner.config import load_config

    if (not files) == (config is None):
        found = "no data file" if config is None else "data files beside it"
        raise ContractError("--config", found, "Name data files, or a training YAML with --config.")
    if config is None:
        return files or [], None
    data = (run := load_config(config)).data
    return [file for file in (data.train_jsonl, data.val_jsonl) if file is not None], run


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
