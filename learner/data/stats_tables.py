"""Statistics of data files as tables."""

from collections.abc import Iterator

import numpy as np
from rich.table import Table

from learner.data.show import new_table, plain
from learner.data.stats import COCO_SIDES, DataStats, FloatArray, TokenCounts

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
        table.add_row(str(count), _share(count, total), plain(description))
    if rest := total - sum(count for _, count in listed):
        table.add_row(str(rest), _share(rest, total), f"({kinds - len(listed)} others)")
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
        table.add_row(str(int(chosen.sum())), _share(int(chosen.sum()), len(chosen)), name, bound)
    return table


def _positions(stats: DataStats) -> Table:
    """Shares of the centres in each ninth of the image."""
    thirds = np.minimum((stats.centres * 3).astype(int), 2)
    table = new_table("", "#left", "#middle", "#right")
    for row, name in enumerate(("top", "middle", "bottom")):
        counts = [int(((thirds == (column, row)).all(axis=1)).sum()) for column in range(3)]
        table.add_row(name, *(_share(count, len(thirds)) for count in counts))
    return table


def _image_sizes(stats: DataStats) -> Table:
    sizes = stats.image_sizes
    table = new_table("#samples", "#share", "pixels")
    for (width, height), count in sizes.most_common(_IMAGE_SIZES):
        table.add_row(str(count), _share(count, sizes.total()), f"{width}x{height}")
    if rest := sizes.total() - sum(count for _, count in sizes.most_common(_IMAGE_SIZES)):
        table.add_row(str(rest), _share(rest, sizes.total()), "(others)")
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
    return f"{count} ({_share(count, total)})" if count else "0"


def _share(count: int, total: int) -> str:
    return f"{count / total:.1%}"
