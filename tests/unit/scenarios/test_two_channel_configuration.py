"""Scenarios of the two-channel YAML and its profiles (seed 001), each under its own name."""

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from learner.config import (
    dump_mapping,
    dump_resolved,
    load_config,
    load_mapping,
    merge,
    parse_config,
)
from learner.config.profiles import EXPLICIT_LEAF_FIELDS, is_canonical_leaf
from learner.config.rollout_matching import RolloutMatchingConfig
from learner.config.yaml12 import read_mapping
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.preflight import check_inputs, reach_servers
from learner.rollout.distribution import rank_caps, rank_chunk_size
from learner.rollout.policy import asking_of
from shared_contracts.errors import ContractError
from shared_contracts.repeat_guard import RepeatTerminateConfig
from tests.unit.config_faults import CONFIGS, changed, only_error, without
from tests.unit.scripted_server import info, scripted_server
from tests.unit.small_run import small_mapping
from tests.unit.test_config_profiles import faults_of, weights_of, written

LEARNER = Path(__file__).parents[3] / "learner"
TWO_CHANNEL = CONFIGS / "stage2_two_channel"
BASE = load_mapping(TWO_CHANNEL / "base.yaml")
OLD = "custom.extra.rollout_matching"


def refused(dotted: str, value: Any = 1) -> str:
    """What to do about the one fault of the base with this value, which is told at its path."""
    error = only_error(changed(dotted, value, BASE))
    assert error.where == dotted
    return error.do


# --- Sections and keys ------------------------------------------------------------------


@pytest.mark.req("CFG-02")
def test_unknown_stage2_ab_keys_fail_fast() -> None:
    assert "'n_softctx_iter'" in refused("stage2_ab.n_softctx_iters", 2)
    assert "'b_ratio'" in refused("stage2_ab.schedule.b_ratoi", 0.5)


@pytest.mark.req("CFG-08")
def test_missing_pipeline_fails_fast() -> None:
    assert only_error(without("stage2_ab.pipeline", BASE)).where == "stage2_ab.pipeline"


@pytest.mark.req("CFG-02")
def test_unknown_top_level_section_key_fails_fast() -> None:
    refused("rollouts", {"decode_batch_size": 2})


@pytest.mark.req("CFG-02")
def test_unknown_key_inside_covered_section_fails_fast() -> None:
    refused("custom.unknown_knob")


@pytest.mark.req("CFG-02")
def test_unknown_nested_rollout_key_fails_at_schema_load() -> None:
    server = {"base_url": "http://127.0.0.1:9", "group_port": 51216, "unknown_flag": 1}
    mapping = changed("rollout_matching.vllm.server.servers", [server], BASE)
    where = "rollout_matching.vllm.server.servers[0].unknown_flag"
    assert only_error(mapping).where == where


@pytest.mark.req("CFG-02")
def test_extension_bucket_accepts_minor_residual_keys() -> None:
    toggles = {"some_minor_toggle": True}
    assert parse_config(changed("custom.extra", toggles, BASE)).custom.extra == toggles


@pytest.mark.req("CFG-02", "CFG-03")
@pytest.mark.parametrize("value", [{}, {"some_minor_toggle": True}, None])
def test_top_level_extra_presence_fails_fast(value: Any) -> None:
    assert "custom.extra" in refused("extra", value)


@pytest.mark.req("CFG-02", "CFG-05")
def test_missing_top_level_rollout_matching_still_fails_for_stage2_two_channel() -> None:
    error = only_error(without("rollout_matching", BASE))
    assert error.where == "rollout_matching"
    assert "missing" in error.found


@pytest.mark.req("RES-13")
def test_custom_coord_loss_does_not_hard_error() -> None:
    assert parse_config(changed("custom.coord_loss", {"weight": 1.0}, BASE)) == parse_config(BASE)


# --- Keys that went away ----------------------------------------------------------------


@pytest.mark.req("RES-01")
@pytest.mark.parametrize("base", [BASE, without("rollout_matching.decode_batch_size", BASE)])
def test_any_legacy_rollout_key_path_fails_fast(base: dict[str, Any]) -> None:
    error = only_error(changed(f"{OLD}.decode_batch_size", 2, base))
    assert error.where == f"{OLD}.decode_batch_size"
    assert error.do == "Use rollout_matching.decode_batch_size"


@pytest.mark.req("RES-06", "CFG-03")
def test_removed_channel_b_semantic_desc_gate_key_fails_fast() -> None:
    assert "Remove it" in refused("stage2_ab.channel_b.semantic_desc_gate", {"enabled": True})


@pytest.mark.req("RES-06", "CFG-03")
def test_removed_channel_b_reordered_gt_key_fails_fast() -> None:
    assert "Remove it" in refused("stage2_ab.channel_b.reordered_gt_sft", True)


@pytest.mark.req("RES-06", "CFG-03")
def test_removed_channel_b_desc_ce_weight_key_fails_fast() -> None:
    assert "Remove it" in refused("stage2_ab.channel_b.desc_ce_weight_matched", 0.1)


@pytest.mark.req("RES-05")
@pytest.mark.parametrize("key", ["stop_neutral", "stop_neutral_ce", "mask_im_end"])
def test_legacy_stop_neutral_config_keys_fail_fast(key: str) -> None:
    assert "<|im_end|> are always supervised" in refused(f"stage2_ab.channel_b.{key}", True)


@pytest.mark.req("RES-15")
def test_out_of_range_struct_ce_multiplier_is_handled_safely() -> None:
    key = "stage2_ab.pipeline.objective.0.config.rollout_drop_invalid_struct_ce_multiplier"
    for outside in (0.0, 0.999, 4.001, float("inf")):
        error = only_error(changed(key, outside, BASE))
        assert error.where == key.replace(".0.", "[0].")
    for inside in (1.0, 4.0):
        parse_config(changed(key, inside, BASE))


# --- Profiles ---------------------------------------------------------------------------


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    """A copy of the shipped profiles, to break."""
    return shutil.copytree(TWO_CHANNEL, tmp_path / TWO_CHANNEL.name)


def leaf(profiles: Path, folder: str = "prod") -> dict[str, Any]:
    """A shipped leaf's own mapping, `extends` included."""
    return read_mapping(profiles / folder / "default.yaml")


@pytest.mark.req("CFG-04")
def test_one_hop_profile_inheritance_passes_validation(profiles: Path) -> None:
    assert leaf(profiles)["extends"] == "../base.yaml"
    load_config(profiles / "prod" / "default.yaml")


@pytest.mark.req("CFG-04")
def test_multi_hop_profile_inheritance_fails_fast(profiles: Path) -> None:
    (profiles / "smoke" / "default.yaml").rename(profiles / "smoke" / "mid.yaml")
    own = read_mapping(profiles / "smoke" / "mid.yaml") | {"extends": "mid.yaml"}
    (error,) = faults_of(written(profiles / "smoke" / "leaf.yaml", dump_mapping(own)))
    assert "leaf.yaml -> " in error.found
    assert "mid.yaml -> " in error.found
    assert "../base.yaml" in error.do


@pytest.mark.req("CFG-04")
def test_dual_parent_smoke_inheritance_fails_fast(profiles: Path) -> None:
    both = leaf(profiles, "smoke") | {"extends": ["../prod/default.yaml", "../base.yaml"]}
    path = written(profiles / "smoke" / "leaf.yaml", dump_mapping(both))
    assert f"{path}: extends" in [error.where for error in faults_of(path)]


@pytest.mark.req("CFG-04")
def test_canonical_profile_discovery_is_scoped_to_prod_smoke() -> None:
    shipped = {path for path in TWO_CHANNEL.rglob("*.yaml") if is_canonical_leaf(path)}
    assert shipped == {*TWO_CHANNEL.glob("prod/*.yaml"), *TWO_CHANNEL.glob("smoke/*.yaml")}
    assert shipped
    for outside in ("base.yaml", "ablation/a.yaml", "prod/old/a.yaml"):
        assert not is_canonical_leaf(TWO_CHANNEL / outside)


@pytest.mark.req("CFG-04")
def test_downstream_profile_with_explicit_high_signal_fields_is_accepted(profiles: Path) -> None:
    own = {"extends": "../base.yaml"}
    for field in EXPLICIT_LEAF_FIELDS:
        own = changed(field, value_at(leaf(profiles), field), own)
    load_config(written(profiles / "prod" / "bare.yaml", dump_mapping(own)))


def value_at(mapping: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        mapping = mapping[key]
    return mapping


def missing_in_leaf(profiles: Path, field: str) -> ContractError:
    """The one fault of a leaf that leaves a field to its base."""
    base = profiles / "base.yaml"
    written(base, dump_mapping(changed(field, value_at(leaf(profiles), field), read_mapping(base))))
    own = without(field, leaf(profiles))
    (error,) = faults_of(written(profiles / "prod" / "default.yaml", dump_mapping(own)))
    return error


@pytest.mark.req("CFG-04")
def test_missing_explicit_run_identity_fails_fast(profiles: Path) -> None:
    assert missing_in_leaf(profiles, "training.run_name").where == "training.run_name"


@pytest.mark.req("CFG-04")
def test_missing_explicit_model_path_fails_fast(profiles: Path) -> None:
    assert missing_in_leaf(profiles, "model.model").where == "model.model"


@pytest.mark.req("CFG-04")
def test_canonical_prod_leaves_pin_explicit_ciou_soft_ce_w1_overrides() -> None:
    pinned = {
        "ciou_weight": 0.2,
        "coord_ce_weight": 0.02,
        "soft_ce_weight": 0.1,
        "w1_weight": 0.1,
        "target_truncate": 8,
    }
    leaves = list(TWO_CHANNEL.glob("prod/*.yaml"))
    assert leaves
    for path in leaves:
        own = value_at(read_mapping(path), "stage2_ab.pipeline.objective")
        stated = {key: value for module in own for key, value in module["config"].items()}
        assert {key: stated[key] for key in pinned} == pinned, "the leaf states them itself"
        effective = weights_of(load_config(path).pipeline)
        assert {key: effective[key] for key in pinned} == pinned


@pytest.mark.req("CFG-04")
def test_canonical_smoke_leaves_inherit_base_ciou_soft_ce_w1_defaults() -> None:
    leaves = list(TWO_CHANNEL.glob("smoke/*.yaml"))
    assert leaves
    for path in leaves:
        assert "pipeline" not in read_mapping(path)["stage2_ab"], "the leaf inherits them"
        weights = weights_of(load_config(path).pipeline)
        assert (weights["smoothl1_weight"], weights["ciou_weight"]) == (2.0, 0.5)
        assert (weights["soft_ce_weight"], weights["w1_weight"]) == (0.02, 0.02)
        assert weights["coord_ce_weight"] == 0.0


# --- From the YAML to the trainer -------------------------------------------------------


@pytest.mark.req("CFG-05", "CFG-09")
def test_canonical_grouped_rollout_config_is_visible_to_trainer() -> None:
    sampled = {"temperature": 0.5, "top_p": 0.9, "top_k": 40}
    rollout = {"max_new_tokens": 77, "repetition_penalty": 1.1, "decoding": sampled}
    config = parse_config(merge(BASE, {"rollout_matching": rollout | {"decode_mode": "sampling"}}))
    told = asking_of(config).config
    assert told.model_dump(include={"temperature", "top_p", "top_k"}) == sampled
    assert (told.max_tokens, told.repetition_penalty) == (77, 1.1)


@pytest.mark.req("CFG-02", "CFG-09")
def test_sft_injection_contract_remains_stable(tmp_path: Path) -> None:
    """What the run folder says was asked for loads to the config that the trainer is given."""
    config = load_config(TWO_CHANNEL / "prod" / "default.yaml")
    resolved = written(tmp_path / "resolved_config.yaml", dump_resolved(config))
    assert load_config(resolved).rollout_matching == config.rollout_matching


@pytest.mark.req("CFG-02")
def test_runtime_validator_does_not_own_static_key_allowlists(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    """Once the schema has been passed, no key is refused, and none is listed again."""
    mapping = small_mapping(toy_checkpoint, toy_data, tmp_path / "out")
    section = parse_config(mapping).rollout_matching.model_dump(mode="json")
    del section["pipeline"]
    check_inputs(parse_config(mapping | {"rollout_matching": section}))
    for path in set(LEARNER.rglob("*.py")) - set((LEARNER / "config").iterdir()):
        for listed in literal_collections(path):
            assert len(listed & RolloutMatchingConfig.model_fields.keys()) < 3, path


def literal_collections(path: Path) -> Iterator[set[object]]:
    """The constants in each list, tuple and set, and the keys of each dict, that a file spells."""
    for node in ast.walk(ast.parse(path.read_text())):
        items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        yield {item.value for item in items if isinstance(item, ast.Constant)}


@pytest.mark.req("CFG-07", "CFG-05")
def test_rollout_batching_ignores_eval_per_device_mismatch() -> None:
    batches = {
        "rollout_matching": {"decode_batch_size": 4},
        "training": {"per_device_eval_batch_size": 1},
    }
    rollout = parse_config(merge(BASE, batches)).rollout_matching
    assert rank_chunk_size(rollout.decode_batch_size, [1], learner_world_size=1) == 4
    assert rank_caps(rollout.decode_batch_size, [1], learner_world_size=1, rank=0) == [4]


@pytest.mark.req("DATA-01", "RES-02")
@pytest.mark.parametrize("b_ratio", [0.0, 1.0])
def test_gt_poly_fails_fast(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path, b_ratio: float
) -> None:
    image = read_samples(toy_data.train_jsonl, allow_poly=False)[0].images[0]
    line = f'{{"images": ["{image}"], "width": 64, "height": 64, "objects": [{{"desc": "roof", '
    file = written(tmp_path / "train.jsonl", line + '"poly": [0, 0, 9, 0, 9, 9]}]}\n')
    mapping = small_mapping(toy_checkpoint, toy_data, tmp_path / "out")
    mapping["data"]["train_jsonl"] = str(file)
    mapping["stage2_ab"]["schedule"]["b_ratio"] = b_ratio
    with pytest.raises(ContractError) as caught:
        check_inputs(parse_config(mapping))
    assert f"{file}:1" in caught.value.where
    assert "poly" in caught.value.found


@pytest.mark.req("REP-06")
def test_channel_b_startup_fails_when_repeat_aware_contract_is_enabled_but_inactive(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    guard = RepeatTerminateConfig(enabled=True, max_object_keys=40)
    with scripted_server() as server:
        server.routes["GET /info/"] = lambda _: info(guard, active=False)
        address = {"base_url": server.base_url, "group_port": 51216}
        rollout = {
            "repeat_terminate": guard.model_dump(),
            "vllm": {"server": {"servers": [address]}},
        }
        mapping = small_mapping(toy_checkpoint, toy_data, tmp_path, rollout_matching=rollout)
        config = parse_config(mapping)
        with pytest.raises(ContractError) as caught:
            reach_servers(config)
        assert not server.bodies("POST /infer/"), "nothing is asked of it"
    assert caught.value.where == f"GET {server.base_url}/info/ repeat_terminate"
    assert "configured but inactive" in caught.value.found
    assert "--run-config" in caught.value.do
