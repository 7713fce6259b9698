r"""Scanner over the text of an answer: where its entries begin and end.

An answer is one JSON object, `{"object_1": {...}, "object_2": {...}}` (`Scanner`), or the list in
one, `{"objects": [{...}, {...}]}` (`ListScanner`). A scanner reads its text once and keeps the
place of everything it finds, as an offset into that text (`learner.stages.tokens.TokenText` knows
the token of each offset). It goes from lexeme to lexeme: a string, a brace, a bracket, a comma, a
colon, or a run of anything else; what an entry holds is for the format to judge.

    {"object_1": {"desc": "cat", ...}, "object_2": {...}}
    ^            ^                  ^                   ^
    open_at      value_start        end          close_at

An entry lasts from the end of the one before it to the last character of its own value,
so the comma, the key and any garbage between two values belong to the later one.

    {"objects": [{"desc": "cat", ...}, {...}]}
                ^^                   ^       ^
          open_at value_start        end     close_at

The entries of a list have no key, and begin with their value.
"""

import re
from dataclasses import dataclass, field
from enum import Enum, auto

WHITE_SPACE = " \t\n\r"

# An object holds one array; far more brackets than that need not be read.
MAX_BRACKETS = 16

# Place of what has not come yet.
NOWHERE = -1

# All repeats are possessive, so no lexeme is read twice. Group 1 is the closing quote: a
# string without an end reaches to the end of the text, or to a last backslash.
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+(")?'
_WS = f"[{WHITE_SPACE}]*+"
_FIRST_BRACE = re.compile(rf"{_WS}\{{")
_LIST_HEAD = re.compile(rf'{_WS}\{{{_WS}"objects"{_WS}:{_WS}\[')
_LIST_END = re.compile(rf"\]{_WS}(?:(\}})|(.))?", re.DOTALL)
_BETWEEN_OBJECTS = re.compile(rf'{_STRING}|[{{}}\[\],:]|[^"{{}}\[\],:{WHITE_SPACE}]++', re.DOTALL)
_IN_OBJECT = re.compile(rf"{_STRING}|[{{}}\[\]]", re.DOTALL)


@dataclass(slots=True)
class Entry:
    """One entry of the outermost object or list; places are offsets into the text.

    key: as written between its quotes, "" where there is none.
    start: the opening quote of the key, or the first character of a value without one.
    value_start: the opening brace of a value that is an object, else `NOWHERE`.
    end: last character of the value, or of what stands in its place before the comma.
    is_object: the value is `{...}`.
    well_led: exactly one comma (none for the first entry), and in an object a key and a colon,
        came before the value.
    strings, nested: of a well-led object only: [start, end) of each string in it with its
        quotes, and whether braces open inside it or brackets more than `MAX_BRACKETS` deep.
    """

    key: str = ""
    start: int = NOWHERE
    value_start: int = NOWHERE
    end: int = NOWHERE
    is_object: bool = False
    well_led: bool = True
    strings: list[tuple[int, int]] = field(default_factory=list)
    nested: bool = False


class _Next(Enum):
    """What the outermost object expects next."""

    COMMA = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    REST_OF_VALUE = auto()


class Scanner:
    """Reads the text of an answer; see the module's docstring.

    open_at, close_at: the outermost braces, None until they come.
    entries: those that have ended, in order.
    unpaired: an object stands in brackets, or a bracket between objects closes none.
    """

    _head = _FIRST_BRACE
    _first = _Next.KEY

    def __init__(self, text: str) -> None:
        self.open_at: int | None = None
        self.close_at: int | None = None
        self.entries: list[Entry] = []
        self.unpaired = False
        self._text = text
        self._brackets = 0  # open ones between objects
        self._next = self._first
        self._draft = Entry()
        self._stopped = False

    @property
    def text_behind(self) -> bool:
        """Whether more than white space stands behind the closed object."""
        behind = "" if self.close_at is None else self._text[self.close_at + 1 :]
        return bool(behind.strip(WHITE_SPACE))

    @property
    def unfinished(self) -> Entry | None:
        """The entry in which the answer ended, None where there is none."""
        return None if self._draft.start == NOWHERE else self._draft

    def scan(self) -> "Scanner":
        """Read the text up to the end of the outermost object."""
        opening = self._head.match(self._text)
        if opening is None:
            return self
        position = opening.end()
        self.open_at = position - 1
        while not self._stopped:
            lexeme = _BETWEEN_OBJECTS.search(self._text, position)
            if lexeme is None:
                break
            position = self._read_between_objects(lexeme)
        return self

    def _read_between_objects(self, lexeme: re.Match[str]) -> int:
        """Read one lexeme, or a whole object; the place of the next one."""
        start, end = lexeme.span()
        char = self._text[start]
        if char == '"':
            if lexeme[1] is None:
                return len(self._text)
            if self._brackets == 0:
                self._end_outer_string(start, end)
        elif char == "{":
            return self._read_object(start)
        elif self._closes(char, start):
            self._stopped = True
        elif char == "," and self._brackets == 0:
            self._read_comma()
        elif char == ":" and self._next is _Next.COLON:
            self._draft.end = start
            self._next = _Next.VALUE
        else:
            if char in "[]":
                self.unpaired |= char == "]" and self._brackets == 0
                self._brackets = max(self._brackets + (1 if char == "[" else -1), 0)
            self._take_plain_value(start, end)
        return end

    def _closes(self, char: str, place: int) -> bool:
        """Whether the reading stops at this lexeme."""
        if char == "}":
            self.close_at = place
        return char == "}"

    def _read_object(self, start: int) -> int:
        """Read an object, of an entry or inside of brackets; the place after it."""
        draft = self._draft
        self.unpaired |= self._brackets > 0
        if self._brackets == 0:
            draft.well_led &= self._next is _Next.VALUE
            draft.value_start = start
            if draft.start == NOWHERE:
                draft.start = start
        depth = 1
        brackets = 0
        for lexeme in _IN_OBJECT.finditer(self._text, start + 1):
            if lexeme.lastindex:
                draft.strings.append(lexeme.span())
                continue
            char = lexeme[0]
            if char == "[":
                brackets += 1
                draft.nested |= brackets > MAX_BRACKETS
            elif char == "]":
                brackets -= 1
            elif char == "{":
                depth += 1
                draft.nested = True
            elif char == "}":
                depth -= 1
                if depth == 0:
                    return self._close_object(lexeme.start())
            else:  # a string without an end
                break
        return len(self._text)

    def _close_object(self, end: int) -> int:
        if self._brackets == 0:
            self._draft.is_object = True
            self._end_entry(end)
            self._next = _Next.COMMA
        return end + 1

    def _end_outer_string(self, start: int, end: int) -> None:
        """A string between objects ended: a key, or a value that is no object."""
        if self._next in (_Next.VALUE, _Next.REST_OF_VALUE):
            self._take_plain_value(start, end)
            return
        self._draft.well_led &= self._next is _Next.KEY
        self._draft.key = self._text[start + 1 : end - 1]
        self._draft.start = start
        self._draft.end = end - 1
        self._next = _Next.COLON

    def _take_plain_value(self, start: int, end: int) -> None:
        """A part of a value that is no object, or garbage where no value can be."""
        self._draft.end = end - 1
        if self._next in (_Next.VALUE, _Next.REST_OF_VALUE):
            self._next = _Next.REST_OF_VALUE
        else:
            self._draft.well_led = False

    def _read_comma(self) -> None:
        if self._draft.start != NOWHERE:
            self._end_entry(self._draft.end)
        elif self._next is not _Next.COMMA:
            self._draft.well_led = False
        self._next = self._first

    def _end_entry(self, end: int) -> None:
        self._draft.end = end
        self.entries.append(self._draft)
        self._draft = Entry()


class ListScanner(Scanner):
    """Reads an answer whose entries are the items of `{"objects": [...]}`.

    open_at: the opening bracket; None where the text does not begin like that.
    close_at: the outermost closing brace, right behind the list.

    Something else behind the list, or a brace in place of the bracket that ends it, is
    `unpaired` and an unfinished entry. Nothing is read behind it.
    """

    _head = _LIST_HEAD
    _first = _Next.VALUE

    def _closes(self, char: str, place: int) -> bool:
        if char == "]" and self._brackets == 0:
            ending = _LIST_END.match(self._text, place)
            assert ending is not None, "it begins with this bracket"
            if ending[1]:
                self.close_at = ending.start(1)
            return self._ends_wrongly(place) if ending[2] else True
        return char == "}" and self._ends_wrongly(place)

    def _ends_wrongly(self, place: int) -> bool:
        self.unpaired = True
        self._draft.start = place
        return True

    def _end_outer_string(self, start: int, end: int) -> None:
        self._take_plain_value(start, end)

    def _take_plain_value(self, start: int, end: int) -> None:
        if self._next is _Next.VALUE and self._draft.start == NOWHERE:
            self._draft.start = start
        super()._take_plain_value(start, end)
