"""What holds of every answer format: any ids are read, continued, closed and read back."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from learner.stages.formats import AnswerFormat
from learner.stages.formats.compact import COMPACT
from learner.stages.formats.coord_json import COORD_JSON
from learner.stages.formats.objects_array import HEAD, OBJECTS_ARRAY
from learner.stages.targets import build_ground_truth_target
from learner.stages.tokens import IM_END, Tokenizer, encode_answer, token_table
from learner.types import FieldOrder, GroundTruthObject
from shared_contracts.repeat_guard import ENTRY_CONTEXTS, entry_token_ids
from tests.unit import test_compact_format, test_objects_array
from tests.unit.answers import encode, ground_truths, rollouts, text_of


class Case(NamedTuple):
    """rollouts: ids of answers that are more or less broken. head: how an answer begins."""

    name: str
    answers: AnswerFormat
    rollouts: Callable[[Tokenizer], st.SearchStrategy[list[int]]]
    head: str


CASES = [
    Case("object_keys", COORD_JSON, rollouts, "{"),
    Case("objects_array", OBJECTS_ARRAY, test_objects_array.answers, HEAD),
    Case("compact", COMPACT, test_compact_format.answers, ""),
]
each_format = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
TRUTHS = st.lists(ground_truths(allow_poly=True), max_size=5)
ORDERS = st.sampled_from(["desc_first", "geometry_first"])


def test_every_format_is_here() -> None:
    assert [case.name for case in CASES] == list(ENTRY_CONTEXTS)


@pytest.mark.req("FMT-01", "PARSE-07")
@each_format
@given(data=st.data(), headed=st.booleans())
def test_no_ids_raise(
    data: st.DataObject, headed: bool, case: Case, tokenizer: PreTrainedTokenizerFast
) -> None:
    """The same ids give the same, and the prefix of an answer holds its objects."""
    ids = data.draw(st.lists(st.integers(-2, len(tokenizer) + 5), max_size=30))
    ids = encode(tokenizer, case.head) * headed + ids
    parsed = case.answers.parse(ids, tokenizer)
    assert case.answers.parse(ids, tokenizer) == parsed
    again = case.answers.parse(parsed.prefix_token_ids, tokenizer)
    assert [o.coords for o in again.objects] == [o.coords for o in parsed.objects]


@pytest.mark.req("FMT-01", "APPEND-01", "APPEND-02")
@each_format
@given(data=st.data(), truths=TRUTHS, order=ORDERS)
def test_any_prefix_is_continued_and_read_back(
    data: st.DataObject,
    truths: list[GroundTruthObject],
    order: FieldOrder,
    case: Case,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    parsed = case.answers.parse(data.draw(case.rollouts(tokenizer)), tokenizer)
    text = text_of(tokenizer, parsed.prefix_token_ids)
    first = parsed.max_object_index + 1
    ids = [
        *parsed.prefix_token_ids,
        *encode_answer(tokenizer, case.answers.append(text, truths, first, order)),
        token_table(tokenizer).vocab.end_id,
    ]
    found = case.answers.read_back(ids, tokenizer)
    assert found is not None
    assert [(o.desc, o.shape) for o in found.parsed.objects] == [
        *((o.desc, o.shape) for o in parsed.objects),
        *((o.desc, o.shape) for o in truths),
    ]
    appended = found.parsed.objects[len(parsed.objects) :]
    assert [o.index for o in appended] == [first + i for i in range(len(truths))]
    assert not found.parsed.truncated
    assert len(found.spans) == len(found.parsed.entry_ends)
    closing = case.answers.append(text, [], first, order)
    assert text_of(tokenizer, [ids[p] for p in found.closure]).endswith(closing[-1] + IM_END)


@pytest.mark.req("FMT-01", "CHA-01", "REP-01")
@each_format
@given(truths=TRUTHS, order=ORDERS)
def test_the_ground_truth_is_written_and_its_entries_are_counted(
    truths: list[GroundTruthObject],
    order: FieldOrder,
    case: Case,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """The guard counts as many entries as there are objects, whatever a description ends in."""
    target = build_ground_truth_target(truths, tokenizer, order, case.answers)
    ids = target.token_ids
    assert text_of(tokenizer, ids) == case.answers.write(truths, order) + IM_END
    assert len(target.coord_groups) == len(truths)
    marker = entry_token_ids(partial(encode, tokenizer), case.name)
    windows = [ids[i : i + len(marker)] for i in range(len(ids))]
    assert windows.count(marker) == len(truths)
