"""Statistics of data files, as tables."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from learner.data.jsonl import bounding_box
from learner.data.lengths import SampleLengths
from learner.data.show import Table
from learner.runs.console import fraction
from learner.stages.coords import decode_bin
from learner.types import Sample

FloatArray = npt.NDArray[np.float64]

_IMAGE_SIZES = 5
_NONE = "-"


def stats_tables(
    samples: Sequence[Sample], lengths: SampleLengths | None, top: int
) -> Iterator[Table]:
    """Yield tables of samples and objects, and of tokens if `lengths` are given.

    top: number of descriptions to list.

    Raises ContractError for an image whose tokens cannot be counted.
    """
    objects = np.array([len(sample.objects) for sample in samples], dtype=np.float64)
    every = [(item, sample) for sample in samples for item in sample.objects]
    kinds = Counter(item.shape.kind for item, _ in every)
    boxes = _array(4, [bounding_box(item.shape) for item, _ in every]) * decode_bin(1)
    images = _array(2, [(sample.width, sample.height) for _, sample in every])
    sides = (boxes[:, 2:] - boxes[:, :2]) * images
    columns = ["#samples", "#images", "#objects", "#boxes", "#polygons", "#no object"]
    counts = (
        len(samples),
        sum(len(sample.images) for sample in samples),
        len(every),
        kinds["bbox_2d"],
        kinds["poly"],
    )
    without = _of(int((objects == 0).sum()), len(samples))
    yield Table("", columns, [[*map(str, counts), without]])
    solid = sides[(sides > 0).all(axis=1)]
    spreads = {
        "objects per sample": objects,
        "box width, pixels": sides[:, 0],
        "box height, pixels": sides[:, 1],
        "box width / height": solid[:, 0] / solid[:, 1],
    }
    rows = [[name, *_spread(values)] for name, values in spreads.items()]
    yield Table("", ("", "#min", "#median", "#mean", "#p95", "#max"), rows)
    if every:
        descriptions = Counter(item.desc for item, _ in every)
        columns = ["#objects", "#share", "description"]
        yield Table(f"{len(descriptions)} descriptions", columns, _ranked(descriptions, top))
        yield _sizes(sides.prod(axis=1))
    sizes = Counter(f"{sample.width}x{sample.height}" for sample in samples)
    columns = ["#samples", "#share", "pixels"]
    yield Table(f"{len(sizes)} image sizes", columns, _ranked(sizes, _IMAGE_SIZES))
    if lengths is not None:
        yield _tokens(samples, lengths)


def _array(columns: int, rows: Sequence[tuple[int, ...]]) -> FloatArray:
    return np.array(rows, dtype=np.float64).reshape(-1, columns)


def _spread(values: FloatArray) -> list[str]:
    if not values.size:
        return [_NONE] * 5
    low, median, p95, high = np.percentile(values, (0, 50, 95, 100))
    return [_number(v) for v in (low, median, float(values.mean()), p95, high)]


def _number(value: float) -> str:
    """Return a number with about three significant digits."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _ranked(counts: Counter[str], top: int) -> list[list[str]]:
    listed = counts.most_common(top)
    if rest := counts.total() - sum(count for _, count in listed):
        listed.append((f"({len(counts) - len(listed)} others)", rest))
    return [[str(count), fraction(count, counts.total()), name] for name, count in listed]


def _sizes(areas: FloatArray) -> Table:
    small, large = 32, 96
    names = ("small", "medium", "large")
    limits = (f"area < {small}^2 pixels", "", f"area >= {large}^2 pixels")
    counts = np.bincount(np.digitize(areas, (small**2, large**2)), minlength=3).tolist()
    shares = (fraction(count, len(areas)) for count in counts)
    rows = list(zip(map(str, counts), shares, names, limits, strict=True))
    title = "Sizes as COCO parts them, of boxes"
    return Table(title, ("#objects", "#share", "size", ""), rows)


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
