"""`Y_train` and the role of each of its tokens (APPEND-02, LOSS-01's roles, LOSS-02)."""

import json
import re
from collections.abc import Sequence
from copy import deepcopy
from itertools import accumulate, groupby

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from learner.config.rollout_matching import MatchingConfig
from learner.objectives.coord_reg import soft_targets
from learner.stages.formats.coord_json import COORD_JSON, parse_rollout, serialize_objects
from learner.stages.targets import (
    TargetUnreadable,
    build_ground_truth_target,
    build_target,
)
from learner.stages.tokens import HALF_CHARACTER, IM_END, token_table
from learner.stages.transport_plan import projected_bins
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
    pieces,
    text_of,
)


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
    assert target.token_ids[-1] == token_table(tokenizer).vocab.end_id
    assert target.fn_keys == ["object_2"]
    prefix = text_of(tokenizer, target.token_ids[: target.prefix_len])
    assert prefix == "{" + entry(1)


@pytest.mark.req("APPEND-02", "MATCH-02")
@pytest.mark.scenario("All GT is appended when no valid matches exist")
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
@pytest.mark.scenario(
    "Highest retained object key controls FN start even when object is invalid",
    "Start key avoids collision even when highest key object is invalid",
)
def test_new_keys_follow_the_largest_key_even_of_an_invalid_object(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rollout = "{" + entry(2) + ', "object_9": {"desc": "no box"}}'
    target = target_of(tokenizer, rollout, [CAT, DOG], [(0, 0)])
    assert target.fn_keys == ["object_10"]


@pytest.mark.req("PARSE-06", "APPEND-02")
def test_the_name_of_an_entry_without_a_colon_is_not_given_again(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    target = target_of(tokenizer, '{"object_1" {"desc": "no box"}}', [CAT], [])
    assert target.fn_keys == ["object_2"]
    assert [group.bins for group in target.coord_groups] == [CAT.shape.coords]


@pytest.mark.req("APPEND-01")
def test_the_field_order_holds_for_what_is_appended_and_leaves_the_prefix_alone(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    target = target_of(tokenizer, "{" + entry(1) + "}", [CAT, DOG], [(0, 0)], "geometry_first")
    answer = json.loads(assistant_text(tokenizer, target))
    assert list(answer["object_1"]) == ["desc", "bbox_2d"]
    assert list(answer["object_2"]) == ["bbox_2d", "desc"]


@pytest.mark.req("APPEND-01")
def test_a_tokenizer_that_begins_every_text_with_a_token_of_its_own_adds_none_to_a_target(
    qwen_tokenizer: PreTrainedTokenizerFast,
) -> None:
    greeting = deepcopy(qwen_tokenizer)
    special = [(IM_END, token_table(qwen_tokenizer).vocab.end_id)]
    greeting.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{IM_END} $A", special_tokens=special
    )
    assert greeting.encode("{}") != encode(greeting, "{}")
    answers = [
        build_ground_truth_target([CAT], each, "desc_first") for each in (greeting, qwen_tokenizer)
    ]
    assert answers[0].token_ids == answers[1].token_ids
    said = "{" + entry(1) + "}"
    appended = [target_of(each, said, [CAT, DOG], [(0, 0)]) for each in (greeting, qwen_tokenizer)]
    assert appended[0].token_ids == appended[1].token_ids


# ---- roles ---------------------------------------------------------------------------


@pytest.mark.req("LOSS-01", "RES-05", "APPEND-02")
@pytest.mark.scenario(
    "Prefix coord tokens can be supervised without supervising prefix text tokens"
)
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


@pytest.mark.req("LOSS-01")
def test_a_token_that_ends_an_object_and_holds_no_more_stays_with_it(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    ghost = " , " + entry(2, "ghost", (1, 2, 3, 4))
    rollout = "{" + entry(1) + ghost + "}"
    before = text_of(tokenizer, encode(tokenizer, rollout)).index(ghost)
    ends = list(accumulate(map(len, pieces(tokenizer, encode(tokenizer, rollout)))))
    assert before in ends
    target = target_of(tokenizer, rollout, [CAT], [(0, 0)])
    assert text_in(tokenizer, target, Role.FALSE_POSITIVE) == ghost


@pytest.mark.req("LOSS-01")
@pytest.mark.parametrize("fused", ["},{}", '},"}'])
def test_a_token_that_goes_on_into_the_next_entry_with_a_brace_of_it_is_of_both(
    tokenizer: PreTrainedTokenizerFast, fused: str
) -> None:
    fusing = deepcopy(tokenizer)
    fusing.add_tokens([fused])
    rest = '{"x": 1}' if fused == "},{}" else '": {"x": 1}'
    first, rollout = entry(1)[:-1], "{" + entry(1)[:-1] + fused + rest + "}"
    assert fused in pieces(fusing, encode(fusing, rollout))
    target = target_of(fusing, rollout, [CAT, DOG], [(0, 0)])
    assert text_in(fusing, target, Role.FALSE_POSITIVE).startswith(fused)
    kept = text_in(fusing, target, Role.MATCHED_STRUCTURE, Role.MATCHED_DESC)
    assert kept == "{" + re.sub(r"<\|coord_[0-9]+\|>", "", first)


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
    assert (first.bins, first.matched, first.is_box) == (CAT.shape.coords, True, True)
    assert tuple(vocab.bins[target.token_ids[p]] for p in first.positions) == predicted
    assert (second.bins, second.matched, second.is_box) == (DOG.shape.coords, False, True)
    assert tuple(vocab.bins[target.token_ids[p]] for p in second.positions) == second.bins
    supervised = set(first.positions) | set(second.positions)
    assert set(np.flatnonzero(target.role == Role.COORD).tolist()) == supervised


@pytest.mark.req("LOSS-01")
@pytest.mark.parametrize("pairs", [[(0, 0)], []], ids=["matched", "false positive"])
def test_a_coordinate_token_in_a_description_is_no_text_to_teach_and_no_coordinate(
    tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[int, int]]
) -> None:
    target = target_of(tokenizer, "{" + entry(1, "at <|coord_5|>") + "}", [CAT], pairs)
    bins = token_table(tokenizer).vocab.bins
    (said,) = [p for p, i in enumerate(target.token_ids) if bins.get(i) == 5]
    assert target.role[said] == (Role.COORD if pairs else Role.FALSE_POSITIVE)
    assert all(said not in group.positions for group in target.coord_groups)


def test_an_appended_polygon_is_taught_its_own_vertices(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    target = target_of(tokenizer, "{}", [ROOF], [])
    (group,) = target.coord_groups
    assert (group.bins, group.matched, group.is_box) == (ROOF.shape.coords, False, False)


@pytest.mark.req("OT-01", "LOSS-03")
@pytest.mark.parametrize("truth", [ROOF, BIRD])
def test_a_matched_polygon_is_taught_its_projection_at_the_positions_of_the_prediction(
    tokenizer: PreTrainedTokenizerFast, truth: GroundTruthObject
) -> None:
    predicted = Shape("poly", (10, 5, 480, 9, 512, 490, 30, 470))
    roof = f'{{"object_1": {{"desc": "roof", "poly": {coords(*predicted.coords)}}}}}'
    target = target_of(tokenizer, roof, [truth], [(0, 0)])
    (group,) = target.coord_groups
    bins = token_table(tokenizer).vocab.bins
    assert tuple(bins[target.token_ids[p]] for p in group.positions) == predicted.coords
    assert [group.bins] == projected_bins([(predicted, truth.shape)], "l2", 0.5, 30)
    assert (group.matched, group.is_box) == (True, False)
    assert set(np.flatnonzero(target.role == Role.COORD).tolist()) == set(group.positions)


@pytest.mark.req("OT-01")
def test_a_box_matched_to_a_polygon_is_taught_no_decoded_box(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    target = target_of(tokenizer, "{" + entry(1) + "}", [ROOF], [(0, 0)])
    (group,) = target.coord_groups
    assert [group.bins] == projected_bins([(CAT.shape, ROOF.shape)], "l2", 0.5, 30)
    assert (group.matched, group.is_box) == (True, False)


@pytest.mark.req("OT-01", "LOSS-03")
def test_each_matched_pair_of_an_answer_has_its_own_target(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """A polygon between two boxes, the second of which is a polygon in truth."""
    said = Shape("poly", (10, 5, 480, 9, 512, 490, 30, 470))
    roof = f'"object_2": {{"desc": "roof", "poly": {coords(*said.coords)}}}'
    text = "{" + ", ".join([entry(1), roof, entry(3)]) + "}"
    target = target_of(tokenizer, text, [ROOF, CAT, BIRD], [(0, 1), (1, 2), (2, 0)])
    assert [(group.bins, group.is_box) for group in target.coord_groups] == [
        (CAT.shape.coords, True),
        (projected_bins([(said, BIRD.shape)], "l2", 0.5, 30)[0], False),
        (projected_bins([(CAT.shape, ROOF.shape)], "l2", 0.5, 30)[0], False),
    ]


@pytest.mark.req("OT-01")
def test_the_plan_is_made_as_the_matching_section_says(
    qwen_tokenizer: PreTrainedTokenizerFast,
) -> None:
    parsed = parse_rollout(encode(qwen_tokenizer, "{" + entry(1) + "}"), qwen_tokenizer)
    config = MatchingConfig(ot_cost="l1", ot_epsilon=70.0, ot_iters=3)
    target = build_target(
        parsed, [ROOF], matched([(0, 0)], 1, 1), qwen_tokenizer, "desc_first", matching=config
    )
    (group,) = target.coord_groups
    assert [group.bins] == projected_bins([(CAT.shape, ROOF.shape)], "l1", 70.0, 3)
    assert [group.bins] != projected_bins([(CAT.shape, ROOF.shape)], "l2", 0.5, 30)


@pytest.mark.req("OT-01")
@pytest.mark.parametrize("truncate", [None, 12])
def test_the_labels_of_a_matched_polygon_are_gaussians_about_its_projected_points(
    qwen_tokenizer: PreTrainedTokenizerFast, truncate: int | None
) -> None:
    truth = GroundTruthObject("roof", Shape("poly", (60, 70, 480, 90, 500, 520, 260, 610, 90, 480)))
    roof = f'{{"object_1": {{"desc": "roof", "poly": {coords(70, 75, 490, 80, 470, 555)}}}}}'
    (group,) = target_of(qwen_tokenizer, roof, [truth], [(0, 0)]).coord_groups
    assert any(k != round(k) for k in group.bins)
    labels = soft_targets(torch.tensor(group.bins), sigma=2.0, truncate=truncate).double().numpy()
    grid = np.arange(1000)
    assert labels.sum(axis=1) == pytest.approx(np.ones(6))
    means = labels @ grid
    assert means == pytest.approx(group.bins, abs=1e-3)
    widths = np.sqrt((labels * (grid - means[:, None]) ** 2).sum(axis=1))
    assert widths == pytest.approx([2.0] * 6, rel=1e-3)
    for label, k in zip(labels, group.bins, strict=True):
        peak = int(label.argmax())
        assert peak == round(k)
        assert (np.diff(label)[:peak] >= 0).all()
        assert (np.diff(label)[peak:] <= 0).all()


# ---- the whole answer from the ground truth ------------------------------------------


@pytest.mark.req("APPEND-01", "CHA-01")
@pytest.mark.scenario("Channel-A uses geometry-first payload when configured")
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
    assert target.fn_keys == list(answer)
    assert target.role.dtype == np.int8
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
    ids = [*encode(tokenizer, text), token_table(tokenizer).vocab.end_id]
    found = COORD_JSON.read_back(ids, tokenizer)
    assert found is not None
    brace, eos = found.closure
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
    assert COORD_JSON.read_back(encode(tokenizer, text), tokenizer) is None


@pytest.mark.req("LOSS-02")
def test_a_target_whose_closure_cannot_be_located_is_refused(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    cursed = GroundTruthObject("ends <|im_end|> early", CAT.shape)
    with pytest.raises(TargetUnreadable, match="no closing brace before the EOS"):
        target_of(tokenizer, "{}", [cursed], [])
    with pytest.raises(TargetUnreadable, match="no closing brace"):
        build_ground_truth_target([cursed], tokenizer, "desc_first")


@pytest.mark.req("APPEND-02", "LOSS-02")
@pytest.mark.parametrize("rollout", ["{}", None], ids=["after a rollout", "whole answer"])
def test_an_object_is_taught_whose_last_character_shares_a_token_with_the_closing_braces(
    toy_tokenizer: PreTrainedTokenizerFast, rollout: str | None
) -> None:
    rocket = GroundTruthObject("toy 🚀", CAT.shape)
    text = serialize_objects([rocket], "geometry_first")
    fused = pieces(toy_tokenizer, encode(toy_tokenizer, text))[-1]
    assert fused == HALF_CHARACTER + '"}}'
    if rollout is None:
        target = build_ground_truth_target([rocket], toy_tokenizer, "geometry_first")
    else:
        target = target_of(toy_tokenizer, rollout, [rocket], [], "geometry_first")
    again = parse_rollout(target.token_ids, toy_tokenizer)
    assert [(o.desc, o.shape) for o in again.objects] == [(rocket.desc, rocket.shape)]
    assert assistant_text(toy_tokenizer, target) == text
    assert pieces(toy_tokenizer, target.token_ids)[-2:] == [fused, IM_END]
    assert target.role[-2:].tolist() == [Role.CLOSURE, Role.CLOSURE]
    assert [group.bins for group in target.coord_groups] == [rocket.shape.coords]


@pytest.mark.req("APPEND-02", "PARSE-06")
def test_a_target_whose_appended_object_the_parser_refuses_is_not_taught(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    blank = GroundTruthObject(" ", CAT.shape)
    with pytest.raises(TargetUnreadable, match="missing_desc"):
        target_of(tokenizer, "{}", [DOG, blank], [])


@pytest.mark.req("APPEND-02", "PARSE-05", "PARSE-06")
@pytest.mark.parametrize("digits", [18, 19, 639])
@pytest.mark.parametrize("value", ['{"desc": "no box"}', "{}", entry(1).partition(": ")[2]])
def test_however_large_a_number_is_that_counts_the_keys_after_it_can_be_read_back(
    tokenizer: PreTrainedTokenizerFast, digits: int, value: str
) -> None:
    last = 10**digits - 1
    target = target_of(tokenizer, f'{{"object_{last}": {value}}}', [DOG, CAT], [])
    assert target.fn_keys == [f"object_{last + 1}", f"object_{last + 2}"]
    assert [group.bins for group in target.coord_groups] == [DOG.shape.coords, CAT.shape.coords]
