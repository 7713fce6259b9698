"""The parts of the view that fit a terminal, one under the other or in two columns."""

from collections.abc import Sequence
from itertools import zip_longest

from rich.text import Text

from learner.watch import sections
from learner.watch.sections import Lines, Maker, Section
from learner.watch.spark import Glyphs
from learner.watch.watched import Watched

# From the most to the least important one: a low terminal shows the first.
_ONE_COLUMN: tuple[Maker, ...] = (
    sections.losses,
    sections.events,
    sections.times,
    sections.scores,
    sections.answers,
    sections.servers,
    sections.sync,
)
_LEFT: tuple[Maker, ...] = (sections.losses, sections.scores, sections.events)
_RIGHT: tuple[Maker, ...] = (sections.times, sections.answers, sections.servers, sections.sync)
_TWO_COLUMNS = 110
_GAP = 3


def frame(run: Watched, width: int, height: int | None, glyphs: Glyphs) -> Lines:
    """Lines of at most `width` cells, and at most `height` of them (None: all there are)."""
    width = max(1, width)
    top = [*sections.head(run, width, glyphs), Text()]
    room = None if height is None else max(0, height - len(top))
    if width < _TWO_COLUMNS:
        body = _column(_made(_ONE_COLUMN, run, width, glyphs), room)
    else:
        own = (width - _GAP) // 2
        left, right = (_column(_made(makers, run, own, glyphs), room) for makers in (_LEFT, _RIGHT))
        body = [_beside(a, b, own) for a, b in zip_longest(left, right, fillvalue=Text())]
    lines = [*top, *body][:height]
    for line in lines:
        line.truncate(width, overflow="crop")
    return lines


def _made(makers: Sequence[Maker], run: Watched, width: int, glyphs: Glyphs) -> list[Section]:
    found = [make(run, width, glyphs) for make in makers]
    return [section for section in found if section.lines]


def _beside(left: Text, right: Text, width: int) -> Text:
    line = left.copy()
    line.append(" " * (width - line.cell_len + _GAP))
    return line.append_text(right)


def _column(found: Sequence[Section], room: int | None) -> Lines:
    """Sections with their titles; where not all fit, every one is cut before the last go."""
    heights = [len(section.lines) for section in found]
    if room is not None:
        heights = _shared_out(found, room)
    lines: Lines = []
    for section, height in zip(found, heights, strict=True):
        if height:
            blank = [Text()] if lines else []
            lines += [*blank, Text(section.title, style="bold underline"), *section.lines[:height]]
    return lines if room is None else lines[:room]


def _shared_out(found: Sequence[Section], room: int) -> list[int]:
    """Lines of each section: the least of as many as fit, then the first ones get the rest."""
    heights = [0] * len(found)
    for place, section in enumerate(found):
        least = min(section.least, len(section.lines))
        if place == 0:  # also where it says too little
            least = max(0, min(least, room - 1))
        cost = least + 1 + (1 if any(heights) else 0)
        if cost <= room:
            heights[place], room = least, room - cost
    while room:
        before = room
        for place, section in enumerate(found):
            if room and 0 < heights[place] < len(section.lines):
                heights[place] += 1
                room -= 1
        if room == before:
            break
    return heights
