"""Statistics of data files, as tables."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from learner.data.lengths import SampleLengths
from learner.data.show import Table
from learner.runs.console import fraction
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
