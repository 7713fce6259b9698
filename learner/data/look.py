"""What `learner data look` shows: tables of counts, and a page of samples.

The page has upright images, with objects drawn over them as SVG. It needs no network.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from learner.data.checkpoint import SampleLengths
from learner.data.images import UnreadableImage, open_upright
from learner.data.jsonl import MAX_BIN, bounding_box
from learner.data.show import Table
from learner.runs.atomic_files import publish_directory
from learner.runs.console import fraction
from learner.types import GroundTruthObject, Sample
from shared_contracts.errors import ContractError

# Longest side of an image on the page, in pixels.
MAX_SIDE = 1600
# Colours by Okabe and Ito that colour-blind readers can distinguish; black text is legible on them.
PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#D55E00", "#CC79A7")

_IMAGE_SIZES = 5


def colour_of(description: str) -> str:
    """Return the palette colour of a description, the same on every image."""
    return PALETTE[zlib.crc32(description.encode()) % len(PALETTE)]


def choose_samples(
    samples: Sequence[Sample], lines: str | None, count: int, seed: int
) -> list[Sample]:
    """Return the samples of lines such as `3,17`, counted from 1; else `count` random ones.

    Random samples are in file order; all are returned if there are fewer than `count`.

    Raises ContractError for a line that does not exist.
    """
    if lines is None:
        chosen = Random(seed).sample(range(len(samples)), min(count, len(samples)))
        return [samples[index] for index in sorted(chosen)]
    known = {str(number): sample for number, sample in enumerate(samples, start=1)}
    named = dict.fromkeys(map(str.strip, lines.split(",")))
    for line in named:
        if line not in known:
            do = f"Give lines from 1 to {len(samples)}, e.g. 3,17."
            raise ContractError("--lines", f"there is no line {line!r}", do)
    return [known[line] for line in named]


def write_page(samples: Sequence[Sample], out: Path) -> None:
    """Publish a folder with the page and the first image of each sample, atomically.

    Raises ContractError if an image cannot be decoded or `out` is not empty.
    """
    templates = Environment(
        loader=PackageLoader("learner.data"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    figures = []
    with publish_directory(out) as part:
        for sample in samples:
            try:
                image = open_upright(sample.images[0])
            except UnreadableImage as error:
                found, do = f"image {sample.images[0]} {error}", "Run `learner data check`."
                raise ContractError(sample.sample_id, found, do) from error
            image.thumbnail((MAX_SIDE, MAX_SIDE))
            image.save(part / picture_name(sample))
            source = quote(picture_name(sample), errors="surrogateescape")
            objects = [_drawn(item) for item in sample.objects]
            figures.append({"sample": sample, "source": source, "objects": objects})
        page = templates.get_template("look.html.jinja").render(figures=figures, max_bin=MAX_BIN)
        (part / "index.html").write_text(page, encoding="utf-8", errors="xmlcharrefreplace")


def picture_name(sample: Sample) -> str:
    """Return `train-00007.png` for `train.jsonl:7`."""
    file, _, line = sample.sample_id.rpartition(":")
    return f"{Path(file).stem}-{int(line):05d}.png"


def _drawn(item: GroundTruthObject) -> dict[str, Any]:
    left, top, right, bottom = bounding_box(item.shape)
    corners = (left, top, right, top, right, bottom, left, bottom)
    return {
        "desc": item.desc,
        "coords": item.shape.coords,
        "outline": corners if item.shape.kind == "bbox_2d" else item.shape.coords,
        "left": f"{left / MAX_BIN:.1%}",
        "top": f"{top / MAX_BIN:.1%}",
        "plate": colour_of(item.desc),
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
    images = sum(len(sample.images) for sample in samples)
    counts = map(str, (len(samples), images, len(every), kinds["bbox_2d"], kinds["poly"]))
    without = _of(sum(not sample.objects for sample in samples), len(samples))
    columns = ["#samples", "#images", "#objects", "#boxes", "#polygons", "#no object"]
    yield Table("", columns, [[*counts, without]])
    if every:
        yield _ranked("descriptions", "#objects", "description", (o.desc for o in every), top)
    sizes = (f"{sample.width}x{sample.height}" for sample in samples)
    yield _ranked("image sizes", "#samples", "pixels", sizes, _IMAGE_SIZES)
    if lengths is not None:
        yield _tokens(samples, lengths)


def _ranked(title: str, counted: str, named: str, values: Iterable[str], top: int) -> Table:
    counts = Counter(values)
    listed, total = counts.most_common(top), counts.total()
    if rest := total - sum(count for _, count in listed):
        listed.append((f"({len(counts) - len(listed)} others)", rest))
    rows = [[str(count), fraction(count, total), name] for name, count in listed]
    return Table(f"{len(counts)} {title}", [counted, "#share", named], rows)


def _tokens(samples: Sequence[Sample], lengths: SampleLengths) -> Table:
    def measured(measure: Callable[[Sample], int]) -> Any:
        return np.array([measure(sample) for sample in samples])

    target, prompt, limits = measured(lengths.target), measured(lengths.prompt), lengths.limits
    rows = []
    for name, values, limit in (
        ("target", target, limits.answer),
        ("images", measured(lengths.images), None),
        ("prompt with images", prompt, None),
        ("prompt and target", prompt + target, limits.pack),
    ):
        numbers = (f"{v:.0f}" for v in np.percentile(values, (50, 95, 100)))
        over = "-" if limit is None else _of(int((values > limit).sum()), len(values))
        rows.append([name, *numbers, "-" if limit is None else str(limit), over])
    return Table("Tokens of a sample", ("", "#p50", "#p95", "#max", "#limit", "#over it"), rows)


def _of(count: int, total: int) -> str:
    return f"{count} ({fraction(count, total)})" if count else "0"
