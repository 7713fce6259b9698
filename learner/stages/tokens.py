"""Coordinate tokens, and the interface between the pure stages and a tokenizer."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from learner.types import COORD_BINS as COORD_BINS
from shared_contracts.errors import ContractError

IM_END = "<|im_end|>"

# Qwen's tokens that the model replaces by pixels.
PLACEHOLDERS = ("<|image_pad|>", "<|video_pad|>")

# The text of bytes that are only part of a character.
HALF_CHARACTER = "\ufffd"

# Largest id that a fast tokenizer can decode.
MAX_TOKEN_ID = 2**32 - 1


def encode_bin(c: float) -> int:
    """Return the bin of a normalized coordinate: `clamp(round(999 * c), 0, 999)` (DATA-02).

    Bin 0 is the left or top edge of the image, bin 999 the right or bottom edge.
    """
    return round((COORD_BINS - 1) * min(max(c, 0.0), 1.0))


def decode_bin(k: int) -> float:
    """Return the normalized coordinate in [0, 1] of bin `k`: `k / 999`."""
    return k / (COORD_BINS - 1)


def coord_token(k: int) -> str:
    return f"<|coord_{k}|>"


class Tokenizer(Protocol):
    """The part of a tokenizer that the pure stages use; fast ones of transformers implement it.

    `decode` gives a str and `convert_tokens_to_ids` an int (or None for no such token);
    the types are open because transformers declares unions with lists.
    """

    def decode(
        self,
        token_ids: list[int],
        /,
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> Any: ...

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]: ...

    def convert_tokens_to_ids(self, tokens: str, /) -> Any: ...

    def convert_ids_to_tokens(self, ids: int, /) -> Any:
        """Return the token of one id; a byte-level tokenizer writes each byte as one character."""


def decode_exactly(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    text: str = tokenizer.decode(
        token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def encode_answer(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of the text of an answer; each newline is a token of its own.

    A BPE joins punctuation with a newline behind it (Qwen: `!\\n`). A description would then share
    a token with the end of its line, which the repeat guard counts.
    """
    parts = split_newlines(text)
    return [each for part in parts for each in tokenizer.encode(part, add_special_tokens=False)]


def split_newlines(text: str) -> list[str]:
    return re.findall(r"\n|[^\n]+", text)


def spell_leading(tokenizer: Tokenizer, token_id: int, leading: str) -> list[int] | None:
    """Return ids that decode to exactly the leading text of a token, which ends in ASCII.

    None if there are none. A part of a character is encoded byte by byte, because its text is
    `HALF_CHARACTER` for any bytes.
    """
    if HALF_CHARACTER not in leading:
        ids = tokenizer.encode(leading, add_special_tokens=False)
        if decode_exactly(tokenizer, ids) == leading:
            return ids
    token = str(tokenizer.convert_ids_to_tokens(token_id))
    last = leading[-1]
    # A byte-level tokenizer writes an ASCII character as itself, and each other byte as one.
    leading_bytes = last.join(token.split(last)[: leading.count(last)]) + last
    byte_ids = [tokenizer.convert_tokens_to_ids(byte) for byte in leading_bytes]
    spelled = None not in byte_ids and decode_exactly(tokenizer, byte_ids) == leading
    return byte_ids if spelled else None


@dataclass(frozen=True)
class CoordVocab:
    """Ids of the coordinate tokens and of those at which an answer ends.

    ids: the id of `<|coord_k|>` at index k; 1000 distinct ids.
    end_id: of `<|im_end|>`, the EOS of every target.
    end_ids: that one, and those of `PLACEHOLDERS` where the tokenizer has them.
    bins: bin of each coordinate id.
    """

    ids: list[int]
    end_id: int
    end_ids: frozenset[int]
    bins: dict[int, int]

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> "CoordVocab":
        """Raises `ContractError` if a token is missing."""
        end_id = _single_id(tokenizer, IM_END)
        ids = [_single_id(tokenizer, coord_token(k)) for k in range(COORD_BINS)]
        seen = [_find_id(tokenizer, token) for token in PLACEHOLDERS]
        end_ids = frozenset(end for end in (end_id, *seen) if end is not None)
        return cls(ids, end_id, end_ids, {token_id: k for k, token_id in enumerate(ids)})

    def coords_of(self, token_ids: Sequence[int]) -> list[int]:
        return list(compress(range(len(token_ids)), map(self.bins.__contains__, token_ids)))


def _find_id(tokenizer: Tokenizer, token: str) -> int | None:
    """Return the id of a token; None if there is none, or it maps to a default."""
    token_id: int | None = tokenizer.convert_tokens_to_ids(token)
    if token_id is None or decode_exactly(tokenizer, [token_id]) != token:
        return None
    return token_id


def _single_id(tokenizer: Tokenizer, token: str) -> int:
    token_id = _find_id(tokenizer, token)
    if token_id is None:
        raise ContractError(
            "model.model",
            f"its tokenizer has no token {token}",
            "Use a model with the 1000 coordinate tokens and <|im_end|>; "
            "`learner toy make-model --expand-vocab DIR` adds the coordinate tokens",
        )
    return token_id


class TokenTable:
    """Text of each token id on its own, and the coordinate vocabulary, of one tokenizer.

    It holds no reference to the tokenizer, so that both are freed together.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocab = CoordVocab.from_tokenizer(tokenizer)
        self._pieces: dict[int, str] = {}

    def pieces(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
        """Return the text of each id, decoded alone; "" for an id outside of the vocabulary.

        tokenizer: the one that the table is of.
        """
        known = self._pieces
        try:
            return list(map(known.__getitem__, token_ids))
        except KeyError:
            for token_id in set(token_ids).difference(known):
                exists = 0 <= token_id <= MAX_TOKEN_ID
                known[token_id] = decode_exactly(tokenizer, [token_id]) if exists else ""
            return self.pieces(token_ids, tokenizer)


_TABLES: WeakKeyDictionary[Tokenizer, TokenTable] = WeakKeyDictionary()


def token_table(tokenizer: Tokenizer) -> TokenTable:
    """Return the table of a tokenizer, built at its first use.

    Raises `ContractError` if the tokenizer lacks coordinate tokens or `<|im_end|>`.
    """
    if tokenizer not in _TABLES:
        _TABLES[tokenizer] = TokenTable(tokenizer)
    return _TABLES[tokenizer]


class Edit(NamedTuple):
    """Replaces the characters [start, end), at least one, by `text`."""

    start: int
    end: int
    text: str


class TokenText:
    """Text of tokens; places are offsets into it.

    pieces: text of each token alone.
    text: all of them in a row.
    """

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces
        self.text = "".join(pieces)
        self._starts = [0, *accumulate(map(len, pieces))]

    def start_of(self, token: int) -> int:
        """Return the place of the first character of a token; of the next index, the end."""
        return self._starts[token]

    def token_at(self, place: int) -> int:
        """Return the index of the token with the character at `place`; never one without text."""
        return bisect_right(self._starts, place) - 1

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Return the tokens, at least one, with a character in [start, end)."""
        found = range(self.token_at(start), self.token_at(end - 1) + 1)
        return [token for token in found if self.pieces[token]]

    def edited(
        self, token_ids: Sequence[int], edits: Sequence[Edit], tokenizer: Tokenizer
    ) -> list[int]:
        """Return the ids of these tokens after edits of their text.

        edits: in order; none overlaps another.

        A token whose text stays keeps its id. If an edit replaces a part of a token, the rest of it
        is encoded again, together with the text beside it.
        """
        ids: list[int] = []
        part = ""  # new text of tokens that edits touch
        place = token = 0  # the first character behind `part`, and the first token behind its own
        for start, end, text in edits:
            first = self.token_at(start)
            if first >= token:
                part += self.text[place : self.start_of(token)]
                ids += [*tokenizer.encode(part, add_special_tokens=False), *token_ids[token:first]]
                part, place = "", self.start_of(first)
            part += self.text[place:start] + text
            place, token = end, self.token_at(end - 1) + 1
        part += self.text[place : self.start_of(token)]
        return [*ids, *tokenizer.encode(part, add_special_tokens=False), *token_ids[token:]]
