"""Character scanner over the tokens of an answer: where its entries begin and end.

An answer is one JSON object, `{"object_1": {...}, "object_2": {...}}`. The scanner reads
the text of each token once, in order, and keeps token positions with everything it finds.
It follows strings, escapes, braces and brackets; what an entry holds is for
`learner.parsing` to judge.

    {"object_1": {"desc": "cat", ...}, "object_2": {...}}
    ^            ^                  ^                   ^
    open_at      value_start        end          close_at

An entry lasts from the end of the one before it to the last character of its own value,
so the comma, the key and any garbage between two values belong to the later one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

WHITE_SPACE = " \t\n\r"

# An object holds one array; far more brackets than that need not be read.
MAX_BRACKETS = 16


class Spot(NamedTuple):
    """One character: index of its token, and its offset in the text of that token."""

    token: int
    offset: int


@dataclass(frozen=True)
class Entry:
    """One finished entry of the outermost object.

    key: as written between its quotes, "" where there is none.
    start: the opening quote of the key, or the first character of a value without one.
    value_start, end: first and last character of the value, both `start` where there is
        no value.
    is_object: the value is `{...}`.
    well_led: exactly one comma (none for the first entry), a key and a colon came before
        the value.
    strings, bare_coords, nested: of a well-led object only: the opening and closing quotes
        of each string in it, the coordinate tokens in it that stand outside of strings,
        and whether braces open inside it or brackets more than `MAX_BRACKETS` deep.
    """

    key: str
    start: Spot
    value_start: Spot
    end: Spot
    is_object: bool
    well_led: bool
    strings: list[tuple[Spot, Spot]]
    bare_coords: list[int]
    nested: bool


@dataclass
class _Draft:
    """An entry as far as it was read; plain_end: last character of a value so far."""

    key: str = ""
    start: Spot | None = None
    value_start: Spot | None = None
    plain_end: Spot | None = None
    well_led: bool = True
    strings: list[tuple[Spot, Spot]] = field(default_factory=list)
    bare_coords: list[int] = field(default_factory=list)
    brackets: int = 0
    nested: bool = False


class _Next(Enum):
    """What the outermost object expects next."""

    COMMA = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    REST_OF_VALUE = auto()


class Scanner:
    """Reads an answer token by token; see the module's docstring.

    open_at, close_at: the outermost braces, None until they come.
    entries: those that have ended, in order.
    """

    def __init__(self, pieces: Sequence[str], coord_positions: frozenset[int]) -> None:
        self.open_at: Spot | None = None
        self.close_at: Spot | None = None
        self.entries: list[Entry] = []
        self._pieces = pieces
        self._coord_positions = coord_positions
        self._depth = 0
        self._brackets = 0  # open ones at depth 1
        self._quote: Spot | None = None  # of the string we are in
        self._escaped = False
        self._next = _Next.KEY
        self._draft = _Draft()

    @property
    def unfinished_key(self) -> str | None:
        """Key of the entry in which the answer ended, None where there is none."""
        return None if self._draft.start is None else self._draft.key

    def scan(self) -> "Scanner":
        """Read all tokens, up to the end of the outermost object."""
        for token, piece in enumerate(self._pieces):
            if self._quote is not None:
                if not self._escaped and '"' not in piece and "\\" not in piece:
                    continue
            elif token in self._coord_positions:
                self._draft.bare_coords.append(token)
            for offset, char in enumerate(piece):
                if not self._read(char, token, offset):
                    return self
        return self

    def _read(self, char: str, token: int, offset: int) -> bool:
        """Read one character; false when nothing after it matters."""
        if self._quote is not None:
            self._read_in_string(char, token, offset)
        elif char in WHITE_SPACE:
            pass
        elif self._depth > 1:
            self._read_in_object(char, token, offset)
        elif self._depth == 1:
            self._read_between_objects(char, Spot(token, offset))
            return self.close_at is None
        elif char == "{":
            self.open_at = Spot(token, offset)
            self._depth = 1
        else:
            return False
        return True

    def _read_in_string(self, char: str, token: int, offset: int) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            assert self._quote is not None
            start, self._quote = self._quote, None
            if self._depth > 1:
                self._draft.strings.append((start, Spot(token, offset)))
            elif self._brackets == 0:
                self._end_outer_string(start, Spot(token, offset))

    def _read_in_object(self, char: str, token: int, offset: int) -> None:
        """A character at depth 2 or more, outside of strings."""
        if char == '"':
            self._quote = Spot(token, offset)
        elif char == "{":
            self._depth += 1
            self._draft.nested = True
        elif char == "}":
            self._depth -= 1
            if self._depth == 1 and self._brackets == 0:
                self._end_entry(Spot(token, offset), is_object=True)
                self._next = _Next.COMMA
        elif char == "[":
            self._draft.brackets += 1
            self._draft.nested |= self._draft.brackets > MAX_BRACKETS
        elif char == "]":
            self._draft.brackets -= 1

    def _read_between_objects(self, char: str, spot: Spot) -> None:
        """A character at depth 1, outside of strings."""
        if char == '"':
            self._quote = spot
        elif char == "{":
            self._open_object(spot)
        elif char == "}":
            self.close_at = spot
        elif char in "[]":
            self._brackets = max(self._brackets + (1 if char == "[" else -1), 0)
            self._take_plain_value(spot, spot)
        elif char == "," and self._brackets == 0:
            self._read_comma()
        elif char == ":" and self._next is _Next.COLON:
            self._next = _Next.VALUE
        else:
            self._take_plain_value(spot, spot)

    def _end_outer_string(self, start: Spot, end: Spot) -> None:
        """A string at depth 1 ended: a key, or a value that is no object."""
        if self._next in (_Next.VALUE, _Next.REST_OF_VALUE):
            self._take_plain_value(start, end)
            return
        self._draft.well_led &= self._next is _Next.KEY
        self._draft.key = text_between(self._pieces, start, end)
        self._draft.start = start
        self._next = _Next.COLON

    def _open_object(self, spot: Spot) -> None:
        self._depth = 2
        if self._brackets > 0:
            return
        self._draft.well_led &= self._next is _Next.VALUE
        self._draft.value_start = spot
        self._draft.start = self._draft.start or spot

    def _take_plain_value(self, start: Spot, end: Spot) -> None:
        """A part of a value that is no object, or garbage where no value can be."""
        if self._next not in (_Next.VALUE, _Next.REST_OF_VALUE):
            self._draft.well_led = False
            return
        self._draft.value_start = self._draft.value_start or start
        self._draft.plain_end = end
        self._next = _Next.REST_OF_VALUE

    def _read_comma(self) -> None:
        if self._draft.start is not None:
            self._end_entry(self._draft.plain_end or self._draft.start, is_object=False)
        elif self._next is not _Next.COMMA:
            self._draft.well_led = False
        self._next = _Next.KEY

    def _end_entry(self, end: Spot, is_object: bool) -> None:
        draft, self._draft = self._draft, _Draft()
        assert draft.start is not None
        self.entries.append(
            Entry(
                key=draft.key,
                start=draft.start,
                value_start=draft.value_start or draft.start,
                end=end,
                is_object=is_object,
                well_led=draft.well_led,
                strings=draft.strings,
                bare_coords=draft.bare_coords,
                nested=draft.nested,
            )
        )


def text_between(pieces: Sequence[str], start: Spot, end: Spot) -> str:
    """Text strictly between two characters."""
    if start.token == end.token:
        return pieces[start.token][start.offset + 1 : end.offset]
    head = pieces[start.token][start.offset + 1 :]
    middle = "".join(pieces[start.token + 1 : end.token])
    return head + middle + pieces[end.token][: end.offset]
