"""The names, parameters and fields that other programs may count on (ARCH-02)."""

import dataclasses
import inspect
import subprocess
import sys
from typing import Any

import pytest

import learner.api
from learner.types import MatchResult, ParsedObject, ParsedRollout, Target

# Required positional parameters, in order.
FUNCTIONS = {
    "ContractError": "where found do",
    "RepeatGuard": "config object_key_token_ids",
    "build_target": "parsed ground_truth match tokenizer field_order",
    "channel_for_step": "step b_ratio",
    "decode_bin": "k",
    "encode_bin": "c",
    "load_config": "path",
    "mask_iou": "a b resolution",
    "match_objects": "predicted ground_truth config",
    "parse_rollout": "token_ids tokenizer",
    "plan_chunks": "n world_sizes",
    "plan_packs": "lengths capacity min_fill",
    "rank_chunk_size": "decode_batch_size world_sizes learner_world_size",
    "request_seed": "base micro_step_idx req_idx",
    "rollout_seed_base": "training_seed global_step",
    "select_segments": "lengths capacity",
    "serialize_append": "prefix_text objects start_index field_order",
    "sinkhorn_barycentric": "pred_points gt_points cost epsilon iters",
}
FIELDS: dict[Any, str] = {
    ParsedRollout: "objects dropped prefix_token_ids max_object_index truncated invalid_rollout",
    ParsedObject: "key index kind coords desc coord_token_indices token_span",
    MatchResult: "pairs false_positives false_negatives gated mask_iou",
    Target: "token_ids prefix_len fn_keys role",
}

pytestmark = pytest.mark.req("ARCH-02")


def test_the_module_has_the_agreed_names_and_no_others() -> None:
    assert sorted(learner.api.__all__) == sorted([*FUNCTIONS, "RepeatTerminateConfig"])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_takes_the_agreed_parameters_in_order(name: str) -> None:
    parameters = inspect.signature(getattr(learner.api, name)).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = [p.name for p in parameters if p.default is p.empty]
    assert positional == required == FUNCTIONS[name].split()


def test_public_records_have_the_agreed_fields() -> None:
    for kind, names in FIELDS.items():
        assert set(names.split()) <= {field.name for field in dataclasses.fields(kind)}


def test_no_public_name_loads_torch() -> None:
    program = "import sys, learner.api; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
