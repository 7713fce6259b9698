"""Scenarios of strict parsing, the append and the roles of `Y_train` (seed 000).

Each runs on the toy tokenizer and on Qwen's own.
"""

import json
import subprocess
import sys

import pytest
from transformers import PreTrainedTokenizerFast

from learner.config.rollout_matching import MatchingConfig
from learner.matching import match_objects
from learner.parsing import parse_rollout
from learner.serialize import serialize_append
from learner.targets import build_target
from learner.tokens import token_table
from learner.types import FieldOrder, GroundTruthObject, ParsedRollout, Role, Target
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
    assert target.token_ids[-1] == token_table(tokenizer).vocab.im_end_id
    answer: dict[str, dict[str, object]] = json.loads(text_of(tokenizer, target.token_ids[:-1]))
    return answer


@pytest.mark.req("PARSE-06", "APPEND-01")
def test_highest_retained_object_key_controls_fn_start_even_when_object_is_invalid(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    broken = f'"object_9": {{"desc": "", "bbox_2d": {coords(1, 2, 3, 4)}}}'
    rollout = "{" + entry(2, "cat", CAT.shape.coords) + ", " + broken + "}"
    assert parse(tokenizer, rollout).max_object_index == 9
    target = train_on(tokenizer, rollout, CAT, DOG)
    assert target.fn_keys == ["object_10"]


@pytest.mark.req("APPEND-02", "MATCH-02")
def test_all_gt_is_appended_when_no_valid_matches_exist(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    for rollout in ("no object here", "{}", "{" + entry(1, "far", (990, 990, 999, 999)) + "}"):
        target = train_on(tokenizer, rollout, CAT, DOG)
        appended = [answer_of(tokenizer, target)[key] for key in target.fn_keys]
        assert [found["desc"] for found in appended] == ["cat", "red dog"]


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


@pytest.mark.req("PARSE-04")
def test_geometry_first_object_remains_valid_under_strict_parse(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    parsed = parse(tokenizer, f'{{"object_1": {{"bbox_2d": {coords(1, 2, 3, 4)}, "desc": "cat"}}}}')
    assert [(found.desc, found.coords) for found in parsed.objects] == [("cat", [1, 2, 3, 4])]
    assert parsed.dropped == []


@pytest.mark.req("PARSE-03")
def test_dict_keys_are_not_sorted_for_matching_order(tokenizer: PreTrainedTokenizerFast) -> None:
    parsed = parse(tokenizer, "{" + entry(10) + ", " + entry(2) + "}")
    assert [found.key for found in parsed.objects] == ["object_10", "object_2"]


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


@pytest.mark.req("LOSS-01", "APPEND-02")
def test_prefix_coord_tokens_can_be_supervised_without_supervising_prefix_text_tokens(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    ghost = entry(2, "ghost", (900, 900, 999, 999))
    target = train_on(tokenizer, "{" + CAT_ENTRY + ", " + ghost + "}", CAT, DOG)
    matched, appended = target.coord_groups
    assert (matched.matched, appended.matched) == (True, False)
    assert max(matched.positions) < target.prefix_len <= min(appended.positions)
    prefix = set(target.role[: target.prefix_len].tolist())
    assert prefix == {Role.MATCHED_STRUCTURE, Role.MATCHED_DESC, Role.COORD, Role.FALSE_POSITIVE}
    tail = set(target.role[target.prefix_len :].tolist())
    assert tail == {Role.APPENDED_STRUCTURE, Role.APPENDED_DESC, Role.COORD, Role.CLOSURE}


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
        "import sys, learner.parsing, learner.targets, learner.matching, learner.packing;"
        "assert not {'torch', 'transformers', 'learner.train', 'learner.step'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
