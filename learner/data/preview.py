"""Pictures of samples with their objects, and a page that shows them side by side."""

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from urllib.parse import quote

from learner.data.draw import colour_of, draw
from learner.data.fonts import drawable
from learner.data.images import UnreadableImage, look_at, open_upright, size_told
from learner.publish import publish_directory
from learner.types import Sample
from shared_contracts.errors import ContractError, ContractErrors

_STYLE = """\
body { font: 15px/1.4 system-ui, sans-serif; margin: 24px; background: #f6f6f6; color: #222; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(360px, 1fr)); gap: 20px; }
figure { margin: 0; background: #fff; border: 1px solid #ddd; border-radius: 6px; padding: 12px; }
img { width: 100%; height: 300px; object-fit: contain; background: #eee; }
ol { margin: 8px 0 0; padding-left: 28px; max-height: 180px; overflow: auto; }
li::marker { color: #777; } small { color: #777; }
b { display: inline-block; width: 11px; height: 11px; border: 1px solid #000; margin-right: 6px; }
"""


def choose(samples: Sequence[Sample], count: int, seed: int) -> list[Sample]:
    """`count` samples drawn by `seed` (all, if there are fewer), in the order of the file."""
    chosen = Random(seed).sample(range(len(samples)), min(count, len(samples)))
    return [samples[index] for index in sorted(chosen)]


def choose_lines(samples: Sequence[Sample], lines: Sequence[int]) -> list[Sample]:
    """The samples of these lines, counted from 1; ContractErrors for lines that are not there."""
    wrong = [line for line in lines if not 1 <= line <= len(samples)]
    if wrong:
        raise ContractErrors(
            [
                ContractError(
                    "--lines", f"there is no line {line}", f"Give lines from 1 to {len(samples)}."
                )
                for line in wrong
            ]
        )
    return [samples[line - 1] for line in lines]


def write_preview(samples: Sequence[Sample], out: Path) -> dict[str, str]:
    """Draw the first image of each sample; publish the folder, whole or not at all.

    Returns, by sample id, how an image has another size than its line says.

    Raises ContractError for an image that cannot be decoded, and where `out` is not empty.
    """
    sizes: dict[str, str] = {}
    with publish_directory(out) as part:
        for sample in samples:
            try:
                image = open_upright(sample.images[0])
            except UnreadableImage as error:
                raise ContractError(
                    sample.sample_id,
                    f"image {sample.images[0]} {error}",
                    "Replace it; `learner data check` tells all there are.",
                ) from error
            if image.size != (sample.width, sample.height):
                path = sample.images[0]
                sizes[sample.sample_id] = size_told(
                    (sample.width, sample.height), path, look_at(path)
                )
            draw(sample, image).save(part / picture_name(sample))
        page = "\n".join(_page(samples, sizes))
        (part / "index.html").write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    return sizes


def picture_name(sample: Sample) -> str:
    """`train.jsonl:7` -> `train-00007.png`."""
    file, _, line = sample.sample_id.rpartition(":")
    return f"{Path(file).stem}-{int(line):05d}.png"


def undrawable(samples: Sequence[Sample]) -> frozenset[str]:
    """Characters of the descriptions that no font here holds."""
    descriptions = {o.desc for sample in samples for o in sample.objects}
    return frozenset().union(*(drawable(desc).missing for desc in descriptions))


def _page(samples: Sequence[Sample], sizes: Mapping[str, str]) -> Iterator[str]:
    yield "<!doctype html>"
    yield f'<meta charset="utf-8"><title>{len(samples)} samples</title><style>{_STYLE}</style>'
    yield "<main>"
    for sample in samples:
        yield from _figure(sample, sizes.get(sample.sample_id))
    yield "</main>"


def _figure(sample: Sample, other_size: str | None) -> Iterator[str]:
    name = quote(picture_name(sample), errors="surrogateescape")
    others = len(sample.images) - 1
    more = f", the first of {others + 1} images" if others else ""
    yield f'<figure><a href="{name}"><img src="{name}" alt=""></a><figcaption>'
    yield f"{html.escape(sample.sample_id)} <small>{sample.width}x{sample.height}{more}</small>"
    if other_size is not None:
        yield f"<p>{html.escape(other_size)}</p>"
    yield "<ol>"
    for item in sample.objects:
        plate = f'<b style="background:{colour_of(item.desc)}"></b>'
        coords = " ".join(map(str, item.shape.coords))
        yield f"<li>{plate}{html.escape(item.desc)} <small>{coords}</small></li>"
    yield "</ol></figcaption></figure>"
