"""The guard against repeating sequences (section 4 of the contract)."""

import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from learner.stages.formats.coord_json import serialize_objects
from learner.types import GroundTruthObject, Shape
from shared_contracts.repeat_guard import RepeatGuard, RepeatTerminateConfig, entry_token_ids
from tests.unit.refusals import refused

KEY = (7, 8)


def enabled(**settings: Any) -> RepeatTerminateConfig:
    return RepeatTerminateConfig(enabled=True, **settings)


def verdicts(
    config: RepeatTerminateConfig, token_ids: Sequence[int], key: Sequence[int] = KEY
) -> list[bool]:
    guard = RepeatGuard(config, key)
    return [guard.push(token_id) for token_id in token_ids]


def repeats_now(config: RepeatTerminateConfig, seen: list[int], key: tuple[int, ...]) -> bool:
    """REP-02 read aloud: every rule by looking at the whole sequence again."""
    run = config.max_consecutive_token_repeats
    size, repeats = config.ngram_size, config.ngram_repeats
    if not config.enabled or len(seen) < config.min_new_tokens:
        return False
    if run and len(seen) >= run and len(set(seen[-run:])) == 1:
        return True
    if size and repeats and len(seen) >= size * repeats:
        tail = seen[-size * repeats :]
        if all(tail[i : i + size] == tail[:size] for i in range(0, len(tail), size)):
            return True
    keys = sum(tuple(seen[i : i + len(key)]) == key for i in range(len(seen)))
    return config.max_object_keys is not None and keys >= config.max_object_keys


@st.composite
def configs(draw: st.DrawFn) -> RepeatTerminateConfig:
    return RepeatTerminateConfig(
        enabled=draw(st.sampled_from([True, True, True, False])),
        min_new_tokens=draw(st.integers(0, 12)),
        max_consecutive_token_repeats=draw(st.integers(0, 5)),
        ngram_size=draw(st.integers(0, 4)),
        ngram_repeats=draw(st.sampled_from([0, 2, 3, 4])),
        max_object_keys=draw(st.none() | st.integers(1, 4)),
    )


@pytest.mark.req("ARCH-02", "REP-02", "REP-03")
@given(
    config=configs(),
    token_ids=st.lists(st.integers(0, 2), max_size=40),
    key=st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple),
)
def test_the_guard_agrees_with_a_scan_of_the_whole_sequence(
    config: RepeatTerminateConfig, token_ids: list[int], key: tuple[int, ...]
) -> None:
    guard, triggered = RepeatGuard(config, key), False
    for taken, token_id in enumerate(token_ids, 1):
        triggered = triggered or repeats_now(config, token_ids[:taken], key)
        assert guard.push(token_id) == triggered


@pytest.mark.req("ARCH-02", "REP-03")
def test_memory_is_bounded_by_the_block_and_not_by_the_sequence() -> None:
    """And with it the work for a token, which reads nothing else."""
    guard = RepeatGuard(enabled(ngram_size=4, ngram_repeats=9, max_object_keys=10**6), KEY)
    for token_id in range(3_000):
        guard.push(token_id)
    assert len(pickle.dumps(guard)) < 2_000


@pytest.mark.req("REP-01")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("min_new_tokens", -1),
        ("max_consecutive_token_repeats", -1),
        ("ngram_size", -1),
        ("ngram_repeats", 1),
        ("max_object_keys", 0),
    ],
)
def test_a_wrong_setting_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        RepeatTerminateConfig.model_validate({key: value})
    assert [error["loc"] for error in caught.value.errors()] == [(key,)]


@pytest.mark.req("REP-02")
@pytest.mark.parametrize("separator", ["", " ", "\n  "])
def test_keys_of_answers_count_once(tokenizer: PreTrainedTokenizerFast, separator: str) -> None:
    """Both tokenizers fuse the quote of a key with what stands before it."""
    encode = partial(tokenizer.encode, add_special_tokens=False)
    box = GroundTruthObject("red square", Shape("bbox_2d", (1, 2, 3, 4)))
    answer = serialize_objects([box] * 12, "desc_first").replace('"object_', separator + '"object_')
    config = enabled(max_object_keys=12)
    found = verdicts(config, encode(answer), entry_token_ids(encode, "object_keys"))
    before = str(tokenizer.decode(encode(answer)[: found.index(True) + 1]))
    assert before == answer[: answer.index('"object_12') + len('"object_')]


def test_counting_object_keys_needs_their_token_ids() -> None:
    with refused("object_key_token_ids"):
        RepeatGuard(enabled(max_object_keys=3), [])
    RepeatGuard(enabled(ngram_size=3), [])
