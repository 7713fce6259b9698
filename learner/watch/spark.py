"""Numbers as a line of small bars."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Glyphs:
    """levels: from low to high. full, empty: of a bar. gap: a number that is none."""

    levels: str
    full: str
    empty: str
    gap: str
    dot: str

    @property
    def nothing(self) -> str:
        return self.levels[0]


BLOCKS = Glyphs("▁▂▃▄▅▆▇█", "━", "─", " ", "·")
ASCII = Glyphs("_.-=+*#", "=", "-", " ", "|")


def sparkline(values: Sequence[float | None], width: int, glyphs: Glyphs) -> str:
    """The last values, between their lowest and their highest; several to a bar if need be."""
    if width < 1 or not values:
        return ""
    bars = _averaged([v if v is None or math.isfinite(v) else None for v in values], width)
    known = [bar for bar in bars if bar is not None]
    if not known:
        return glyphs.gap * len(bars)
    low, span = min(known), max(known) - min(known)
    top = len(glyphs.levels) - 1

    def level(bar: float | None) -> str:
        if bar is None:
            return glyphs.gap
        return glyphs.levels[round((bar - low) / span * top) if span > 0 else 0]

    return "".join(map(level, bars))


def _averaged(values: Sequence[float | None], width: int) -> list[float | None]:
    """At most `width` means of neighbours."""
    each = math.ceil(len(values) / width)
    parts = [values[at : at + each] for at in range(0, len(values), each)]
    return [_mean([v for v in part if v is not None]) for part in parts]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def bar(share: float, width: int, glyphs: Glyphs) -> tuple[str, str]:
    """The full and the empty part of a bar; share: of 1."""
    full = round(max(0.0, min(1.0, share)) * width)
    return glyphs.full * full, glyphs.empty * (width - full)
