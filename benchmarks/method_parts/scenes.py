"""The same scenes under each arm: what was hit, invented, repeated and missed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from benchmarks.picture_style import STYLE
from benchmarks.png import small_png
from learner.analysis.evaluation.folder import read_answers
from learner.analysis.evaluation.scores import DUPLICATE_IOU, ScoredAnswer
from learner.runs.rollout_log import LoggedObject
from learner.stages.clean_prefix import repeats
from learner.stages.coords import decode_bin
from learner.types import GroundTruthObject

COLOURS = 128
HIT, FALSE, REPEATED, MISSED = "#009E73", "#D55E00", "#F0E442", "#56B4E9"
MEANINGS = {HIT: "hit", FALSE: "false", REPEATED: "repeats an earlier one", MISSED: "missed"}
# Shapes on a canvas, where there are any; boxes are compared exactly.
_RESOLUTION = 256


def scenes_png(folders: Mapping[str, Path], places: Sequence[int]) -> bytes:
    """A row for each scene and a column for each arm.

    folders: evaluations of the same samples, by the title of their arm. places: of the samples.
    """
    answers = {title: read_answers(folder) for title, folder in folders.items()}
    with rc_context(STYLE | {"font.size": 8, "axes.titlesize": 8, "axes.grid": False}):
        size = (1.7 * len(folders), 1.9 * len(places) + 0.5)
        figure = Figure(figsize=size, dpi=110, layout="constrained")
        grid = figure.subplots(len(places), len(folders), squeeze=False)
        for row, place in zip(grid, places, strict=True):
            for panel, (title, own) in zip(row, answers.items(), strict=True):
                _draw(panel, own[place])
                if place == places[0]:
                    panel.set_title(_wrapped(title))
        marks = [Rectangle((0, 0), 1, 1, fill=False, edgecolor=colour) for colour in MEANINGS]
        figure.legend(
            marks, [*MEANINGS.values()], loc="outside lower center", ncols=2, frameon=False
        )
        return small_png(figure, COLOURS)


def _draw(panel: Axes, answer: ScoredAnswer) -> None:
    panel.imshow(Image.open(answer.images[0]), extent=(0, 1, 1, 0), interpolation="nearest")
    panel.set_axis_off()
    said = [GroundTruthObject(o.desc, o.shape) for o in answer.parse.objects]
    hit = {p for p, _ in answer.hit_pairs}
    repeated = {*repeats(said, DUPLICATE_IOU, _RESOLUTION)}
    found = {g for _, g in answer.hit_pairs}
    for place, item in enumerate(answer.ground_truth):
        if place not in found:
            _box(panel, item, MISSED)
    for place, said_item in enumerate(answer.parse.objects):
        colour = HIT if place in hit else REPEATED if place in repeated else FALSE
        _box(panel, said_item, colour)


def _box(panel: Axes, item: LoggedObject, colour: str) -> None:
    """One that repeats another is dashed, so that both are seen."""
    x1, y1, x2, y2 = (decode_bin(bin_) for bin_ in item.coords)
    dashes: Any = (0, (3, 3)) if colour == REPEATED else "-"
    box = Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, edgecolor=colour, linewidth=1.8)
    box.set_linestyle(dashes)
    panel.add_patch(box)


def _wrapped(title: str) -> str:
    return title.replace(", ", ",\n")
