"""The objects and the token roles of a target, for any answer.

The roles are worked out a second time here, byte by byte, from how an answer was put together
and not from reading it again (APPEND-02, LOSS-01's roles, LOSS-02).
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from learner.stages.formats.coord_json import parse_rollout
from learner.stages.targets import build_target
from learner.stages.tokens import COORD_BINS, IM_END, coord_token, token_table
from learner.types import (
    FieldOrder,
    GroundTruthObject,
    MatchResult,
    ParsedObject,
    ParsedRollout,
    Role,
    Shape,
    Target,
)
from tests.unit.answers import BIRD, CAT, DESCRIPTIONS, DOG, ROOF, encode, text_of

FUZZ = settings(suppress_health_check=list(HealthCheck))
ORDERS: st.SearchStrategy[FieldOrder] = st.sampled_from(["desc_first", "geometry_first"])
SHAPES = st.sampled_from(
    [
        *(item.shape for item in (CAT, DOG, BIRD, ROOF)),
        Shape("bbox_2d", (7, 7, 7, 7)),
        Shape("poly", (0, 10, 999, 20, 700, 999, 300, 600, 12, 13)),
    ]
)
OBJECTS = st.builds(GroundTruthObject, DESCRIPTIONS, SHAPES)
TRUTHS = st.lists(OBJECTS, max_size=4)


@st.composite
def any_match(draw: st.DrawFn, n_predicted: int, n_truth: int) -> MatchResult:
    n_pairs = draw(st.integers(0, min(n_predicted, n_truth)))
    predicted = sorted(draw(st.permutations(range(n_predicted)))[:n_pairs])
    truths = draw(st.permutations(range(n_truth)))[:n_pairs]
    return MatchResult(
        pairs=list(zip(predicted, truths, strict=True)),
        false_positives=[i for i in range(n_predicted) if i not in predicted],
        false_negatives=[j for j in range(n_truth) if j not in truths],
        gated=0,
        mask_iou=np.full((n_predicted, n_truth), np.nan),
    )


@dataclass
class Owned:
    """A text with the owner of each of its bytes.

    An owner is a role of structure, of a description, FALSE_POSITIVE or CLOSURE. COORD follows
    from the token ids.
    """

    text: str = ""
    owners: list[Role] = field(default_factory=list)

    def write(self, text: str, owner: Role) -> None:
        self.text += text
        self.owners += [owner] * len(text.encode())


@dataclass
class Written:
    """An entry of an answer in parts: (text, whether it is the value of a description)."""

    parts: list[tuple[str, bool]]
    is_object: bool = True
    valid: bool = True

    def onto(self, owned: Owned, lead: str, structure: Role, desc: Role) -> None:
        owned.write(lead, structure)
        for text, is_desc in self.parts:
            owned.write(text, desc if is_desc else structure)


class Style(NamedTuple):
    comma: str = ", "
    colon: str = ": "
    quote: str = '"'
    ascii_only: bool = False


PLAIN = Style()


def write_object(
    index: int, item: GroundTruthObject, order: FieldOrder, style: Style = PLAIN
) -> Written:
    comma, colon, quote, ascii_only = style
    tokens = comma.join(f"{quote}{coord_token(k)}{quote}" for k in item.shape.coords)
    desc = [
        (f'"desc"{colon}"', False),
        (json.dumps(item.desc, ensure_ascii=ascii_only)[1:-1], True),
        ('"', False),
    ]
    geometry = [(f'"{item.shape.kind}"{colon}[{tokens}]', False)]
    first, last = (desc, geometry) if order == "desc_first" else (geometry, desc)
    parts = [(f'"object_{index}"{colon}{{', False), *first, (comma, False), *last, ("}", False)]
    return Written(parts)


def write_invalid(index: int, desc: str, style: Style) -> list[Written]:
    """Entries that the strict parser drops, the last of them with a value that is no object."""
    key, text = f'"object_{index}"{style.colon}', json.dumps(desc, ensure_ascii=False)
    return [
        Written([(f'{key}{{"desc"{style.colon}{text}}}', False)], valid=False),
        Written([(f'"thing{index}"{style.colon}{{}}', False)], valid=False),
        Written([(f"{key}{text}", False)], is_object=False, valid=False),
    ]


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[Written], str, str]:
    """Entries, the comma between them, and what comes after the last one."""
    style = Style(
        *draw(st.sampled_from([(", ", ": "), (",", ":"), (" ,\n", " : ")])),
        quote=draw(st.sampled_from(['"', ""])),
        ascii_only=draw(st.booleans()),
    )
    indices = draw(st.lists(st.integers(1, 30), max_size=4, unique=True))
    entries = [
        draw(st.sampled_from(write_invalid(index, draw(DESCRIPTIONS), style)))
        if draw(st.integers(0, 3)) == 0
        else write_object(index, draw(OBJECTS), draw(ORDERS), style)
        for index in indices
    ]
    tails = ["}", "", "},", " }", "}}", "}\n", ', "object_40": {"desc": "c', "}" + IM_END]
    return entries, style.comma, draw(st.sampled_from(tails))


@pytest.mark.req("LOSS-01", "LOSS-02", "LOSS-03", "APPEND-01", "APPEND-02", "APPEND-03")
@pytest.mark.req("OT-01", "PARSE-03", "PARSE-04", "PARSE-05", "RES-05")
@pytest.mark.scenario(
    "No valid predictions fall back to canonical GT order",
    "One malformed object does not block training",
    "Parse failures are visible without crashing",
    "Ambiguous coord-slot alignment excludes object from self-context supervision",
    "Closure-supervision brace target is the same brace used for injection",
    "Channel-B supervises top-level closure and `<|im_end|>`",
    "Channel-B uses geometry-first for FN append when configured",
    "Default desc-first behavior is preserved in both channels",
    "geometry-first does not change rollout appearance order handling",
    "Truncated rollout tail is trimmed (suffix-only) and training proceeds",
)
@FUZZ
@given(data=st.data())
def test_each_token_has_the_role_of_its_characters_wherever_the_text_is_split(
    tokenizer: PreTrainedTokenizerFast, data: st.DataObject
) -> None:
    """A real tokenizer splits the text, then splits at any bytes are drawn."""
    entries, comma, tail = data.draw(answers())
    check_roles(data, tokenizer, encode(tokenizer, written(entries, comma, tail)), entries, comma)
    names = data.draw(splits(written(entries, comma, tail)))
    made = tokenizer_of(names)
    vocab = made.get_vocab()
    check_roles(data, made, [vocab[name] for name in names], entries, comma)


def written(entries: list[Written], comma: str, tail: str) -> str:
    return "{" + comma.join("".join(part for part, _ in e.parts) for e in entries) + tail


@st.composite
def splits(draw: st.DrawFn, text: str) -> list[str]:
    """The text as names of byte-level tokens, split at any bytes but inside special tokens.

    Half of the texts are split behind closing braces only, so that tokens are long and end in one.
    """
    rng = random.Random(draw(st.integers(0, 2**32)))
    behind_braces, share = draw(st.booleans()), draw(st.sampled_from([0.1, 0.5]))
    names = []
    for part in re.split(SPECIAL, text):
        if re.fullmatch(SPECIAL, part):
            names.append(part)
        elif part:
            name = "".join(BYTE_NAMES[byte] for byte in part.encode())
            places = [i for i in range(1, len(name)) if not behind_braces or name[i - 1] == "}"]
            bounds = [0, *(place for place in places if rng.random() < share), len(name)]
            names += [name[start:end] for start, end in pairwise(bounds)]
    return names


# The character by which a byte-level tokenizer names each byte.
BYTE_NAMES = bytes_to_unicode()
SPECIAL = r"(<\|coord_[0-9]+\|>|<\|im_end\|>)"


def tokenizer_of(names: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a token of each name, which it also gives to other texts."""
    vocab = {name: i for i, name in enumerate(sorted(BYTE_NAMES.values()))}
    merges = []
    for name in names:
        for end in range(2, len(name) + 1 if not re.fullmatch(SPECIAL, name) else 2):
            if name[:end] not in vocab:
                vocab[name[:end]] = len(vocab)
                merges.append((name[: end - 1], name[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([coord_token(k) for k in range(COORD_BINS)])
    tokenizer.add_special_tokens([IM_END])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=IM_END)


def check_roles(
    data: st.DataObject,
    tokenizer: PreTrainedTokenizerFast,
    ids: list[int],
    entries: list[Written],
    comma: str,
) -> None:
    """Whatever matches, the roles of a target are those of the bytes of its tokens.

    Every ground truth is taught once, where its object stands.
    """
    parsed = parse_rollout(ids, tokenizer)
    truths, order = data.draw(TRUTHS), data.draw(ORDERS)
    match = data.draw(any_match(len(parsed.objects), len(truths)))
    target = build_target(parsed, truths, match, tokenizer, order)

    kept = kept_entries(entries, parsed)
    owned = Owned()
    matched = iter([i in dict(match.pairs) for i in range(len(parsed.objects))])
    lead = "{"
    for entry in kept:
        if entry.valid and next(matched):
            entry.onto(owned, lead, Role.MATCHED_STRUCTURE, Role.MATCHED_DESC)
        else:
            entry.onto(owned, lead, Role.FALSE_POSITIVE, Role.FALSE_POSITIVE)
        lead = comma
    lead = ", " if kept else "{"
    for key, item in zip(target.fn_keys, [truths[j] for j in match.false_negatives], strict=True):
        written = write_object(int(key.removeprefix("object_")), item, order)
        written.onto(owned, lead, Role.APPENDED_STRUCTURE, Role.APPENDED_DESC)
        lead = ", "
    if lead == "{":
        owned.write("{", Role.APPENDED_STRUCTURE)
    owned.write("}" + IM_END, Role.CLOSURE)
    check_groups(tokenizer, target, parsed, truths, match)
    assert target.token_ids[: target.prefix_len] == parsed.prefix_token_ids
    assert text_of(tokenizer, target.token_ids) == owned.text
    assert [Role(role) for role in target.role] == roles_by_bytes(
        tokenizer, target.token_ids, owned.owners
    )


def check_groups(
    tokenizer: PreTrainedTokenizerFast,
    target: Target,
    parsed: ParsedRollout,
    truths: list[GroundTruthObject],
    match: MatchResult,
) -> None:
    """A group for each pair, then for each missed truth, at the coordinates that are written."""
    bins = token_table(tokenizer).vocab.bins
    pairs: list[tuple[ParsedObject | None, GroundTruthObject]]
    pairs = [(parsed.objects[i], truths[j]) for i, j in match.pairs]
    pairs += [(None, truths[j]) for j in match.false_negatives]
    positions = [p for group in target.coord_groups for p in group.positions]
    assert len(set(positions)) == len(positions)
    for group, (found, truth) in zip(target.coord_groups, pairs, strict=True):
        stands = truth.shape if found is None else found.shape
        assert group.matched == (found is not None)
        assert tuple(bins[target.token_ids[p]] for p in group.positions) == stands.coords
        assert group.is_box == (stands.kind == truth.shape.kind == "bbox_2d")
        assert group.bins == truth.shape.coords or (found is not None and not group.is_box)
        assert len(group.bins) == len(group.positions)
        assert all(0 <= k <= 999 for k in group.bins)
        if found is not None:
            assert group.positions == tuple(found.coord_token_indices)


def kept_entries(entries: list[Written], parsed: ParsedRollout) -> list[Written]:
    """Return the entries before the cut, which follows the last one with an object."""
    n_kept = max((i for i, entry in enumerate(entries, start=1) if entry.is_object), default=0)
    assert n_kept == len(parsed.entry_ends)
    assert sum(entry.valid for entry in entries[:n_kept]) == len(parsed.objects)
    return entries[:n_kept]


def roles_by_bytes(
    tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int], owners: Sequence[Role]
) -> list[Role]:
    """Role of each token from the owners of its bytes, the strictest of them.

    A byte-level tokenizer names a token by one character for each of its bytes.
    """
    bins = token_table(tokenizer).vocab.bins
    names = tokenizer.convert_ids_to_tokens(list(token_ids))
    roles = []
    start = 0
    for token_id, name in zip(token_ids, names, strict=True):
        holds = {*owners[start : start + len(name)], *([Role.COORD] if token_id in bins else [])}
        roles.append(next(role for role in STRICTEST_FIRST if role in holds))
        start += len(name)
    assert start == len(owners)
    return roles


STRICTEST_FIRST = (
    Role.CLOSURE,
    Role.FALSE_POSITIVE,
    Role.COORD,
    Role.MATCHED_DESC,
    Role.APPENDED_DESC,
    Role.MATCHED_STRUCTURE,
    Role.APPENDED_STRUCTURE,
)
