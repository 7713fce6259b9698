"""What `learner data look` shows: tables of counts, and a page of samples.

The page has upright images, with objects drawn over them as SVG.

A description has one of the seven Okabe-Ito colours, the same on every image; colour-blind readers
can distinguish these. The page needs no network.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from jinja2 import Environment, PackageLoader, StrictUndefined

from learner.data.images import UnreadableImage, open_upright
from learner.data.jsonl import MAX_BIN, bounding_box
from learner.data.lengths import SampleLengths
from learner.data.show import Table
from learner.runs.atomic_files import publish_directory
from learner.runs.console import fraction
from learner.types import GroundTruthObject, Sample
from shared_contracts.errors import ContractError

# Longest side of an image on the page, in pixels.
MAX_SIDE = 1600
# Colour of a description -> colour of text on it.
PALETTE = {
    "#E69F00": "black",
    "#56B4E9": "black",
    "#009E73": "black",
    "#F0E442": "black",
    "#0072B2": "white",
    "#D55E00": "black",
    "#CC79A7": "black",
}

FloatArray = npt.NDArray[np.float64]

_IMAGE_SIZES = 5
_NONE = "-"


def colour_of(description: str) -> str:
    """Return the palette colour of a description."""
    return list(PALETTE)[zlib.crc32(description.encode()) % len(PALETTE)]


def sample_subset(samples: Sequence[Sample], count: int, seed: int) -> list[Sample]:
    """Return `count` random samples (all if there are fewer), in file order."""
    chosen = Random(seed).sample(range(len(samples)), min(count, len(samples)))
    return [samples[index] for index in sorted(chosen)]


def samples_of_lines(samples: Sequence[Sample], lines: str) -> list[Sample]:
    """Return the samples of lines such as `3,17`, counted from 1.

    Raises ContractError for a line that does not exist.
    """
    chosen = {}
    for line in map(str.strip, lines.split(",")):
        if not (line.isascii() and line.isdecimal() and 1 <= int(line) <= len(samples)):
            do = f"Give lines from 1 to {len(samples)}, e.g. 3,17."
            raise ContractError("--lines", f"there is no line {line!r}", do)
        chosen[int(line)] = samples[int(line) - 1]
    return list(chosen.values())


def write_page(samples: Sequence[Sample], out: Path) -> None:
    """Publish a folder with the page and the first image of each sample, atomically.

    Raises ContractError if an image cannot be decoded or `out` is not empty.
    """
    with publish_directory(out) as part:
        for sample in samples:
            try:
                image = open_upright(sample.images[0])
            except UnreadableImage as error:
                found, do = f"image {sample.images[0]} {error}", "Run `learner data check`."
                raise ContractError(sample.sample_id, found, do) from error
            image.thumbnail((MAX_SIDE, MAX_SIDE))
            image.save(part / picture_name(sample))
        templates = Environment(
            loader=PackageLoader("learner.data"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
        )
        figures = [
            {
                "sample": sample,
                "source": quote(picture_name(sample), errors="surrogateescape"),
                "objects": [_drawn(item) for item in sample.objects],
            }
            for sample in samples
        ]
        page = templates.get_template("look.html.jinja").render(figures=figures, max_bin=MAX_BIN)
        (part / "index.html").write_text(page, encoding="utf-8", errors="xmlcharrefreplace")


def picture_name(sample: Sample) -> str:
    """`train.jsonl:7` -> `train-00007.png`."""
    file, _, line = sample.sample_id.rpartition(":")
    return f"{Path(file).stem}-{int(line):05d}.png"


def _drawn(item: GroundTruthObject) -> dict[str, Any]:
    left, top, right, bottom = bounding_box(item.shape)
    corners = (left, top, right, top, right, bottom, left, bottom)
    plate = colour_of(item.desc)
    return {
        "desc": item.desc,
        "coords": item.shape.coords,
        "outline": corners if item.shape.kind == "bbox_2d" else item.shape.coords,
        "left": f"{left / MAX_BIN:.1%}",
        "top": f"{top / MAX_BIN:.1%}",
        "plate": plate,
        "ink": PALETTE[plate],
    }


def stats_tables(
    samples: Sequence[Sample], lengths: SampleLengths | None, top: int
) -> Iterator[Table]:
    """Yield tables of samples and objects, and of tokens if `lengths` are given.

    top: number of descriptions to list.

    Raises ContractError for an image whose tokens cannot be counted.
    """
    every = [item for sample in samples for item in sample.objects]
    kinds = Counter(item.shape.kind for item in every)
    columns = ["#samples", "#images", "#objects", "#boxes", "#polygons", "#no object"]
    counts = (
        len(samples),
        sum(len(sample.images) for sample in samples),
        len(every),
        kinds["bbox_2d"],
        kinds["poly"],
    )
    without = _of(sum(not sample.objects for sample in samples), len(samples))
    yield Table("", columns, [[*map(str, counts), without]])
    if every:
        descriptions = Counter(item.desc for item in every)
        columns = ["#objects", "#share", "description"]
        yield Table(f"{len(descriptions)} descriptions", columns, _ranked(descriptions, top))
    sizes = Counter(f"{sample.width}x{sample.height}" for sample in samples)
    columns = ["#samples", "#share", "pixels"]
    yield Table(f"{len(sizes)} image sizes", columns, _ranked(sizes, _IMAGE_SIZES))
    if lengths is not None:
        yield _tokens(samples, lengths)


def _ranked(counts: Counter[str], top: int) -> list[list[str]]:
    listed = counts.most_common(top)
    if rest := counts.total() - sum(count for _, count in listed):
        listed.append((f"({len(counts) - len(listed)} others)", rest))
    return [[str(count), fraction(count, counts.total()), name] for name, count in listed]


def _tokens(samples: Sequence[Sample], lengths: SampleLengths) -> Table:
    target = _measured(lengths.target, samples)
    prompt = _measured(lengths.prompt, samples)
    rows = []
    for name, values, limit in (
        ("target", target, lengths.limits.answer),
        ("images", _measured(lengths.images, samples), None),
        ("prompt with images", prompt, None),
        ("prompt and target", prompt + target, lengths.limits.pack),
    ):
        numbers = (f"{v:.0f}" for v in np.percentile(values, (50, 95, 100)))
        over = _NONE if limit is None else _of(int((values > limit).sum()), len(values))
        rows.append([name, *numbers, _NONE if limit is None else str(limit), over])
    return Table("Tokens of a sample", ("", "#p50", "#p95", "#max", "#limit", "#over it"), rows)


def _measured(measure: Callable[[Sample], int], samples: Sequence[Sample]) -> FloatArray:
    return np.array([measure(sample) for sample in samples], dtype=np.float64)


def _of(count: int, total: int) -> str:
    return f"{count} ({fraction(count, total)})" if count else "0"
