"""Scenarios of matching and of polygons' targets (seed 000)."""

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from learner.config.rollout_matching import MatchingConfig
from learner.stages.formats.coord_json import parse_rollout
from learner.stages.matching import match_objects
from learner.stages.targets import build_target
from learner.stages.transport_plan import sinkhorn_barycentric
from learner.types import GroundTruthObject, Shape
from tests.unit.answers import CAT, DOG, coords, encode, entry


@pytest.mark.req("MATCH-02", "APPEND-02")
def test_pre_assignment_gating_prevents_wrong_matches_and_triggers_fn_append(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rollout = "{" + entry(1, "cat", (200, 300, 640, 650)) + "}"
    parsed = parse_rollout(encode(tokenizer, rollout), tokenizer)
    # Leaving objects alone costs so much that only the gate keeps the pair apart.
    config = MatchingConfig(maskiou_gate=0.3, fp_cost=50.0, fn_cost=50.0)
    match = match_objects(parsed.objects, [CAT, DOG], config)
    assert (match.mask_iou > 0).any()
    assert (match.mask_iou < config.maskiou_gate).all()
    assert match.gated == 2
    assert (match.pairs, match.false_positives, match.false_negatives) == ([], [0], [0, 1])
    target = build_target(parsed, [CAT, DOG], match, tokenizer, "desc_first")
    assert target.fn_keys == ["object_2", "object_3"]


@pytest.mark.req("OT-01")
def test_poly_prediction_is_supervised_by_barycentric_projected_targets(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    predicted = (100, 100, 500, 110, 490, 520, 90, 480)
    truth = GroundTruthObject("roof", Shape("poly", (110, 90, 510, 100, 500, 510, 100, 500)))
    rollout = f'{{"object_1": {{"desc": "roof", "poly": {coords(*predicted)}}}}}'
    parsed = parse_rollout(encode(tokenizer, rollout), tokenizer)
    config = MatchingConfig(ot_cost="l1", ot_epsilon=5.0, ot_iters=50)
    match = match_objects(parsed.objects, [truth], config)
    assert match.pairs == [(0, 0)]
    target = build_target(parsed, [truth], match, tokenizer, "desc_first", matching=config)
    (group,) = target.coord_groups
    expected = sinkhorn_barycentric(
        np.reshape(predicted, (-1, 2)).astype(float),
        np.reshape(truth.shape.coords, (-1, 2)).astype(float),
        "l1",
        5.0,
        50,
    )
    assert group.positions == tuple(parsed.objects[0].coord_token_indices)
    assert group.bins == pytest.approx(expected.reshape(-1).tolist())
    assert group.matched
    assert not group.is_box, "no loss on decoded coordinates uses it"
