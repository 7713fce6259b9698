"""What is in data files, as numbers and as tables."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.table import Table

from learner.data.images import UnreadableImage
from learner.data.jsonl import bounding_box
from learner.data.lengths import SampleLengths, TokenLimits
from learner.data.show import new_table, plain
from learner.stages.coords import decode_bin
from learner.types import GeometryKind, Sample

FloatArray = npt.NDArray[np.float64]

# Sides of the squares that part small, medium and large objects in COCO's evaluation.
COCO_SIDES = (32, 96)


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of each sample. prompt: those of images included; None where it is not known."""

    target: FloatArray
    images: FloatArray
    prompt: FloatArray | None
    limits: TokenLimits | None


@dataclass(frozen=True)
class DataStats:
    """S samples with N objects in all.

    objects: of each sample (S).
    sides: width and height of each object's bounding box in pixels (N x 2).
    centres: of those boxes in [0, 1] of the image (N x 2).
    image_sizes: width and height as the lines give them, once for each sample.
    """

    images: int
    objects: FloatArray
    geometries: Counter[GeometryKind]
    descriptions: Counter[str]
    sides: FloatArray
    centres: FloatArray
    image_sizes: Counter[tuple[int, int]]
    tokens: TokenCounts | None

    @property
    def areas(self) -> FloatArray:
        """Of the bounding boxes, in square pixels (N)."""
        areas: FloatArray = self.sides[:, 0] * self.sides[:, 1]
        return areas

    @property
    def aspects(self) -> FloatArray:
        """Width over height of the bounding boxes that have both."""
        solid = self.sides[(self.sides > 0).all(axis=1)]
        aspects: FloatArray = solid[:, 0] / solid[:, 1]
        return aspects


def collect(samples: Sequence[Sample], lengths: SampleLengths | None) -> DataStats:
    """Count everything; tokens where `lengths` are given.

    Raises ContractError for an image whose tokens cannot be counted.
    """
    placed = [(bounding_box(o.shape), s) for s in samples for o in s.objects]
    boxes = np.array([box for box, _ in placed], dtype=np.float64).reshape(-1, 4) * decode_bin(1)
    images = np.array([(s.width, s.height) for _, s in placed], dtype=np.float64).reshape(-1, 2)
    tokens = None
    if lengths is not None:
        prompt = _measured(lengths.prompt, samples) if lengths.knows_prompt else None
        target, of_images = (_measured(m, samples) for m in (lengths.target, lengths.images))
        tokens = TokenCounts(target, of_images, prompt, lengths.limits)
    return DataStats(
        images=sum(len(sample.images) for sample in samples),
        objects=np.array([len(sample.objects) for sample in samples], dtype=np.float64),
        geometries=Counter(o.shape.kind for sample in samples for o in sample.objects),
        descriptions=Counter(o.desc for sample in samples for o in sample.objects),
        sides=(boxes[:, 2:] - boxes[:, :2]) * images,
        centres=(boxes[:, 2:] + boxes[:, :2]) / 2,
        image_sizes=Counter((sample.width, sample.height) for sample in samples),
        tokens=tokens,
    )


def _measured(measure: Callable[[Sample], int], samples: Sequence[Sample]) -> FloatArray:
    lengths = np.empty(len(samples))
    for index, sample in enumerate(samples):
        try:
            lengths[index] = measure(sample)
        except UnreadableImage as error:
            raise error.of(sample.sample_id) from error
    return lengths


_IMAGE_SIZES = 5
_NONE = "-"


def stats_tables(stats: DataStats, top: int) -> Iterator[tuple[str, Table]]:
    """Tables with their titles, which may be empty. top: how many descriptions are listed."""
    yield "", _totals(stats)
    yield "", _spreads(stats)
    if stats.sides.size:
        yield f"{len(stats.descriptions)} descriptions", _descriptions(stats, top)
        yield "Sizes as COCO parts them, of boxes", _sizes(stats)
        yield "Centres of the boxes, by thirds of the image", _positions(stats)
    yield f"{len(stats.image_sizes)} image sizes", _image_sizes(stats)
    if stats.tokens is not None:
        yield "Tokens of a sample", _tokens(stats.tokens)


def _totals(stats: DataStats) -> Table:
    table = new_table("#samples", "#images", "#objects", "#boxes", "#polygons", "#no object")
    empty = int((stats.objects == 0).sum())
    numbers = (
        len(stats.objects),
        stats.images,
        stats.geometries.total(),
        stats.geometries["bbox_2d"],
        stats.geometries["poly"],
    )
    table.add_row(*map(str, numbers), _of(empty, len(stats.objects)))
    return table


def _spreads(stats: DataStats) -> Table:
    table = new_table("", "#min", "#median", "#mean", "#p95", "#max")
    rows = {
        "objects per sample": stats.objects,
        "box width, pixels": stats.sides[:, 0],
        "box height, pixels": stats.sides[:, 1],
        "box width / height": stats.aspects,
    }
    for name, values in rows.items():
        table.add_row(name, *_spread(values))
    return table


def _spread(values: FloatArray) -> list[str]:
    if not values.size:
        return [_NONE] * 5
    low, median, p95, high = np.percentile(values, (0, 50, 95, 100))
    return [_number(v) for v in (low, median, float(values.mean()), p95, high)]


def _number(value: float) -> str:
    """Whole where it is, else with as many decimals as tell something."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _descriptions(stats: DataStats, top: int) -> Table:
    total, kinds = stats.descriptions.total(), len(stats.descriptions)
    table = new_table("#objects", "#share", "description")
    listed = stats.descriptions.most_common(top)
    for description, count in listed:
        table.add_row(str(count), _fraction(count, total), plain(description))
    if rest := total - sum(count for _, count in listed):
        table.add_row(str(rest), _fraction(rest, total), f"({kinds - len(listed)} others)")
    return table


def _sizes(stats: DataStats) -> Table:
    small, large = (side**2 for side in COCO_SIDES)
    counts = (
        ("small", f"area < {COCO_SIDES[0]}^2 pixels", stats.areas < small),
        ("medium", "", (stats.areas >= small) & (stats.areas < large)),
        ("large", f"area >= {COCO_SIDES[1]}^2 pixels", stats.areas >= large),
    )
    table = new_table("#objects", "#share", "size", "")
    for name, bound, chosen in counts:
        table.add_row(
            str(int(chosen.sum())), _fraction(int(chosen.sum()), len(chosen)), name, bound
        )
    return table


def _positions(stats: DataStats) -> Table:
    """Shares of the centres in each ninth of the image."""
    thirds = np.minimum((stats.centres * 3).astype(int), 2)
    table = new_table("", "#left", "#middle", "#right")
    for row, name in enumerate(("top", "middle", "bottom")):
        counts = [int(((thirds == (column, row)).all(axis=1)).sum()) for column in range(3)]
        table.add_row(name, *(_fraction(count, len(thirds)) for count in counts))
    return table


def _image_sizes(stats: DataStats) -> Table:
    sizes = stats.image_sizes
    table = new_table("#samples", "#share", "pixels")
    for (width, height), count in sizes.most_common(_IMAGE_SIZES):
        table.add_row(str(count), _fraction(count, sizes.total()), f"{width}x{height}")
    if rest := sizes.total() - sum(count for _, count in sizes.most_common(_IMAGE_SIZES)):
        table.add_row(str(rest), _fraction(rest, sizes.total()), "(others)")
    return table


def _tokens(tokens: TokenCounts) -> Table:
    table = new_table("", "#p50", "#p95", "#max", "#limit", "#over it")
    answer, pack = tokens.limits or (None, None)
    _add_tokens(table, "target", tokens.target, answer)
    _add_tokens(table, "images", tokens.images, None)
    if tokens.prompt is not None:
        _add_tokens(table, "prompt with images", tokens.prompt, None)
        _add_tokens(table, "prompt and target", tokens.prompt + tokens.target, pack)
    return table


def _add_tokens(table: Table, name: str, values: FloatArray, limit: int | None) -> None:
    middle, p95, high = (f"{v:.0f}" for v in np.percentile(values, (50, 95, 100)))
    over = _NONE if limit is None else _of(int((values > limit).sum()), len(values))
    table.add_row(name, middle, p95, high, _NONE if limit is None else str(limit), over)


def _of(count: int, total: int) -> str:
    return f"{count} ({_fraction(count, total)})" if count else "0"


def _fraction(count: int, total: int) -> str:
    return f"{count / total:.1%}"
