"""Removed, moved and not yet served keys fail fast and say what to do instead."""

from pathlib import Path
from typing import Any

import pytest

from learner.config import load_mapping, merge, parse_config
from learner.config.moved_keys import RETIRED_KEYS, RETIRED_VALUES
from shared_contracts.errors import ContractError, ContractErrors

WARMUP = load_mapping(Path(__file__).parents[2] / "configs/demo/warmup.yaml")


def nested(dotted: str, value: Any) -> dict[str, Any]:
    """`a.b` and 1 -> {"a": {"b": 1}}."""
    for key in reversed(dotted.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def only_error(dotted: str, value: Any) -> ContractError:
    with pytest.raises(ContractErrors) as caught:
        parse_config(merge(WARMUP, nested(dotted, value)))
    (error,) = caught.value.errors
    return error


@pytest.mark.req("CFG-03")
@pytest.mark.parametrize("key", [k for k in RETIRED_KEYS if "[]" not in k and "*" not in k])
@pytest.mark.parametrize("value", [None, 1, {"any": "thing"}], ids=["null", "scalar", "mapping"])
def test_every_retired_key_is_the_one_error_of_a_config(key: str, value: Any) -> None:
    error = only_error(key, value)
    assert error.where == key
    assert error.do == RETIRED_KEYS[key].do


@pytest.mark.req("CFG-03")
@pytest.mark.parametrize(
    ("path", "value"),
    [(p, v) for p, values in RETIRED_VALUES.items() for v in values if "[]" not in p],
)
def test_every_retired_value_is_the_one_error_of_a_config(path: str, value: str) -> None:
    error = only_error(path, value)
    assert error.where == path
    assert value in error.found
    assert error.do == RETIRED_VALUES[path][value].do


@pytest.mark.req("CFG-03")
def test_no_retired_key_is_a_key_that_is_served() -> None:
    config = parse_config(WARMUP).model_dump()
    for key in RETIRED_KEYS:
        here: Any = config
        for name in key.split("."):
            here = here.get(name, {}) if isinstance(here, dict) else {}
        assert here == {}, key


@pytest.mark.req("RES-01")
@pytest.mark.parametrize(
    ("key", "new"),
    [
        ("decode_batch_size", "rollout_matching.decode_batch_size"),
        ("rollout_backend", "rollout_matching.rollout_backend"),
        ("vllm.server.servers", "rollout_matching.vllm.server.servers"),
        ("decoding.temperature", "rollout_matching.decoding.temperature"),
        ("repeat_terminate.enabled", "rollout_matching.repeat_terminate.enabled"),
        ("temperature", "rollout_matching.decoding.temperature"),
        ("top_p", "rollout_matching.decoding.top_p"),
        ("rollout_infer_batch_size", "rollout_matching.decode_batch_size"),
    ],
)
def test_a_key_in_the_old_rollout_section_names_its_new_path(key: str, new: str) -> None:
    error = only_error(f"custom.extra.rollout_matching.{key}", 3)
    assert error.where == f"custom.extra.rollout_matching.{key}"
    assert error.do == f"Use {new}"


@pytest.mark.req("RES-01")
def test_every_key_of_the_old_rollout_section_is_told_at_once() -> None:
    old = {"decode_batch_size": 1, "vllm": {"mode": "server", "sync": {"mode": "full"}}}
    with pytest.raises(ContractErrors) as caught:
        parse_config(merge(WARMUP, nested("custom.extra.rollout_matching", old)))
    assert [error.where.removeprefix("custom.extra.") for error in caught.value.errors] == [
        "rollout_matching.decode_batch_size",
        "rollout_matching.vllm.mode",
        "rollout_matching.vllm.sync.mode",
    ]


@pytest.mark.req("RES-01")
@pytest.mark.parametrize("value", [None, {}])
def test_the_old_rollout_section_fails_even_when_empty(value: Any) -> None:
    error = only_error("custom.extra.rollout_matching", value)
    assert error.where == "custom.extra.rollout_matching"
    assert "rollout_matching" in error.do


@pytest.mark.req("RES-02")
@pytest.mark.parametrize("old", ["stage2_ab_training", "rollout_matching_sft"])
def test_an_old_trainer_variant_names_the_new_one(old: str) -> None:
    error = only_error("custom.trainer_variant", old)
    assert error.where == "custom.trainer_variant"
    new = {"stage2_ab_training": "stage2_two_channel"}.get(old, "stage2_rollout_aligned")
    assert new in error.do


@pytest.mark.req("RES-03")
def test_the_paired_list_form_of_servers_fails_fast() -> None:
    server = {"base_url": ["http://127.0.0.1:8000"], "group_port": [51216]}
    with pytest.raises(ContractErrors) as caught:
        parse_config(merge(WARMUP, nested("rollout_matching.vllm.server", server)))
    assert [error.where for error in caught.value.errors] == [
        "rollout_matching.vllm.server.base_url",
        "rollout_matching.vllm.server.group_port",
    ]
    assert all("servers[]" in error.do for error in caught.value.errors)


@pytest.mark.req("RES-05")
@pytest.mark.parametrize("key", ["stop_neutral", "stop_neutral_ce", "mask_stop_tokens"])
def test_stop_neutral_keys_fail_fast(key: str) -> None:
    error = only_error(f"stage2_ab.channel_b.{key}", True)
    assert error.where == f"stage2_ab.channel_b.{key}"
    assert "always supervised" in error.do


@pytest.mark.req("RES-06")
@pytest.mark.parametrize(
    ("key", "replacement"),
    [
        ("stage2_ab.channel_b.reordered_gt_sft", "appended"),
        ("stage2_ab.channel_b.desc_ce_weight_matched", "never supervised"),
        ("stage2_ab.channel_b.semantic_desc_gate", "never supervised"),
        ("stage2_ab.channel_b.mode", "step mode"),
        ("stage2_ab.channel_b.async", "step mode"),
        ("stage2_ab.channel_b.rollouts_per_step", "training.effective_batch_size"),
        ("stage2_ab.channel_b.enable_pipeline", "overlap"),
        ("stage2_ab.channel_b.rollout_decode_batch_size", "rollout_matching.decode_batch_size"),
        ("stage2_ab.schedule.pattern", "stage2_ab.schedule.b_ratio"),
        ("rollout_matching.rollout_buffer", "fresh rollouts"),
        ("rollout_matching.post_rollout_pack_scope", "Remove it"),
        ("rollout_matching.rollout_generate_batch_size", "rollout_matching.decode_batch_size"),
        ("rollout_matching.rollout_infer_batch_size", "rollout_matching.decode_batch_size"),
        ("rollout_matching.temperature", "rollout_matching.decoding.temperature"),
        ("rollout_matching.top_p", "rollout_matching.decoding.top_p"),
        ("rollout_matching.top_k", "rollout_matching.decoding.top_k"),
    ],
)
def test_a_removed_knob_says_what_replaces_it(key: str, replacement: str) -> None:
    error = only_error(key, ["A", "B"])
    assert error.where == key
    assert replacement in error.do


@pytest.mark.req("CFG-03")
@pytest.mark.parametrize(
    "knob",
    [
        "desc_ce_weight",
        "fmt_struct_ce_weight",
        "bbox_smoothl1_weight",
        "bbox_ciou_weight",
        "coord_ce_weight",
        "coord_el1_weight",
        "coord_ehuber_weight",
        "coord_entropy_weight",
        "coord_gate_weight",
        "text_gate_weight",
    ],
)
def test_a_flat_objective_knob_fails_fast(knob: str) -> None:
    error = only_error(f"stage2_ab.{knob}", 1.0)
    assert error.where == f"stage2_ab.{knob}"
    assert any(module in error.do for module in ("token_ce", "bbox_geo", "coord_reg"))


@pytest.mark.req("CFG-03")
def test_the_old_coordinate_loss_section_fails_fast() -> None:
    error = only_error("custom.coord_soft_ce_w1.soft_ce_weight", 0.1)
    assert error.where == "custom.coord_soft_ce_w1"
    assert "coord_reg" in error.do


@pytest.mark.req("RES-13")
@pytest.mark.parametrize("value", [None, 1, {"weight": 1.0}])
def test_custom_coord_loss_is_ignored_in_silence(value: Any) -> None:
    assert parse_config(merge(WARMUP, {"custom": {"coord_loss": value}})) == parse_config(WARMUP)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rollout_matching.async_rollout", {"enabled": True}),
        ("stage2_ab.n_softctx_iter", 2),
        ("custom.trainer_variant", "stage2_rollout_aligned"),
    ],
)
def test_what_is_not_served_yet_is_no_dead_option(key: str, value: Any) -> None:
    error = only_error(key, value)
    assert error.where == key
    assert "not served yet" in error.found


def test_a_diagnostics_module_that_is_not_served_yet_is_told_by_its_name() -> None:
    entry = {"name": "coord_diag", "enabled": True, "weight": 1, "channels": [], "config": {}}
    error = only_error("stage2_ab.pipeline.diagnostics", [entry])
    assert error.where == "stage2_ab.pipeline.diagnostics[0].name"
    assert "not served yet" in error.found


def test_an_unknown_diagnostics_module_is_refused() -> None:
    error = only_error("stage2_ab.pipeline.diagnostics", [{"name": "other"}])
    assert error.where == "stage2_ab.pipeline.diagnostics"
