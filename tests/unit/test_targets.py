"""`Y_train` and the role of each of its tokens (APPEND-02, LOSS-01's roles, LOSS-02).

`test_round_trip` holds both against a second derivation, of any answers.
"""

import json
from collections.abc import Sequence
from copy import deepcopy
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from learner.config import merge, parse_config
from learner.config.rollout_matching import MatchingConfig
from learner.stages.formats.compact import COMPACT
from learner.stages.formats.coord_json import parse_rollout
from learner.stages.matching import match_objects
from learner.stages.targets import (
    TargetUnreadable,
    build_ground_truth_target,
    build_target,
    run_stages,
)
from learner.stages.tokens import IM_END, encode_answer, token_table
from learner.stages.transport_plan import projected_bins
from learner.types import FieldOrder, GroundTruthObject, MatchResult, Role, Sample, Shape, Target
from tests.unit.answers import BIRD, CAT, DOG, ROOF, coords, encode, entry, pieces, text_of
from tests.unit.config_faults import ALIGNED, WARMUP
from tests.unit.small_run import rollout

DOG_BINS = DOG.shape.coords


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
    rollout: str | list[int],
    truths: Sequence[GroundTruthObject],
    pairs: list[tuple[int, int]] | None = None,
    order: FieldOrder = "desc_first",
    *,
    allow_poly: bool = True,
    config: MatchingConfig | None = None,
) -> Target:
    """pairs: None where the matching decides."""
    ids = encode(tokenizer, rollout) if isinstance(rollout, str) else rollout
    parsed = parse_rollout(ids, tokenizer, allow_poly=allow_poly)
    settings = config or MatchingConfig()
    if pairs is None:
        match = match_objects(parsed.objects, truths, settings)
    else:
        match = matched(pairs, len(parsed.objects), len(truths))
    return build_target(parsed, truths, match, tokenizer, order, matching=settings)


def runs(tokenizer: PreTrainedTokenizerFast, target: Target) -> list[tuple[str, str]]:
    """The target as (role, text) of neighbouring tokens of the same role."""
    labelled = zip(target.role, pieces(tokenizer, target.token_ids), strict=True)
    return [
        (Role(role).name, "".join(piece for _, piece in group))
        for role, group in groupby(labelled, key=lambda pair: pair[0])
    ]


def answer_of(tokenizer: PreTrainedTokenizerFast, target: Target) -> dict[str, dict[str, object]]:
    """The text of a target as JSON; its last token is the EOS."""
    assert target.token_ids[-1] == token_table(tokenizer).vocab.end_id
    answer: dict[str, dict[str, object]] = json.loads(text_of(tokenizer, target.token_ids[:-1]))
    return answer


@pytest.mark.req("PARSE-06", "APPEND-01", "APPEND-02", "MATCH-02")
@pytest.mark.scenario(
    "All GT is appended when no valid matches exist",
    "Highest retained object key controls FN start even when object is invalid",
    "Start key avoids collision even when highest key object is invalid",
)
@pytest.mark.parametrize(
    ("rollout", "first"),
    [
        ("{" + entry(1) + "}", 2),
        ("{" + entry(2) + ', "object_9": {"desc": "no box"}}', 10),
        # The name of an entry without a colon is not given again.
        ('{"object_1" {"desc": "no box"}}', 2),
        (f'{{"object_{10**639 - 1}": {{}}}}', 10**639),
    ],
    ids=range(4),
)
def test_new_keys_follow_the_largest_key_even_of_an_invalid_object_and_can_be_read_back(
    tokenizer: PreTrainedTokenizerFast, rollout: str, first: int
) -> None:
    target = target_of(tokenizer, rollout, [CAT, DOG, BIRD], [])
    assert target.fn_keys == [f"object_{first + i}" for i in range(3)]
    assert [group.bins for group in target.coord_groups] == [
        item.shape.coords for item in (CAT, DOG, BIRD)
    ]


@pytest.mark.req("APPEND-01", "PARSE-05")
def test_a_tokenizer_that_begins_every_text_with_a_token_of_its_own_adds_none_to_a_target(
    toy_tokenizer: PreTrainedTokenizerFast,
) -> None:
    greeting = deepcopy(toy_tokenizer)
    special = [(IM_END, token_table(toy_tokenizer).vocab.end_id)]
    greeting.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{IM_END} $A", special_tokens=special
    )
    assert greeting.encode("{}") != encode(greeting, "{}")
    whole, appended = (
        [
            build_ground_truth_target([CAT], each, "desc_first").token_ids,
            target_of(each, "{" + entry(1) + "}", [CAT, DOG], [(0, 0)]).token_ids,
            target_of(each, "no brace", [CAT], []).token_ids,
        ]
        for each in (greeting, toy_tokenizer)
    )
    assert whole == appended


@pytest.mark.req("LOSS-01", "RES-05", "APPEND-02", "ARCH-02", "CHB-01", "PARSE-05")
@pytest.mark.scenario(
    "Prefix coord tokens can be supervised without supervising prefix text tokens",
    "Rollout prefix + FN append produces a valid teacher-forced target",
)
def test_roles_of_each_kind_of_object(qwen_tokenizer: PreTrainedTokenizerFast) -> None:
    ghost = entry(2, "ghost", (1, 2, 3, 4))
    target = target_of(qwen_tokenizer, f"{{{entry(1)}, {ghost}}}", [CAT, DOG], [(0, 0)])

    def box(role: str, bins: tuple[int, ...]) -> list[tuple[str, str]]:
        tokens = [("COORD", f"<|coord_{k}|>") for k in bins]
        between = [(role, '", "')] * 3 + [(role, '"]')]
        return [run for pair in zip(tokens, between, strict=True) for run in pair]

    assert runs(qwen_tokenizer, target) == [
        ("MATCHED_STRUCTURE", '{"object_1": {"desc": "'),
        ("MATCHED_DESC", "cat"),
        ("MATCHED_STRUCTURE", '", "bbox_2d": ["'),
        *box("MATCHED_STRUCTURE", CAT.shape.coords),
        # `},` is one token of both objects.
        ("FALSE_POSITIVE", "}, " + ghost),
        ("APPENDED_STRUCTURE", ', "object_3": {"desc": "'),
        ("APPENDED_DESC", "red dog"),
        ("APPENDED_STRUCTURE", '", "bbox_2d": ["'),
        *box("APPENDED_STRUCTURE", DOG_BINS),
        ("CLOSURE", "}}<|im_end|>"),
    ]


POLYGON = Shape("poly", (10, 5, 480, 9, 512, 490, 30, 470))
POLYGON_SAID = f'"object_2": {{"desc": "roof", "poly": {coords(*POLYGON.coords)}}}'


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


@pytest.mark.req("OT-01", "LOSS-03")
@pytest.mark.scenario("Poly prediction is supervised by barycentric-projected targets")
@pytest.mark.parametrize(
    "config", [MatchingConfig(), MatchingConfig(ot_cost="l1", ot_epsilon=70.0, ot_iters=3)]
)
def test_each_pair_with_a_polygon_is_taught_its_own_projection_by_the_matching_section(
    tokenizer: PreTrainedTokenizerFast, config: MatchingConfig
) -> None:
    """A polygon between two boxes, the second of which is a polygon in truth."""
    text = "{" + ", ".join([entry(1), POLYGON_SAID, entry(3)]) + "}"
    pairs = [(0, 1), (1, 2), (2, 0)]
    target = target_of(tokenizer, text, [ROOF, CAT, BIRD], pairs, config=config)
    plan = config.ot_cost, config.ot_epsilon, config.ot_iters
    of_polygon, of_box = projected_bins(
        [(POLYGON, BIRD.shape), (CAT.shape, ROOF.shape)], config.ot_cost, *plan[1:]
    )
    assert [(group.bins, group.is_box) for group in target.coord_groups] == [
        (CAT.shape.coords, True),
        (pytest.approx(of_polygon), False),
        (pytest.approx(of_box), False),
    ]
    assert [group.matched for group in target.coord_groups] == [True] * 3
    bins = token_table(tokenizer).vocab.bins
    said = [[bins[target.token_ids[p]] for p in group.positions] for group in target.coord_groups]
    assert said == [list(s.coords) for s in (CAT.shape, POLYGON, CAT.shape)]


@pytest.mark.req("APPEND-01", "CHA-01")
@pytest.mark.scenario(
    "Channel-A uses geometry-first payload when configured",
    "Default desc-first behavior is preserved in both channels",
)
@pytest.mark.parametrize("order", ["desc_first", "geometry_first"])
def test_the_ground_truth_target_is_the_whole_answer_in_order(
    tokenizer: PreTrainedTokenizerFast, order: FieldOrder
) -> None:
    assert parse_config(WARMUP).custom.object_field_order == "desc_first"
    target = build_ground_truth_target([DOG, CAT], tokenizer, order)
    answer = answer_of(tokenizer, target)
    assert {key: list(value) for key, value in answer.items()} == dict.fromkeys(
        ("object_1", "object_2"),
        ["desc", "bbox_2d"] if order == "desc_first" else ["bbox_2d", "desc"],
    )
    assert target.prefix_len == 0
    length = len(target.token_ids)
    assert pieces(tokenizer, target.token_ids)[-2].endswith("}}")
    assert np.flatnonzero(target.role == Role.CLOSURE).tolist() == [length - 2, length - 1]
    assert target.fn_keys == list(answer)
    assert target.role.dtype == np.int8
    assert [(group.bins, group.matched) for group in target.coord_groups] == [
        (DOG.shape.coords, False),
        (CAT.shape.coords, False),
    ]
    appended = {Role.APPENDED_STRUCTURE, Role.APPENDED_DESC, Role.COORD, Role.CLOSURE}
    assert set(target.role.tolist()) == appended


@pytest.mark.req("APPEND-02", "LOSS-02", "PARSE-06")
@pytest.mark.parametrize(
    ("desc", "said"),
    [("ends <|im_end|> early", "no closing brace before the EOS"), (" ", "missing_desc")],
)
def test_a_target_that_does_not_read_back_is_refused(
    tokenizer: PreTrainedTokenizerFast, desc: str, said: str
) -> None:
    cursed = GroundTruthObject(desc, CAT.shape)
    with pytest.raises(TargetUnreadable, match=said):
        target_of(tokenizer, "{}", [DOG, cursed], [])
    with pytest.raises(TargetUnreadable, match=said):
        build_ground_truth_target([cursed], tokenizer, "desc_first")


@pytest.mark.req("FMT-01", "OT-01")
def test_stages_of_a_run_have_its_format_and_settings(tokenizer: PreTrainedTokenizerFast) -> None:
    plan: dict[str, Any] = {"ot_cost": "l1", "ot_epsilon": 70.0, "ot_iters": 3}
    keys = {"custom": {"answer_format": "compact"}, "rollout_matching": {"matching": plan}}
    config = parse_config(merge(ALIGNED, keys))
    near = GroundTruthObject(ROOF.desc, Shape("poly", tuple(k + 9 for k in ROOF.shape.coords)))
    ids = encode_answer(tokenizer, COMPACT.write([near], "desc_first"))
    sample = Sample("data.jsonl:1", (), 8, 8, (ROOF,))
    (assessed,) = run_stages([sample], [rollout([], ids)], tokenizer, config)
    assert assessed.target is not None
    (group,) = assessed.target.coord_groups
    assert group.bins == projected_bins([(near.shape, ROOF.shape)], "l1", 70.0, 3)[0]
