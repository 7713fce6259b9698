"""`learner data`: look at data files and make them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from shared_contracts.errors import ContractError

if TYPE_CHECKING:
    from learner.config.schema import Config
    from learner.data.coco import CocoFile
    from learner.data.jsonl import CoversAPixel, DataProblem
    from learner.data.lengths import SampleLengths
    from learner.data.stats import DataStats
    from learner.types import Sample

data_app = typer.Typer(help="Check, convert, count and draw data files.", no_args_is_help=True)

Variant = Literal["stage2_two_channel", "stage2_rollout_aligned"]
Format = Literal["jsonl", "coco", "lvis", "yolo", "voc"]
GeometryKind = Literal["bbox_2d", "poly"]
Order = Literal["file", "left-to-right", "top-to-bottom"]
Files = Annotated[list[Path] | None, typer.Argument(help="JSONL files, one sample a line.")]


@data_app.command()
def check(
    files: Files = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Training YAML. Its files are checked as the run would read them."),
    ] = None,
    variant: Annotated[
        Variant | None,
        typer.Option(
            help="Trainer variant that will read the data. (stage2_two_channel: boxes only)"
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Print only the first findings. All are counted.", min=0)
    ] = None,
) -> None:
    """Report every problem of data files with its line.

    Every image is decoded. Exit code 2 if there is a problem, 0 if there are only warnings.
    """
    from learner.config import load_config
    from learner.config.rollout_matching import MatchingConfig
    from learner.data.check import check_files
    from learner.data.show import check_tables, print_tables, told, watch

    _require_one_source(files, config, variant)
    lengths, matching = None, MatchingConfig()
    allow_poly = variant == "stage2_rollout_aligned"
    if config is not None:
        run = load_config(config)
        files, allow_poly, matching = _files_of(run), run.allow_poly, run.rollout_matching.matching
        lengths = _lengths_if_there(run)
    reports = check_files(
        files or [],
        allow_poly=allow_poly,
        lengths=lengths,
        covers_a_pixel=_covers_a_pixel(matching.maskiou_resolution),
        watch=watch,
    )
    findings = sorted(
        (problem for report in reports for problem in report.findings),
        key=lambda problem: problem.warning,
    )
    for problem in findings[:limit]:
        typer.echo(told(problem), err=True)
    if limit is not None and len(findings) > limit:
        typer.echo(f"... and {len(findings) - limit} more", err=True)
    print_tables(check_tables(reports))
    if any(not problem.warning for problem in findings):
        raise typer.Exit(2)


@data_app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="JSONL or JSON file, or folder of the data set.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New file; of yolo and voc a folder.")],
    from_format: Annotated[Format, typer.Option("--from", help="Format of IN.")] = "jsonl",
    to_format: Annotated[Format, typer.Option("--to", help="Format of OUT.")] = "jsonl",
    images: Annotated[
        Path | None,
        typer.Option(
            help="Folder that the image names of coco, lvis and voc start at. (that of the JSON "
            "file; JPEGImages)"
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Part of a data set to read: a key of yolo's YAML, a list of voc."),
    ] = None,
    geometry: Annotated[
        GeometryKind,
        typer.Option(
            help="Boxes, or the polygon of each object that has exactly one; to yolo: of each."
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
    """Convert a data file to COCO, LVIS, YOLO or Pascal VOC, or one of these to a data file.

    What was changed or left out is counted.
    """
    if (from_format == "jsonl") == (to_format == "jsonl"):
        raise ContractError(
            "--from, --to",
            f"{from_format} to {to_format}",
            "One of both is jsonl, the default: name the other one.",
        )
    given = {
        "--images": images is not None,
        "--split": split is not None,
        "--geometry": geometry != "bbox_2d",
        "--order": order != "file",
        "--skip-empty": skip_empty,
        "--left-out": left_out is not None,
    }
    takes = (_TO if from_format == "jsonl" else _FROM)[
        to_format if from_format == "jsonl" else from_format
    ]
    if unused := [option for option, one in given.items() if one and option not in takes]:
        raise ContractError(
            ", ".join(unused),
            f"given from {from_format} to {to_format}",
            f"Leave it out; this conversion takes {', '.join(sorted(takes)) or 'no option'}.",
        )
    if from_format == "jsonl":
        _from_jsonl(source, out, to_format, images, geometry)
        return
    arguments = _Arguments(source, out, images, split, geometry, order, skip_empty, left_out)
    _to_jsonl(arguments, from_format)


# Options beside --from and --to, of a conversion to and from JSONL.
_TO_JSONL = {"--order", "--skip-empty", "--left-out"}
_FROM: dict[str, set[str]] = {
    "coco": {"--images", "--geometry", *_TO_JSONL},
    "lvis": {"--images", "--geometry", *_TO_JSONL},
    "yolo": {"--split", "--geometry", *_TO_JSONL},
    "voc": {"--images", "--split", *_TO_JSONL},
}
_TO: dict[str, set[str]] = {
    "coco": {"--images"},
    "lvis": {"--images"},
    "yolo": {"--geometry"},
    "voc": set(),
}


class _Arguments(NamedTuple):
    """The arguments of a conversion to JSONL."""

    source: Path
    out: Path
    images: Path | None
    split: str | None
    geometry: GeometryKind
    order: Order
    skip_empty: bool
    left_out: Path | None


def _to_jsonl(arguments: _Arguments, form: Format) -> None:
    from learner.config.rollout_matching import MatchingConfig
    from learner.data.conversion import Wanted, convert, write_left_out, write_records
    from learner.data.show import conversion_table, print_tables, watch
    from learner.runs.atomic_files import require_new_file

    source, out, left_out = arguments.source, arguments.out, arguments.left_out
    require_new_file("OUT", out)
    if left_out is not None:
        require_new_file("--left-out", left_out)
    if arguments.images is not None:
        _require_folder("--images", arguments.images)
    coco, images = _read_other(arguments, form)
    wanted = Wanted(
        images,
        out,
        arguments.geometry,
        arguments.order,
        arguments.skip_empty,
        _covers_a_pixel(MatchingConfig().maskiou_resolution),
    )
    conversion = convert(coco, wanted, watch)
    table = conversion_table(conversion, len(coco.images), len(coco.annotations))
    print_tables([("", table)])
    if left_out is not None:
        write_left_out(conversion, source, left_out)
        typer.echo(f"Left out: {left_out}")
    write_records(conversion, len(coco.annotations), out)
    typer.echo(f"Data file: {out}")


def _read_other(arguments: _Arguments, form: Format) -> tuple["CocoFile", Path]:
    """What a data set of another format holds, and the folder that its file names start at."""
    from learner.data.coco import read_coco
    from learner.data.show import watch
    from learner.data.voc import images_of, read_voc
    from learner.data.yolo import read_yolo

    source = arguments.source
    if form == "yolo":
        coco = read_yolo(source, arguments.split, watch)
        return coco, source if source.is_dir() else source.parent
    if form == "voc":
        _require_folder("IN", source)
        images = arguments.images or images_of(source)
        return read_voc(source, arguments.split, images), images
    return read_coco(source, lvis=form == "lvis"), arguments.images or source.parent


def _from_jsonl(
    source: Path, out: Path, form: Format, images: Path | None, geometry: GeometryKind
) -> None:
    from learner.data.coco import to_coco, to_lvis, write_document
    from learner.data.export import name_faults, names_of_images, samples_to_export
    from learner.data.show import export_table, print_tables, watch
    from learner.data.voc import voc_faults, write_voc
    from learner.data.yolo import write_yolo
    from learner.runs.atomic_files import require_free, require_new_file

    flat = form == "voc"
    if form in ("coco", "lvis"):
        require_new_file("OUT", out)
    else:
        require_free(out)
    if images is not None:
        _require_folder("--images", images)

    def faults(samples: Sequence["Sample"]) -> Iterable["DataProblem"]:
        if form == "voc":
            yield from voc_faults(samples)
        if form in ("yolo", "voc"):
            yield from name_faults(samples, flat=flat)

    export = samples_to_export(source, watch, faults)
    samples = export.samples
    if form in ("coco", "lvis"):
        to_form = to_lvis if form == "lvis" else to_coco
        write_document(to_form(samples, images or out.parent), out)
    elif form == "yolo":
        names = names_of_images(samples, flat=flat)
        write_yolo(samples, names, out, polygons=geometry == "poly")
    else:
        write_voc(samples, names_of_images(samples, flat=flat), out)
    changed: GeometryKind | None = None
    if form in ("yolo", "voc"):
        changed = "poly" if geometry == "bbox_2d" else "bbox_2d"
    print_tables([("", export_table(export, changed))])
    typer.echo(f"Data set: {out}")


def _require_folder(option: str, folder: Path) -> None:
    if not folder.is_dir():
        raise ContractError(option, f"{folder} is no folder", "Name a folder.")


@data_app.command()
def stats(
    files: Files = None,
    config: Annotated[
        Path | None, typer.Option(help="Training YAML. Gives the files, and the limits for tokens.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint whose tokenizer counts tokens.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="New picture with the same numbers.")] = None,
    top: Annotated[int, typer.Option(help="Number of descriptions to list.", min=1)] = 20,
) -> None:
    """Count objects, descriptions, sizes, positions and tokens of data files."""
    from learner.config import load_config
    from learner.data.jsonl import read_samples
    from learner.data.show import print_tables
    from learner.data.stats import collect, stats_tables
    from learner.runs.atomic_files import require_new_file
    from learner.training.checkpoint_checks import lengths_of_run

    _require_one_source(files, config)
    if config is not None and model is not None:
        raise ContractError("--model", "given beside --config", "Leave it out; the YAML names it.")
    if png is not None:
        require_new_file("--png", png)
    lengths = None if model is None else _lengths_of_checkpoint(model)
    if config is not None:
        run = load_config(config)
        files, lengths = _files_of(run), lengths_of_run(run)
    samples = [s for file in files or [] for s in read_samples(file, allow_poly=True)]
    found = collect(samples, lengths)
    print_tables(stats_tables(found, top))
    if png is not None:
        _write_png(png, found, files or [])


@data_app.command()
def preview(
    file: Annotated[Path, typer.Argument(help="JSONL file, one sample a line.")],
    out: Annotated[Path, typer.Option(help="New folder. It must not exist, or must be empty.")],
    samples: Annotated[
        int | None, typer.Option(help="Number of samples to draw; --seed chooses them. (16)", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed chooses the same samples.")] = 0,
    lines: Annotated[
        str | None, typer.Option(help="Lines of the file to draw instead, e.g. 3,17.")
    ] = None,
) -> None:
    """Draw samples with their objects: one PNG for each sample, and index.html."""
    from learner.data.jsonl import read_samples
    from learner.data.preview import choose, choose_lines, undrawable, write_preview
    from learner.runs.atomic_files import require_free

    if lines is not None and samples is not None:
        raise ContractError("--lines", "given beside --samples", "Give one of them.")
    numbers = None if lines is None else _line_numbers(lines)
    require_free(out)
    everything = read_samples(file, allow_poly=True)
    if numbers is None:
        chosen = choose(everything, samples or 16, seed)
    else:
        chosen = choose_lines(everything, numbers)
    for where, found in write_preview(chosen, out).items():
        typer.echo(f"warning: {where}\n  found: {found}\n  do: Run `learner data check`.", err=True)
    if missing := undrawable(chosen):
        typer.echo(
            f"note: no font here holds {' '.join(sorted(missing)[:20])}; the pictures spell such "
            "characters \\uXXXX, index.html shows them as they are",
            err=True,
        )
    typer.echo(f"{len(chosen)} pictures: {out / 'index.html'}")


def _line_numbers(lines: str) -> list[int]:
    numbers = [part.strip() for part in lines.split(",")]
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        raise ContractError("--lines", f"{lines!r}", "Give line numbers, e.g. 3,17.")
    return list(dict.fromkeys(map(int, numbers)))


def _write_png(png: Path, found: "DataStats", files: Sequence[Path]) -> None:
    from learner.data.stats_plot import stats_png
    from learner.runs.atomic_files import publish_bytes

    names = ", ".join(file.name for file in files)
    png.parent.mkdir(parents=True, exist_ok=True)
    publish_bytes(png, stats_png(found, f"{names}: {len(found.objects)} samples"))
    typer.echo(f"Picture: {png}")


def _require_one_source(
    files: Sequence[Path] | None, config: Path | None, variant: Variant | None = None
) -> None:
    if (not files) == (config is None):
        found = "no data file" if config is None else "data files beside it"
        raise ContractError("--config", found, "Name data files, or a training YAML with --config.")
    if config is not None and variant is not None:
        raise ContractError("--variant", "given beside --config", "Leave it out; the YAML sets it.")


def _files_of(config: "Config") -> list[Path]:
    return [file for file in (config.data.train_jsonl, config.data.val_jsonl) if file is not None]


def _covers_a_pixel(resolution: int) -> "CoversAPixel":
    """Whether a shape covers a pixel of a mask canvas of this side, as matching draws it."""
    from learner.stages.matching import covers_a_pixel

    return lambda shape: covers_a_pixel(shape, resolution)


def _lengths_if_there(config: "Config") -> "SampleLengths | None":
    """As `lengths_of_run`; without a tokenizer None, and a note."""
    from learner.training.checkpoint_checks import lengths_of_run
    from shared_contracts.adapters import folder_with

    folder = folder_with(config.model.model, "tokenizer.json", "model.model")
    tokenizer = folder / "tokenizer.json"
    if tokenizer.is_file():
        return lengths_of_run(config)
    typer.echo(f"note: tokens are not counted: model.model has no {tokenizer}", err=True)
    return None


def _lengths_of_checkpoint(checkpoint: Path) -> "SampleLengths":
    """Targets as a run writes them unless it says otherwise; no prompt is known."""
    from functools import partial

    from learner.data.lengths import SampleLengths
    from learner.stages.formats.coord_json import serialize_objects
    from learner.training.checkpoint_checks import check_checkpoint

    check_checkpoint(checkpoint)
    return SampleLengths(checkpoint, partial(serialize_objects, field_order="desc_first"))
