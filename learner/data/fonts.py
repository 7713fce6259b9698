"""Fonts that hold what descriptions are written in.

DejaVu Sans comes with matplotlib. Where it lacks a character, the fonts of the machine are
searched for one that holds the whole text; what none of them holds is spelt `\\u732b`, so that
nothing is drawn as an empty box.
"""

import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.font_manager import findSystemFonts
from matplotlib.ft2font import FT2Font


class Drawable(NamedTuple):
    """A text as it can be drawn. missing: characters that no font here holds."""

    text: str
    font: Path
    missing: frozenset[str]


@cache
def drawable(text: str) -> Drawable:
    """The text with a font for it; a break or control character becomes a blank."""
    text = "".join(" " if c.isspace() or unicodedata.category(c) == "Cc" else c for c in text)
    needed = {c for c in text if not _invisible(c)}
    for font in _fonts():
        if needed <= _characters(font):
            return Drawable("".join(c for c in text if c in needed), font, frozenset())
    default = _default_font()
    missing = frozenset(needed - _characters(default))
    spelt = (_spelt(c) if c in missing else c for c in text if c in needed)
    return Drawable("".join(spelt), default, missing)


def shortened(text: str, fits: Callable[[Drawable], bool], keep: int = 0) -> Drawable:
    """The text, or as much of its beginning as fits with an ellipsis, `keep` characters at least.

    What is judged is drawn: a character that is spelt takes its ten.
    """
    whole = drawable(text)
    if fits(whole):
        return whole

    def cut(length: int) -> Drawable:
        return drawable(f"{text[:length].rstrip()}…")

    too_long = bisect_left(range(len(text)), True, keep + 1, key=lambda n: not fits(cut(n)))
    return cut(too_long - 1)


def _invisible(character: str) -> bool:
    """Joiners and variation selectors: they change how others look, and fonts may lack them."""
    return unicodedata.category(character) == "Cf" or "\ufe00" <= character <= "\ufe0f"


def _spelt(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _default_font() -> Path:
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"


def _fonts() -> Iterator[Path]:
    yield _default_font()
    yield from _system_fonts()


@cache
def _system_fonts() -> tuple[Path, ...]:
    return tuple(sorted(map(Path, findSystemFonts())))


@cache
def _characters(font: Path) -> frozenset[str]:
    """What a font can draw at any size; nothing for bitmaps and for files that are no fonts."""
    try:
        face = FT2Font(str(font))
    except (OSError, RuntimeError):
        return frozenset()
    return frozenset(map(chr, face.get_charmap())) if face.scalable else frozenset()
