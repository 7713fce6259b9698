"""`Y_train` and the role of each of its tokens (APPEND-02, LOSS-01's roles, LOSS-02)."""

import json
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from learner.config.rollout_matching import MatchingConfig
from learner.matching import match_objects
from learner.parsing import parse_rollout
from learner.targets import (
    ClosureNotFound,
    build_ground_truth_target,
    build_target,
    locate_closure,
)
from learner.tokens import IM_END, token_table
from learner.types import (
    FieldOrder,
    GroundTruthObject,
    MatchResult,
    Role,
    Shape,
    Target,
)
from tests.unit.answers import (
    BIRD,
    CAT,
    DOG,
    ROOF,
    coords,
    encode,
    entry,
    ground_truths,
    pieces,
    rollouts,
    text_of,
)

FUZZ = settings(max_examples=120, suppress_health_check=list(HealthCheck))


def matched(pairs: list[tuple[int, int]], n_predicted: int, n_truth: int) -> MatchResult:
    predicted, truths = {i for i, _ in pairs}, {j for _, j in pairs}
    return MatchResult(
        pairs=pairs,
        false_positives=[i for i in range(n_predicted) if i not in predicted],
        false_negatives=[j for j in range(n_truth) if j not in truths],
        gated=0,
        mask_iou=np.full((n_predicted, n_truth), np.nan),
    )


def target_of(
    tokenizer: PreTrainedTokenizerFast,
    rollout: str,
    truths: Sequence[GroundTruthObject],
    pairs: list[tuple[int, int]],
    order: FieldOrder = "desc_first",
    *,
    allow_poly: bool = True,
) -> Target:
    parsed = parse_rollout(encode(tokenizer, rollout), tokenizer, allow_poly=allow_poly)
    match = matched(pairs, len(parsed.objects), len(truths))
    return build_target(parsed, truths, match, tokenizer, order)


def runs(tokenizer: PreTrainedTokenizerFast, target: Target) -> list[tuple[str, str]]:
    """The target as (role, text) of neighbouring tokens of the same role."""
    labelled = zip(target.role, pieces(tokenizer, target.token_ids), strict=True)
    return [
        (Role(role).name, "".join(piece for _, piece in group))
        for role, group in groupby(labelled, key=lambda pair: pair[0])
    ]


def text_in(tokenizer: PreTrainedTokenizerFast, target: Target, *roles: Role) -> str:
    return "".join(
        piece
        for piece, role in zip(pieces(tokenizer, target.token_ids), target.role, strict=True)
        if role in roles
    )


def assistant_text(tokenizer: PreTrainedTokenizerFast, target: Target) -> str:
    return text_of(tokenizer, target.token_ids).removesuffix(IM_END)


# ---- what is taught ------------------------------------------------------------------


@pytest.mark.req("APPEND-02", "ARCH-02", "CHB-01")
def test_prefix_then_every_unmatched_truth_then_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    target = target_of(tokenizer, "{" + entry(1) + "}", [CAT, DOG], [(0, 0)])
    answer = json.loads(assistant_text(tokenizer, target))
    assert [(key, value["desc"]) for key, value in answer.items()] == [
        ("object_1", "cat"),
        ("object_2", "red dog"),
    ]
    assert target.token_ids[-1] == token_table(tokenizer).vocab.im_end_id
    assert target.fn_keys == ["object_2"]
    prefix = text_of(tokenizer, target.token_ids[: target.prefix_len])
    assert prefix == "{" + entry(1)


@pytest.mark.req("APPEND-02")
def test_all_truths_are_appended_when_nothing_matches(tokenizer: PreTrainedTokenizerFast) -> None:
    target = target_of(tokenizer, "{" + entry(1) + "}", [CAT, DOG, BIRD], [])
    assert target.fn_keys == ["object_2", "object_3", "object_4"]


@pytest.mark.req("APPEND-02", "PARSE-05")
@pytest.mark.parametrize("rollout", ["", "no brace", "{}", "{", '{"object_1": {"desc": "c'])
def test_a_rollout_without_objects_trains_on_all_truths(
    tokenizer: PreTrainedTokenizerFast, rollout: str
) -> None:
    target = target_of(tokenizer, rollout, [CAT, DOG], [])
    assert assistant_text(tokenizer, target) == (
        "{" + entry(1) + ", " + entry(2, "red dog", DOG.shape.coords) + "}"
    )
    assert target.prefix_len == 1


@pytest.mark.req("PARSE-06", "APPEND-01")
def test_new_keys_follow_the_largest_key_even_of_an_invalid_object(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rollout = "{" + entry(2) + ', "object_9": {"desc": "no box"}}'
    target = target_of(tokenizer, rollout, [CAT, DOG], [(0, 0)])
    assert target.fn_keys == ["object_10"]


@pytest.mark.req("APPEND-01")
def test_the_field_order_holds_for_what_is_appended_and_leaves_the_prefix_alone(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    target = target_of(tokenizer, "{" + entry(1) + "}", [CAT, DOG], [(0, 0)], "geometry_first")
    answer = json.loads(assistant_text(tokenizer, target))
    assert list(answer["object_1"]) == ["desc", "bbox_2d"]
    assert list(answer["object_2"]) == ["bbox_2d", "desc"]


# ---- roles ---------------------------------------------------------------------------


@pytest.mark.req("LOSS-01", "RES-05")
def test_roles_of_a_matched_a_false_and_an_appended_object(
    qwen_tokenizer: PreTrainedTokenizerFast,
) -> None:
    rollout = "{" + entry(1) + ", " + entry(2, "ghost", (1, 2, 3, 4)) + "}"
    target = target_of(qwen_tokenizer, rollout, [CAT, DOG], [(0, 0)])
    assert runs(qwen_tokenizer, target) == [
        ("MATCHED_STRUCTURE", '{"object_1": {"desc": "'),
        ("MATCHED_DESC", "cat"),
        ("MATCHED_STRUCTURE", '", "bbox_2d": ["'),
        ("COORD", "<|coord_10|>"),
        ("MATCHED_STRUCTURE", '", "'),
        ("COORD", "<|coord_20|>"),
        ("MATCHED_STRUCTURE", '", "'),
        ("COORD", "<|coord_300|>"),
        ("MATCHED_STRUCTURE", '", "'),
        ("COORD", "<|coord_400|>"),
        ("MATCHED_STRUCTURE", '"]'),
        # `},` is one token of both objects.
        ("FALSE_POSITIVE", "}, " + entry(2, "ghost", (1, 2, 3, 4))),
        ("APPENDED_STRUCTURE", ', "object_3": {"desc": "'),
        ("APPENDED_DESC", "red dog"),
        ("APPENDED_STRUCTURE", '", "bbox_2d": ["'),
        ("COORD", "<|coord_500|>"),
        ("APPENDED_STRUCTURE", '", "'),
        ("COORD", "<|coord_510|>"),
        ("APPENDED_STRUCTURE", '", "'),
        ("COORD", "<|coord_700|>"),
        ("APPENDED_STRUCTURE", '", "'),
        ("COORD", "<|coord_710|>"),
        ("APPENDED_STRUCTURE", '"]'),
        ("CLOSURE", "}}<|im_end|>"),
    ]


@pytest.mark.req("LOSS-01")
def test_a_token_between_two_matched_objects_is_structure(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rollout = "{" + entry(1) + ", " + entry(2, "red dog", DOG.shape.coords) + "}"
    target = target_of(tokenizer, rollout, [CAT, DOG], [(0, 0), (1, 1)])
    assert text_in(tokenizer, target, Role.FALSE_POSITIVE) == ""
    assert text_in(tokenizer, target, Role.CLOSURE) == "}" + IM_END
    kept = text_in(
        tokenizer, target, Role.MATCHED_STRUCTURE, Role.MATCHED_DESC, Role.COORD, Role.CLOSURE
    )
    assert kept == assistant_text(tokenizer, target) + IM_END


@pytest.mark.req("LOSS-01", "PARSE-04")
@pytest.mark.parametrize(
    "invalid",
    [
        '"object_1": {"desc": "no box"}',
        '"object_1": {"desc": "cat", "bbox_2d": ["<|coord_1|>"]}',
        '"object_1": 5',
        '"thing": {"desc": "cat"}',
    ],
)
def test_a_dropped_object_is_taught_nothing_and_the_opening_brace_goes_with_it(
    tokenizer: PreTrainedTokenizerFast, invalid: str
) -> None:
    target = target_of(tokenizer, "{" + invalid + ", " + entry(2) + "}", [CAT, DOG], [(0, 0)])
    false_text = text_in(tokenizer, target, Role.FALSE_POSITIVE)
    assert false_text.startswith("{" + invalid)
    # At most the punctuation that shares a token with the dropped entry.
    assert false_text.removeprefix("{" + invalid).strip(', "') == ""
    assert text_in(tokenizer, target, Role.MATCHED_DESC).strip(' "') == "cat"


@pytest.mark.req("LOSS-01")
@pytest.mark.parametrize("order", ["desc_first", "geometry_first"])
def test_every_token_with_a_character_of_a_description_is_description(
    tokenizer: PreTrainedTokenizerFast, order: FieldOrder
) -> None:
    truths = [
        GroundTruthObject(desc, CAT.shape) for desc in ("stop!", "toy 🚀", "a", "(car)", "🧿", "猫")
    ]
    target = build_ground_truth_target(truths, tokenizer, order)
    ids = np.array(target.token_ids)
    described = ids[target.role == Role.APPENDED_DESC].tolist()
    # The last description of geometry_first may share its token with the closing brace.
    described += ids[np.isin(target.role, [Role.CLOSURE])].tolist()
    text = text_of(tokenizer, described)
    for item in truths:
        assert item.desc in text
        text = text.replace(item.desc, "", 1)
    assert not any(char.isalnum() for char in text.replace(IM_END, ""))


@pytest.mark.req("LOSS-02", "RES-05")
def test_the_closing_brace_and_the_eos_are_closure_even_when_fused(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    fused = build_ground_truth_target([CAT], tokenizer, "desc_first")
    closing = pieces(tokenizer, fused.token_ids)[-2]
    assert closing.endswith("}}")
    assert fused.role[-2:].tolist() == [Role.CLOSURE, Role.CLOSURE]
    assert np.count_nonzero(fused.role == Role.CLOSURE) == 2
    alone = target_of(tokenizer, "{" + entry(1) + "}", [CAT], [(0, 0)])
    assert pieces(tokenizer, alone.token_ids)[-2] == "}"
    assert alone.role[-2:].tolist() == [Role.CLOSURE, Role.CLOSURE]
    assert np.count_nonzero(alone.role == Role.CLOSURE) == 2


@pytest.mark.req("LOSS-01", "PARSE-05")
def test_roles_hold_where_the_cut_replaced_a_token_by_several(
    toy_tokenizer: PreTrainedTokenizerFast,
) -> None:
    rollout = f'{{"object_1": {{"bbox_2d": {coords(*CAT.shape.coords)}, "desc": "stop!"}}}}'
    ids = encode(toy_tokenizer, rollout)
    assert pieces(toy_tokenizer, ids)[-1] == '!"}}'
    target = target_of(toy_tokenizer, rollout, [CAT, DOG], [(0, 0)])
    assert text_in(toy_tokenizer, target, Role.MATCHED_DESC).startswith("stop!")
    assert target.coord_groups[0].bins == CAT.shape.coords
    assert text_in(toy_tokenizer, target, Role.CLOSURE).endswith("}" + IM_END)


@pytest.mark.req("PARSE-04", "LOSS-01")
def test_a_polygon_that_the_two_channel_variant_drops_is_taught_nothing(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    roof = f'"object_1": {{"desc": "roof", "poly": {coords(*ROOF.shape.coords)}}}'
    target = target_of(tokenizer, "{" + roof + "}", [CAT], [], allow_poly=False)
    assert text_in(tokenizer, target, Role.FALSE_POSITIVE) == "{" + roof
    assert [group.bins for group in target.coord_groups] == [CAT.shape.coords]


# ---- coordinates ---------------------------------------------------------------------


@pytest.mark.req("LOSS-03", "CHB-01")
def test_matched_boxes_are_taught_the_truth_at_the_positions_of_the_prediction(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    predicted = (11, 22, 305, 390)
    ghost = entry(2, "ghost", (1, 2, 3, 4))
    rollout = "{" + entry(1, "cat", predicted) + ", " + ghost + "}"
    target = target_of(tokenizer, rollout, [DOG, CAT], [(0, 1)])
    first, second = target.coord_groups
    vocab = token_table(tokenizer).vocab
    assert first.matched
    assert first.bins == CAT.shape.coords
    assert tuple(vocab.bin_of(target.token_ids[p]) for p in first.positions) == predicted
    assert not second.matched
    assert second.bins == DOG.shape.coords
    assert tuple(vocab.bin_of(target.token_ids[p]) for p in second.positions) == second.bins
    supervised = set(first.positions) | set(second.positions)
    assert set(np.flatnonzero(target.role == Role.COORD).tolist()) == supervised


def test_an_appended_polygon_has_a_group_and_a_matched_one_has_none(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    roof = f'{{"object_1": {{"desc": "roof", "poly": {coords(*ROOF.shape.coords)}}}}}'
    appended = target_of(tokenizer, roof, [ROOF], [])
    assert [group.bins for group in appended.coord_groups] == [ROOF.shape.coords]
    for truth in (ROOF, BIRD):
        assert target_of(tokenizer, roof, [truth], [(0, 0)]).coord_groups == []


# ---- the whole answer from the ground truth ------------------------------------------


@pytest.mark.req("APPEND-01", "CHA-01")
@pytest.mark.parametrize("order", ["desc_first", "geometry_first"])
def test_the_ground_truth_target_is_the_whole_answer_in_order(
    tokenizer: PreTrainedTokenizerFast, order: FieldOrder
) -> None:
    target = build_ground_truth_target([DOG, CAT], tokenizer, order)
    answer = json.loads(assistant_text(tokenizer, target))
    assert {key: list(value) for key, value in answer.items()} == dict.fromkeys(
        ("object_1", "object_2"),
        ["desc", "bbox_2d"] if order == "desc_first" else ["bbox_2d", "desc"],
    )
    assert target.prefix_len == 0
    assert [(group.bins, group.matched) for group in target.coord_groups] == [
        (DOG.shape.coords, False),
        (CAT.shape.coords, False),
    ]
    assert set(target.role.tolist()) <= {
        Role.APPENDED_STRUCTURE,
        Role.APPENDED_DESC,
        Role.COORD,
        Role.CLOSURE,
    }


def test_a_scene_without_objects_teaches_the_empty_answer(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    target = build_ground_truth_target([], tokenizer, "desc_first")
    assert assistant_text(tokenizer, target) == "{}"
    assert target.role[-2:].tolist() == [Role.CLOSURE, Role.CLOSURE]
    after_rollout = target_of(tokenizer, "nothing here", [], [])
    assert runs(tokenizer, after_rollout) == [
        ("APPENDED_STRUCTURE", "{"),
        ("CLOSURE", "}" + IM_END),
    ]


# ---- closure -------------------------------------------------------------------------


@pytest.mark.req("LOSS-02")
@pytest.mark.parametrize(
    ("text", "closing"),
    [
        ("{}", "}"),
        ("{" + entry(1, "brace } in text") + "}", "}"),
        ('{"a": {"b": {}}, "c": "}"} } }', "}"),
    ],
)
def test_the_outermost_brace_is_found_by_depth(
    tokenizer: PreTrainedTokenizerFast, text: str, closing: str
) -> None:
    ids = [*encode(tokenizer, text), token_table(tokenizer).vocab.im_end_id]
    closure = locate_closure(ids, tokenizer)
    assert closure is not None
    brace, eos = closure
    assert eos == len(ids) - 1
    up_to_brace = "".join(pieces(tokenizer, ids[: brace + 1]))
    whole = text[: text.index("} }") + 1] if "} }" in text else text
    assert up_to_brace.rstrip(" }") == whole.rstrip(" }")
    assert closing in pieces(tokenizer, ids)[brace]
    assert json.loads(up_to_brace[: len(whole)]) is not None


@pytest.mark.req("LOSS-02")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "{" + entry(1),
        "{" + entry(1) + "}",
        "{" + entry(1) + IM_END,
        '{"object_1": {"desc": "}}' + IM_END,
        IM_END + "{}",
    ],
)
def test_a_closure_that_is_not_there_is_not_found(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    assert locate_closure(encode(tokenizer, text), tokenizer) is None


@pytest.mark.req("LOSS-02")
def test_a_target_whose_closure_cannot_be_located_is_refused(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    cursed = GroundTruthObject("ends <|im_end|> early", CAT.shape)
    with pytest.raises(ClosureNotFound):
        target_of(tokenizer, "{}", [cursed], [])
    with pytest.raises(ClosureNotFound):
        build_ground_truth_target([cursed], tokenizer, "desc_first")


# ---- whatever the model writes -------------------------------------------------------


@pytest.mark.req("APPEND-02", "APPEND-01", "PARSE-06")
@FUZZ
@given(data=st.data())
def test_parsed_again_a_target_gives_the_kept_predictions_and_the_appended_objects(
    tokenizer: PreTrainedTokenizerFast, data: st.DataObject
) -> None:
    parsed = parse_rollout(data.draw(rollouts(tokenizer)), tokenizer)
    truths = data.draw(st.lists(ground_truths(allow_poly=True), max_size=4))
    config = MatchingConfig(maskiou_resolution=64)
    match = match_objects(parsed.objects, truths, config)
    order: FieldOrder = data.draw(st.sampled_from(["desc_first", "geometry_first"]))
    target = build_target(parsed, truths, match, tokenizer, order)

    again = parse_rollout(target.token_ids, tokenizer)
    missed = [truths[j] for j in match.false_negatives]
    assert [(o.key, o.desc, o.shape) for o in again.objects] == [
        *((o.key, o.desc, o.shape) for o in parsed.objects),
        *((key, o.desc, o.shape) for key, o in zip(target.fn_keys, missed, strict=True)),
    ]
    assert not again.truncated
    prefix = text_of(tokenizer, parsed.prefix_token_ids)
    if is_json(prefix + "}"):
        answer = json.loads(assistant_text(tokenizer, target), object_pairs_hook=list)
        assert len(answer) == len(parsed.entry_ends) + len(missed)
        keys = [key for key, _ in answer]
        assert not set(keys[: len(parsed.entry_ends)]) & set(target.fn_keys)


@pytest.mark.req("LOSS-01", "LOSS-02", "APPEND-03")
@FUZZ
@given(data=st.data())
def test_roles_and_groups_agree_with_the_tokens_for_any_rollout(
    tokenizer: PreTrainedTokenizerFast, data: st.DataObject
) -> None:
    parsed = parse_rollout(data.draw(rollouts(tokenizer)), tokenizer)
    truths = data.draw(st.lists(ground_truths(), max_size=4))
    match = match_objects(parsed.objects, truths, MatchingConfig(maskiou_resolution=64))
    target = build_target(parsed, truths, match, tokenizer, "desc_first")
    length = len(target.token_ids)
    assert target.role.shape == (length,)
    assert target.token_ids[: target.prefix_len] == parsed.prefix_token_ids
    assert np.flatnonzero(target.role == Role.CLOSURE).tolist() == [length - 2, length - 1]
    bins = token_table(tokenizer).vocab.bins
    for position in np.flatnonzero(target.role == Role.COORD):
        assert target.token_ids[position] in bins
    appended = target.role[target.prefix_len :]
    assert not np.isin(
        appended, [Role.FALSE_POSITIVE, Role.MATCHED_STRUCTURE, Role.MATCHED_DESC]
    ).any()
    boxes = [
        (i, j)
        for i, j in match.pairs
        if parsed.objects[i].kind == truths[j].shape.kind == "bbox_2d"
    ]
    assert [group.bins for group in target.coord_groups if group.matched] == [
        truths[j].shape.coords for _, j in boxes
    ]
    for i in match.false_positives:
        found = parsed.objects[i]
        inside = range(found.token_span[0] + 1, found.token_span[1] - 1)
        assert (target.role[inside] == Role.FALSE_POSITIVE).all()


@given(st.lists(ground_truths(allow_poly=True), max_size=5))
@FUZZ
def test_the_ground_truth_survives_its_own_target(
    tokenizer: PreTrainedTokenizerFast, truths: list[GroundTruthObject]
) -> None:
    target = build_ground_truth_target(truths, tokenizer, "desc_first")
    again = parse_rollout(target.token_ids, tokenizer)
    assert [GroundTruthObject(o.desc, Shape(o.kind, tuple(o.coords))) for o in again.objects] == (
        truths
    )


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=lambda name: json.loads(""))
    except ValueError:
        return False
    return True
