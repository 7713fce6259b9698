"""Scenarios of strict parsing, the append and the roles of `Y_train` (seed 000).

Each runs on the toy tokenizer and on Qwen's own.
"""

import json
import subprocess
import sys

import pytest
from transformers import PreTrainedTokenizerFast

from learner.config.rollout_matching import MatchingConfig
from learner.stages.formats.coord_json import parse_rollout, serialize_append
from learner.stages.matching import match_objects
from learner.stages.targets import build_target
from learner.stages.tokens import token_table
from learner.types import FieldOrder, GroundTruthObject, ParsedRollout, Target
from tests.unit.answers import BIRD, CAT, DOG, ROOF, coords, encode, entry, text_of

CAT_ENTRY = entry(1, "cat", CAT.shape.coords)
DOG_ENTRY = entry(3, "red dog", DOG.shape.coords)


def parse(tokenizer: PreTrainedTokenizerFast, text: str) -> ParsedRollout:
    return parse_rollout(encode(tokenizer, text), tokenizer)


def train_on(
    tokenizer: PreTrainedTokenizerFast,
    text: str,
    *truth: GroundTruthObject,
    order: FieldOrder = "desc_first",
) -> Target:
    """`Y_train` of a rollout whose text is `text`."""
    parsed = parse(tokenizer, text)
    match = match_objects(parsed.objects, truth, MatchingConfig())
    return build_target(parsed, truth, match, tokenizer, order)


def answer_of(tokenizer: PreTrainedTokenizerFast, target: Target) -> dict[str, dict[str, object]]:
    """What `Y_train` says, as JSON; its last token is the EOS."""
    assert target.token_ids[-1] == token_table(tokenizer).vocab.end_id
    answer: dict[str, dict[str, object]] = json.loads(text_of(tokenizer, target.token_ids[:-1]))
    return answer


@pytest.mark.req("APPEND-01")
def test_geometry_first_changes_only_per_object_field_order_in_fn_append(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rollout = "{" + entry(4, "far", (990, 990, 999, 999)) + "}"
    answers = [
        answer_of(tokenizer, train_on(tokenizer, rollout, CAT, ROOF, order=order))
        for order in ("desc_first", "geometry_first")
    ]
    assert answers[0] == answers[1]
    assert list(answers[0]) == list(answers[1]) == ["object_4", "object_5", "object_6"]
    assert [list(answers[1][key]) for key in ("object_5", "object_6")] == [
        ["bbox_2d", "desc"],
        ["poly", "desc"],
    ]


@pytest.mark.req("APPEND-01")
def test_desc_first_remains_baseline_append_layout() -> None:
    text = serialize_append("{", [CAT, ROOF], 1, "desc_first")
    assert text == (
        f'"object_1": {{"desc": "cat", "bbox_2d": {coords(*CAT.shape.coords)}}}, '
        f'"object_2": {{"desc": "roof", "poly": {coords(*ROOF.shape.coords)}}}}}'
    )


@pytest.mark.req("PARSE-04", "APPEND-02")
def test_one_malformed_object_does_not_block_training(tokenizer: PreTrainedTokenizerFast) -> None:
    rollout = "{" + ", ".join((CAT_ENTRY, entry(2, "wrong", (5, 6, 7)), DOG_ENTRY)) + "}"
    parsed = parse(tokenizer, rollout)
    assert [found.key for found in parsed.objects] == ["object_1", "object_3"]
    assert parsed.dropped == [("object_2", "wrong_arity")]
    target = train_on(tokenizer, rollout, CAT, DOG, BIRD)
    assert target.fn_keys == ["object_4"]
    assert [group.matched for group in target.coord_groups] == [True, True, False]


@pytest.mark.req("PARSE-05", "APPEND-02")
def test_truncated_rollout_tail_is_trimmed_suffix_only_and_training_proceeds(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    whole = encode(tokenizer, "{" + CAT_ENTRY + ", " + DOG_ENTRY + "}")
    for length in range(len(whole)):
        parsed = parse_rollout(whole[:length], tokenizer)
        cut = parsed.entry_ends[-1][0] if parsed.entry_ends else 0
        assert parsed.prefix_token_ids[:cut] == whole[:cut], "only the token of the cut is replaced"
        match = match_objects(parsed.objects, [CAT, DOG], MatchingConfig())
        target = build_target(parsed, [CAT, DOG], match, tokenizer, "desc_first")
        assert len(answer_of(tokenizer, target)) == 2
        assert len(target.fn_keys) == 2 - len(parsed.objects)


@pytest.mark.req("PARSE-03", "PARSE-04", "APPEND-02")
def test_ambiguous_coord_slot_alignment_excludes_object_from_self_context_supervision(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    # "<|coord_10|>" spelled with an escape is JSON text, but no coordinate token.
    written = coords(*CAT.shape.coords).replace("<|coord_10|>", "<|c\\u006ford_10|>")
    rollout = f'{{"object_1": {{"desc": "cat", "bbox_2d": {written}}}}}'
    parsed = parse(tokenizer, rollout)
    assert parsed.dropped == [("object_1", "non_coord_token")]
    target = train_on(tokenizer, rollout, CAT)
    assert target.fn_keys == ["object_2"]
    assert [group.matched for group in target.coord_groups] == [False]


@pytest.mark.req("PARSE-07", "APPEND-02")
def test_parse_failures_are_visible_without_crashing(tokenizer: PreTrainedTokenizerFast) -> None:
    rollout = '{"object_1": {"desc": 5}, "object_2": [1, 2], "cat": {}, "object_3": {"de'
    parsed = parse(tokenizer, rollout)
    assert parsed.objects == []
    assert [reason for _, reason in parsed.dropped] == [
        "missing_desc",
        "key_invalid",
        "key_invalid",
        "key_invalid",
    ]
    assert parsed.truncated
    assert len(train_on(tokenizer, rollout, CAT, DOG).fn_keys) == 2


@pytest.mark.req("ARCH-02")
def test_shared_parsing_contract_is_importable_without_trainer_class_dependency() -> None:
    check = (
        "import sys, learner.stages.formats.coord_json, learner.stages.targets;"
        "import learner.stages.matching;"
        "import learner.stages.packing;"
        "assert not {'torch', 'transformers', 'learner.training.train', 'learner.training.step'}"
        " & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
