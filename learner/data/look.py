"""A page of samples: each image upright, and its objects drawn over it by the browser.

Every description has a colour of its own, the same for each sample as far as there are colours:
those of Okabe and Ito, which colour-blind people can tell apart. The page needs no network.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from learner.data.images import UnreadableImage, image_problem, open_upright, seen_of
from learner.data.jsonl import MAX_BIN, bounding_box
from learner.runs.atomic_files import publish_directory
from learner.types import GroundTruthObject, Sample
from shared_contracts.errors import ContractError

# The longer side of a picture is at most so many pixels.
MOST = 1600
# Colours, and that of text on each.
PALETTE = {
    "#E69F00": "black",
    "#56B4E9": "black",
    "#009E73": "black",
    "#F0E442": "black",
    "#0072B2": "white",
    "#D55E00": "black",
    "#CC79A7": "black",
}


def colour_of(description: str) -> str:
    """The same for a description in every picture."""
    return list(PALETTE)[zlib.crc32(description.encode()) % len(PALETTE)]


def sample_subset(samples: Sequence[Sample], count: int, seed: int) -> list[Sample]:
    """`count` samples drawn by `seed` (all, if there are fewer), in the order of the file."""
    chosen = Random(seed).sample(range(len(samples)), min(count, len(samples)))
    return [samples[index] for index in sorted(chosen)]


def samples_of_lines(samples: Sequence[Sample], lines: str) -> list[Sample]:
    """The samples of lines such as `3,17`, counted from 1; ContractError for others."""
    chosen = {}
    for line in map(str.strip, lines.split(",")):
        if not (line.isascii() and line.isdecimal() and 1 <= int(line) <= len(samples)):
            do = f"Give lines from 1 to {len(samples)}, e.g. 3,17."
            raise ContractError("--lines", f"there is no line {line!r}", do)
        chosen[int(line)] = samples[int(line) - 1]
    return list(chosen.values())


def write_page(samples: Sequence[Sample], out: Path) -> dict[str, str]:
    """Publish a folder with the page and the first image of each sample, whole or not at all.

    Returns, by sample id, how an image has another size than its line says.

    Raises ContractError for an image that cannot be decoded, and where `out` is not empty.
    """
    sizes: dict[str, str] = {}
    with publish_directory(out) as part:
        for sample in samples:
            path, look = sample.images[0], seen_of(sample.images[0])
            problem = image_problem(sample.sample_id, (sample.width, sample.height), path, look)
            if problem is not None and isinstance(look, UnreadableImage):
                raise problem
            if problem is not None:
                sizes[sample.sample_id] = problem.found
            image = open_upright(path)
            image.thumbnail((MOST, MOST))
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
                "other_size": sizes.get(sample.sample_id),
                "objects": [_drawn(item) for item in sample.objects],
            }
            for sample in samples
        ]
        page = templates.get_template("look.html.jinja").render(figures=figures, max_bin=MAX_BIN)
        (part / "index.html").write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    return sizes


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
