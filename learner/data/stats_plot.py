"""Statistics of data files as one picture of six panels."""

import io
from itertools import zip_longest
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from learner.data.preview import Drawable, shortened
from learner.data.stats import COCO_SIDES, DataStats, FloatArray

_BARS = "#0072B2"
_LIGHT = "#9ccbe8"
_LIMIT = "#D55E00"
# Blues without the lightest: one object is to be seen on white.
_SHADES = ListedColormap(colormaps["Blues"](np.linspace(0.3, 1, 256)))
_LISTED = 12
_LONGEST_NAME = 24
_BINS = 40
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
}


def stats_png(stats: DataStats, title: str) -> bytes:
    """A PNG of 2100 x 1200 pixels."""
    with rc_context(STYLE):
        figure = Figure(figsize=(14, 8), dpi=150, layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, parse_math=False)
        panels = [_objects]
        if stats.sides.size:
            panels += [_descriptions, _sizes, _centres, _aspects]
        panels.append(_image_sizes if stats.tokens is None else _tokens)
        figure_panels = list(figure.subplots(2, 3).flat)
        for axes, panel in zip_longest(figure_panels, panels):
            if panel is None:
                axes.set_axis_off()
            else:
                panel(axes, stats)
        png = io.BytesIO()
        figure.savefig(png, format="png")
    return png.getvalue()


def _objects(panel: Axes, stats: DataStats) -> None:
    panel.set(title="Objects per sample", xlabel="objects", ylabel="samples")
    most = int(stats.objects.max())
    step = -(-(most + 1) // _BINS)
    edges = np.arange(0, most + step + 1, step) - 0.5
    panel.hist(stats.objects, edges.tolist(), color=_BARS, rwidth=0.9)
    panel.xaxis.set_major_locator(_whole())
    panel.yaxis.set_major_locator(_whole())


def _descriptions(panel: Axes, stats: DataStats) -> None:
    listed = stats.descriptions.most_common(_LISTED)
    shown = f", the {_LISTED} most frequent" if len(stats.descriptions) > _LISTED else ""
    panel.set(title=f"{len(stats.descriptions)} descriptions{shown}", xlabel="objects")
    panel.barh(range(len(listed)), [count for _, count in listed], color=_BARS)
    texts = [short_name(name) for name, _ in listed]
    panel.set_yticks(range(len(listed)), [text.text for text in texts])
    for label, text in zip(panel.get_yticklabels(), texts, strict=True):
        label.set_fontproperties(FontProperties(fname=text.font, size=9))
        label.set_parse_math(False)
    panel.invert_yaxis()
    panel.grid(axis="y", visible=False)
    panel.xaxis.set_major_locator(_whole())


def short_name(name: str) -> Drawable:
    """A description as the picture has it, cut after what no font holds is spelt."""
    return shortened(name, lambda drawn: len(drawn.text) <= _LONGEST_NAME)


def _sizes(panel: Axes, stats: DataStats) -> None:
    panel.set(xlabel="square root of the area, pixels; lines as in COCO", ylabel="objects")
    sides = np.sqrt(stats.areas[stats.areas > 0])
    _log_histogram(panel, sides)
    for side in COCO_SIDES:
        panel.axvline(side, color=_LIMIT, linestyle="--", linewidth=1)
    small, large = (float((stats.areas < side**2).mean()) for side in COCO_SIDES)
    panel.set_title(f"Boxes: {small:.0%} small, {large - small:.0%} medium, {1 - large:.0%} large")


def _centres(panel: Axes, stats: DataStats) -> None:
    panel.set(
        title="Centres of the boxes",
        xlabel="x, share of the width",
        ylabel="y, share of the height",
    )
    _, _, _, image = panel.hist2d(
        stats.centres[:, 0],
        stats.centres[:, 1],
        bins=20,
        range=[[0, 1], [0, 1]],
        cmap=_SHADES,
        cmin=1,
    )
    panel.invert_yaxis()
    panel.figure.colorbar(image, ax=panel, label="objects", ticks=_whole())


def _aspects(panel: Axes, stats: DataStats) -> None:
    panel.set(title="Aspect of the boxes", xlabel="width / height", ylabel="objects")
    _log_histogram(panel, stats.aspects)
    panel.axvline(1, color="#888888", linestyle="--", linewidth=1)


def _image_sizes(panel: Axes, stats: DataStats) -> None:
    panel.set(title="Sizes of the images", xlabel="width, pixels", ylabel="height, pixels")
    sizes = np.array(list(stats.image_sizes))
    counts = np.array(list(stats.image_sizes.values()))
    areas = 20 + 280 * counts / counts.max()
    panel.scatter(sizes[:, 0], sizes[:, 1], areas, color=_BARS, alpha=0.5, linewidths=0)
    panel.set(xlim=(0, sizes[:, 0].max() * 1.1), ylim=(0, sizes[:, 1].max() * 1.1))


def _tokens(panel: Axes, stats: DataStats) -> None:
    tokens = stats.tokens
    assert tokens is not None
    panel.set(title="Tokens of a sample", xlabel="tokens", ylabel="samples")
    whole = tokens.target if tokens.prompt is None else tokens.prompt + tokens.target
    edges = np.linspace(0, float(whole.max()) * 1.02, _BINS).tolist()
    panel.hist(tokens.target, edges, color=_LIGHT, label="target")
    if tokens.prompt is not None:
        panel.hist(whole, edges, color=_BARS, histtype="step", label="prompt and target")
    if tokens.limits is not None:
        panel.axvline(tokens.limits.answer, color=_LIMIT, linestyle=":", label="max_new_tokens")
        if tokens.limits.pack is not None:
            panel.axvline(
                tokens.limits.pack, color=_LIMIT, linestyle="--", label="global_max_length"
            )
    panel.yaxis.set_major_locator(_whole())
    panel.legend(edgecolor="none", framealpha=0.9)


def _log_histogram(panel: Axes, values: FloatArray) -> None:
    """Bars of equal width on a logarithmic axis."""
    if not values.size:
        return
    low, high = values.min() * 0.95, values.max() * 1.05
    panel.hist(values, np.geomspace(low, high, _BINS).tolist(), color=_BARS)
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_major_locator(_whole())


def _whole() -> MaxNLocator:
    """Ticks at whole numbers."""
    return MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10])
