"""The names, parameters and fields other programs may count on (ARCH-02)."""

import dataclasses
import importlib
import inspect

import pytest

from learner.types import MatchResult, ParsedObject, ParsedRollout, Target

FUNCTIONS = {
    "learner.coords.encode_bin": ["c"],
    "learner.coords.decode_bin": ["k"],
    "learner.parsing.parse_rollout": ["token_ids", "tokenizer"],
    "learner.serialize.serialize_append": [
        "prefix_text",
        "objects",
        "start_index",
        "field_order",
    ],
    "learner.matching.match_objects": ["predicted", "ground_truth", "config"],
    "learner.matching.mask_iou": ["a", "b", "resolution"],
    "learner.transport_plan.sinkhorn_barycentric": [
        "pred_points",
        "gt_points",
        "cost",
        "epsilon",
        "iters",
    ],
    "learner.targets.build_target": [
        "parsed",
        "ground_truth",
        "match",
        "tokenizer",
        "field_order",
    ],
    "learner.packing.select_segments": ["lengths", "capacity"],
    "learner.packing.plan_packs": ["lengths", "capacity", "min_fill"],
    "learner.rollout.distribution.plan_chunks": ["n", "world_sizes"],
    "learner.rollout.distribution.rank_chunk_size": [
        "decode_batch_size",
        "world_sizes",
        "learner_world_size",
    ],
    "learner.rollout.seeds.rollout_seed_base": ["training_seed", "global_step"],
    "learner.rollout.seeds.request_seed": ["base", "micro_step_idx", "req_idx"],
    "learner.schedule.channel_for_step": ["step", "b_ratio"],
    "learner.config.load_config": ["path"],
    "shared_contracts.repeat_guard.RepeatGuard": ["config", "object_key_token_ids"],
    "shared_contracts.errors.ContractError": ["where", "found", "do"],
}

FIELDS: dict[type, set[str]] = {
    ParsedRollout: {
        "objects",
        "dropped",
        "prefix_token_ids",
        "max_object_index",
        "truncated",
        "invalid_rollout",
    },
    ParsedObject: {
        "key",
        "index",
        "kind",
        "coords",
        "desc",
        "coord_token_indices",
        "token_span",
    },
    MatchResult: {"pairs", "false_positives", "false_negatives", "gated", "mask_iou"},
    Target: {"token_ids", "prefix_len", "fn_keys", "role"},
}


@pytest.mark.req("ARCH-02")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_takes_the_agreed_parameters_in_order(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    function = getattr(importlib.import_module(module), attribute)
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = [p.name for p in parameters if p.default is p.empty]
    assert positional == FUNCTIONS[name]
    assert required == FUNCTIONS[name]


@pytest.mark.req("ARCH-02")
@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_a_public_record_has_the_agreed_fields(kind: type) -> None:
    assert dataclasses.is_dataclass(kind)
    assert FIELDS[kind] <= {field.name for field in dataclasses.fields(kind)}
