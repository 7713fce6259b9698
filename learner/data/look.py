"""A page of samples: each image upright, and its objects drawn over it by the browser.

Every description has a colour of its own, the same for each sample as far as there are colours:
those of Okabe and Ito, which colour-blind people can tell apart. The page needs no network.
"""

import html
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from urllib.parse import quote

from learner.data.images import UnreadableImage, look_at, open_upright, size_told
from learner.data.jsonl import MAX_BIN, bounding_box
from learner.runs.atomic_files import publish_directory
from learner.types import GroundTruthObject, Sample
from shared_contracts.errors import ContractError, ContractErrors

# The longer side of a picture is at most so many pixels.
MOST = 1600
PALETTE = {
    "#E69F00": "black",
    "#56B4E9": "black",
    "#009E73": "black",
    "#F0E442": "black",
    "#0072B2": "white",
    "#D55E00": "black",
    "#CC79A7": "black",
}
_STYLE = """\
body { font: 15px/1.4 system-ui, sans-serif; margin: 24px; background: #f6f6f6; color: #222; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(480px, 1fr)); gap: 20px; }
figure { margin: 0; background: #fff; border: 1px solid #ddd; border-radius: 6px; padding: 12px; }
figure > div { position: relative; }
img { display: block; width: 100%; }
svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
polygon { fill: none; vector-effect: non-scaling-stroke; }
i { position: absolute; font: 12px/1.2 system-ui, sans-serif; padding: 0 3px; }
ol { margin: 8px 0 0; padding-left: 28px; max-height: 240px; overflow: auto; }
li::marker { color: #777; } small { color: #777; }
b { display: inline-block; width: 11px; height: 11px; border: 1px solid #000; margin-right: 6px; }
"""


def colour_of(description: str) -> str:
    """The same for a description in every picture."""
    return list(PALETTE)[zlib.crc32(description.encode()) % len(PALETTE)]


def choose(samples: Sequence[Sample], count: int, seed: int) -> list[Sample]:
    """`count` samples drawn by `seed` (all, if there are fewer), in the order of the file."""
    chosen = Random(seed).sample(range(len(samples)), min(count, len(samples)))
    return [samples[index] for index in sorted(chosen)]


def choose_lines(samples: Sequence[Sample], lines: Sequence[int]) -> list[Sample]:
    """The samples of these lines, counted from 1; ContractErrors for lines that are not there."""
    do = f"Give lines from 1 to {len(samples)}."
    wrong = [line for line in lines if not 1 <= line <= len(samples)]
    if wrong:
        errors = [ContractError("--lines", f"there is no line {line}", do) for line in wrong]
        raise ContractErrors(errors)
    return [samples[line - 1] for line in lines]


def write_page(samples: Sequence[Sample], out: Path) -> dict[str, str]:
    """Publish a folder with the page and the first image of each sample, whole or not at all.

    Returns, by sample id, how an image has another size than its line says.

    Raises ContractError for an image that cannot be decoded, and where `out` is not empty.
    """
    sizes: dict[str, str] = {}
    with publish_directory(out) as part:
        for sample in samples:
            path, size = sample.images[0], (sample.width, sample.height)
            try:
                image = open_upright(path)
            except UnreadableImage as error:
                do = "Replace it; `learner data check` tells all there are."
                raise ContractError(sample.sample_id, f"image {path} {error}", do) from error
            if image.size != size:
                sizes[sample.sample_id] = size_told(size, path, look_at(path))
            image.thumbnail((MOST, MOST))
            image.save(part / picture_name(sample))
        page = "\n".join(_page(samples, sizes))
        (part / "index.html").write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    return sizes


def picture_name(sample: Sample) -> str:
    """`train.jsonl:7` -> `train-00007.png`."""
    file, _, line = sample.sample_id.rpartition(":")
    return f"{Path(file).stem}-{int(line):05d}.png"


def _page(samples: Sequence[Sample], sizes: Mapping[str, str]) -> Iterator[str]:
    yield "<!doctype html>"
    yield f'<meta charset="utf-8"><title>{len(samples)} samples</title><style>{_STYLE}</style>'
    yield "<main>"
    for sample in samples:
        yield from _figure(sample, sizes.get(sample.sample_id))
    yield "</main>"


def _figure(sample: Sample, other_size: str | None) -> Iterator[str]:
    name = quote(picture_name(sample), errors="surrogateescape")
    yield f'<figure><div><a href="{name}"><img src="{name}" alt=""></a>'
    yield f'<svg viewBox="0 0 {MAX_BIN} {MAX_BIN}" preserveAspectRatio="none">'
    yield from (_outline(item) for item in sample.objects)
    yield "</svg>"
    yield from (_label(number, item) for number, item in enumerate(sample.objects, start=1))
    others = len(sample.images) - 1
    more = f", the first of {others + 1} images" if others else ""
    yield f"</div><figcaption>{html.escape(sample.sample_id)}"
    yield f"<small>{sample.width}x{sample.height}{more}</small>"
    if other_size is not None:
        yield f"<p>{html.escape(other_size)}</p>"
    yield "<ol>"
    for item in sample.objects:
        plate = f'<b style="background:{colour_of(item.desc)}"></b>'
        coords = " ".join(map(str, item.shape.coords))
        yield f"<li>{plate}{html.escape(item.desc)} <small>{coords}</small></li>"
    yield "</ol></figcaption></figure>"


def _outline(item: GroundTruthObject) -> str:
    flat = item.shape.coords
    if item.shape.kind == "bbox_2d":
        x1, y1, x2, y2 = flat
        flat = (x1, y1, x2, y1, x2, y2, x1, y2)
    points = " ".join(map(str, flat))
    lines = (("black", 5), (colour_of(item.desc), 2))
    return "".join(
        f'<polygon points="{points}" stroke="{colour}" stroke-width="{width}"/>'
        for colour, width in lines
    )


def _label(number: int, item: GroundTruthObject) -> str:
    x, y, _, _ = bounding_box(item.shape)
    colour, title = colour_of(item.desc), html.escape(item.desc)
    style = f"left:{x / MAX_BIN:.1%};top:{y / MAX_BIN:.1%};background:{colour}"
    return f'<i style="{style};color:{PALETTE[colour]}" title="{title}">{number}</i>'
