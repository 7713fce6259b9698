"""The scores of the arms over the optimizer steps as one picture."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.method_parts.records import Run, curves
from benchmarks.picture_style import STYLE
from benchmarks.png import small_png

# Of the picture's palette: a third of the bytes of one without.
COLOURS = 128
PANELS = {"f1_miou": "F1@mIoU", "recall": "Recall", "duplicates": "Duplicates an answer"}
# Okabe and Ito's colours, and for who sees none of them, dashes.
LINES: Sequence[tuple[str, Any]] = (
    ("#000000", "-"),
    ("#D55E00", "--"),
    ("#E69F00", (0, (1, 1))),
    ("#0072B2", "-."),
    ("#009E73", (0, (5, 1, 1, 1, 1, 1))),
)


def curves_png(runs: Sequence[Run], titles: Mapping[str, str]) -> bytes:
    """Mean of the seeds as a line and least to most as a band; PNG of 1430 x 550 pixels.

    titles: of the arms that are drawn, by their keys, at most as many as `LINES`.
    """
    with rc_context(STYLE | {"font.size": 10, "axes.titlesize": 11}):
        figure = Figure(figsize=(13, 5), dpi=110, layout="constrained")
        panels = figure.subplots(1, len(PANELS))
        for panel, (score, name) in zip(panels, PANELS.items(), strict=True):
            _panel(panel, name, score, runs, titles)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        return small_png(figure, COLOURS)


def _panel(
    panel: Axes, name: str, score: str, runs: Sequence[Run], titles: Mapping[str, str]
) -> None:
    panel.set(title=name, xlabel="optimizer steps after the common checkpoint")
    for (colour, dashes), (arm, title) in zip(LINES, titles.items(), strict=False):
        steps, scores = curves(runs, arm, score)
        if scores:
            seeds = list(zip(*scores, strict=True))
            means = [statistics.fmean(at) for at in seeds]
            panel.fill_between(
                steps, [min(at) for at in seeds], [max(at) for at in seeds], color=colour, alpha=0.1
            )
            panel.plot(steps, means, color=colour, linestyle=dashes, linewidth=2, label=title)
    panel.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 4, 5, 10]))
