r"""Scanner over the text of an answer in JSON: where its entries begin and end.

An answer is one JSON object, `{"object_1": {...}, "object_2": {...}}`, or the list in one,
`{"objects": [{...}, {...}]}`. `JsonScanner` reads its text once and records the places of entries.
It goes from lexeme to lexeme: a string, a brace, a bracket, a comma, a colon, or a run of other
characters. The format judges the content of an entry.

    {"object_1": {"desc": "cat", ...}, "object_2": {...}}
    ^            ^                  ^                   ^
    open_at      value_start        end          close_at

An entry begins behind the entry before it, and ends with the last character of its own value. So
the comma, the key and any garbage between two values belong to the later entry.

    {"objects": [{"desc": "cat", ...}, {...}]}
                ^^                   ^       ^
          open_at value_start        end     close_at

The entries of a list have no key, and begin with their value. Other text than the outermost brace
behind the list, or a brace in the place of its closing bracket, is `unpaired` and an unfinished
entry. The scanner stops there.
"""

import re
from enum import Enum, auto

from learner.stages.formats.answer_text import NOWHERE, WHITE_SPACE, Entry, Scan

# An object holds one array; far more brackets than that need not be read.
MAX_BRACKETS = 16

# All repeats are possessive, so no lexeme is read twice. Group 1 is the closing quote: a
# string without an end reaches to the end of the text, or to a last backslash.
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+(")?'
_WS = f"[{WHITE_SPACE}]*+"
_FIRST_BRACE = re.compile(rf"{_WS}\{{")
_LIST_HEAD = re.compile(rf'{_WS}\{{{_WS}"objects"{_WS}:{_WS}\[')
_LIST_END = re.compile(rf"\]{_WS}(?:(\}})|(.))?", re.DOTALL)
_BETWEEN_OBJECTS = re.compile(rf'{_STRING}|[{{}}\[\],:]|[^"{{}}\[\],:{WHITE_SPACE}]++', re.DOTALL)
_IN_OBJECT = re.compile(rf"{_STRING}|[{{}}\[\]]", re.DOTALL)


class _Next(Enum):
    """What the outermost object or list expects next."""

    COMMA = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    REST_OF_VALUE = auto()


class JsonScanner:
    """Finds the entries of an answer.

    is_list: the entries are the items of `{"objects": [...]}`, not the values of an object.
    """

    def __init__(self, text: str, is_list: bool) -> None:
        self._text = text
        self._is_list = is_list
        self._first = _Next.VALUE if is_list else _Next.KEY
        self._found = Scan()
        self._brackets = 0  # open ones between objects
        self._next = self._first
        self._draft = Entry()
        self._stopped = False

    def scan(self) -> Scan:
        """Return the entries; `open_at` is None if the answer does not begin like one."""
        opening = (_LIST_HEAD if self._is_list else _FIRST_BRACE).match(self._text)
        if opening is None:
            return self._found
        position = opening.end()
        self._found.open_at = position - 1
        while not self._stopped and (lexeme := _BETWEEN_OBJECTS.search(self._text, position)):
            position = self._read_between_objects(lexeme)
        if self._draft.start != NOWHERE:
            self._found.unfinished = self._draft
        return self._found

    def _read_between_objects(self, lexeme: re.Match[str]) -> int:
        """Read one lexeme, or a whole object; return the place of the next one."""
        start, end = lexeme.span()
        char = self._text[start]
        if char == '"':
            if lexeme[1] is None:
                return len(self._text)
            if self._brackets == 0:
                self._end_outer_string(start, end)
        elif char == "{":
            return self._read_object(start)
        elif char == "}" or (char == "]" and self._is_list and self._brackets == 0):
            self._close(char, start)
        elif char == "," and self._brackets == 0:
            self._read_comma()
        elif char == ":" and self._next is _Next.COLON:
            self._draft.end = start
            self._next = _Next.VALUE
        else:
            if char in "[]":
                self._found.unpaired |= char == "]" and self._brackets == 0
                self._brackets = max(self._brackets + (1 if char == "[" else -1), 0)
            self._take_plain_value(start, end)
        return end

    def _close(self, char: str, place: int) -> None:
        """Stop at a brace or bracket that closes the answer, or is in the place of one."""
        self._stopped = True
        ending = _LIST_END.match(self._text, place)  # of a bracket
        if not self._is_list:
            self._found.close_at = place
        elif ending is not None and ending[1]:
            self._found.close_at = ending.start(1)
        elif ending is None or ending[2]:
            self._found.unpaired = True
            self._draft.start = place

    def _read_object(self, start: int) -> int:
        """Read an object, of an entry or inside of brackets; return the place after it."""
        draft = self._draft
        self._found.unpaired |= self._brackets > 0
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
            self._draft.has_shape = True
            self._end_entry(end)
            self._next = _Next.COMMA
        return end + 1

    def _end_outer_string(self, start: int, end: int) -> None:
        """Take a string between objects: a key, or a value that is no object."""
        if self._is_list or self._next in (_Next.VALUE, _Next.REST_OF_VALUE):
            self._take_plain_value(start, end)
            return
        self._draft.well_led &= self._next is _Next.KEY
        self._draft.key = self._text[start + 1 : end - 1]
        self._draft.start = start
        self._draft.end = end - 1
        self._next = _Next.COLON

    def _take_plain_value(self, start: int, end: int) -> None:
        """Take a part of a value that is no object, or garbage in the place of a value."""
        if self._next is _Next.VALUE and self._draft.start == NOWHERE:
            self._draft.start = start
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
        self._found.entries.append(self._draft)
        self._draft = Entry()
