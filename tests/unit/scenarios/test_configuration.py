"""Scenarios of the training YAML (seeds 000, 002 and 004), each under its own name."""

import copy
from pathlib import Path
from typing import Any

import pytest

from learner.config import load_mapping, parse_config
from learner.config.sync_mode import resolved_sync_mode
from learner.data.toy import ToyData
from learner.preflight import check_backend, reach_servers
from learner.rollout.distribution import rank_chunk_size
from rollout_server.run_config import read_run_config
from shared_contracts.errors import ContractError, ContractErrors
from tests.unit.small_run import small_mapping

ROOT = Path(__file__).parents[3]
BASE = load_mapping(ROOT / "configs/stage2_two_channel/base.yaml")
SERVER: dict[str, Any] = {"base_url": "http://127.0.0.1:9", "group_port": 51216}
OLD = "custom.extra.rollout_matching"


def with_key(dotted: str, value: Any) -> dict[str, Any]:
    """The shipped base with one key set."""
    mapping = copy.deepcopy(BASE)
    here = mapping
    *parents, last = dotted.split(".")
    for key in parents:
        here = here.setdefault(key, {})
    here[last] = value
    return mapping


def without(dotted: str) -> dict[str, Any]:
    mapping = copy.deepcopy(BASE)
    here = mapping
    *parents, last = dotted.split(".")
    for key in parents:
        here = here[key]
    del here[last]
    return mapping


def refused(mapping: dict[str, Any]) -> ContractError:
    """The one fault of a mapping."""
    with pytest.raises(ContractErrors) as caught:
        parse_config(mapping)
    (error,) = caught.value.errors
    return error


def refused_key(dotted: str, value: Any = 1) -> str:
    """What to do about a key that is not known; the fault names the key's whole path."""
    error = refused(with_key(dotted, value))
    assert error.where == dotted
    return error.do


def test_the_base_is_valid() -> None:
    parse_config(BASE)


@pytest.mark.req("CFG-05", "RES-07")
def test_default_behavior_preserved_colocate() -> None:
    mapping = with_key("rollout_matching.vllm", {})
    assert parse_config(mapping).rollout_matching.backend == "colocate"


@pytest.mark.req("RES-03")
def test_multi_server_pairing_is_strict_and_deterministic() -> None:
    mapping = with_key("rollout_matching.vllm.server.base_url", ["http://127.0.0.1:1"])
    mapping["rollout_matching"]["vllm"]["server"]["group_port"] = [51216]
    with pytest.raises(ContractErrors) as caught:
        parse_config(mapping)
    for error in caught.value.errors:
        assert "rollout_matching.vllm.server.servers[]" in error.do


@pytest.mark.req("RES-03", "CFG-03")
def test_legacy_rollout_server_paired_list_shape_fails_fast() -> None:
    for key in ("base_url", "group_port"):
        do = refused_key(f"rollout_matching.vllm.server.{key}")
        assert f"rollout_matching.vllm.server.servers[].{key}" in do


@pytest.mark.req("CFG-05", "SYNC-04")
def test_invalid_server_configuration_fails_fast(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    servers = "rollout_matching.vllm.server.servers"
    assert refused(with_key(servers, [])).where == servers
    for missing in ("base_url", "group_port"):
        entry = {key: value for key, value in SERVER.items() if key != missing}
        assert refused(with_key(servers, [entry])).where == f"{servers}[0].{missing}"
    unreachable = {"vllm": {"server": {"servers": [SERVER], "timeout_s": 0.2}}}
    config = parse_config(
        small_mapping(toy_checkpoint, toy_data, tmp_path, rollout_matching=unreachable)
    )
    with pytest.raises(ContractError) as error:
        reach_servers(config)
    assert SERVER["base_url"] in error.value.where


@pytest.mark.req("CFG-05", "SYNC-01")
def test_invalid_vllm_configuration_fails_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    both = "rollout_matching.vllm.tensor_parallel_size"
    assert refused(with_key(both, 2)).where == both
    adapter = refused(with_key("rollout_matching.vllm.sync.mode", "adapter"))
    assert "enable_lora" in adapter.do
    monkeypatch.setattr("learner.preflight.find_spec", lambda name: None)
    with pytest.raises(ContractError) as error:
        check_backend(parse_config(with_key("rollout_matching.vllm", {})), {})
    assert error.value.where == "rollout_matching.vllm.mode"
    assert "hf" in error.value.do


@pytest.mark.req("RES-04", "SYNC-01")
@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_non_full_sync_mode_fails_fast_under_multi_process_learner(mode: str) -> None:
    mapping = with_key("rollout_matching.vllm.enable_lora", True)
    mapping["rollout_matching"]["vllm"]["sync"]["mode"] = mode
    mapping["tuner"] = {"train_type": "lora", "lora_rank": 8, "lora_alpha": 16}
    config = parse_config(mapping)
    assert resolved_sync_mode(config, learner_world_size=1) == "adapter"
    with pytest.raises(ContractError) as error:
        resolved_sync_mode(config, learner_world_size=2)
    assert error.value.where == "rollout_matching.vllm.sync.mode"
    assert "full" in error.value.do


@pytest.mark.req("CFG-07")
def test_eval_per_device_knobs_do_not_override_rollout_decode_batching() -> None:
    sizes = []
    for eval_batch_size in (1, 16):
        mapping = with_key("training.per_device_eval_batch_size", eval_batch_size)
        rollout = parse_config(mapping).rollout_matching
        sizes.append(rank_chunk_size(rollout.decode_batch_size, [1], 1))
    assert sizes == [4, 4]


@pytest.mark.req("RES-01")
def test_legacy_decode_key_path_fails_fast() -> None:
    assert "rollout_matching.decode_batch_size" in refused_key(f"{OLD}.decode_batch_size")


@pytest.mark.req("RES-01")
def test_legacy_rollout_backend_key_path_fails_fast() -> None:
    assert "rollout_matching.rollout_backend" in refused_key(f"{OLD}.rollout_backend", "vllm")


@pytest.mark.req("CFG-02")
def test_unknown_rollout_key_fails_before_rollout_trainer_execution() -> None:
    refused_key("rollout_matching.unknown_rollout_key")


@pytest.mark.req("CFG-02")
def test_unknown_nested_decoding_key_fails_before_execution() -> None:
    refused_key("rollout_matching.decoding.unknown_decoding_key")


@pytest.mark.req("RES-06", "CFG-03")
def test_rollout_generate_batch_size_fails_fast_when_present() -> None:
    do = refused_key("rollout_matching.rollout_generate_batch_size")
    assert "rollout_matching.decode_batch_size" in do


@pytest.mark.req("RES-06", "CFG-03")
def test_rollout_infer_batch_size_fails_fast_when_present() -> None:
    do = refused_key("rollout_matching.rollout_infer_batch_size")
    assert "rollout_matching.decode_batch_size" in do


@pytest.mark.req("RES-06", "CFG-03")
@pytest.mark.parametrize("value", ["micro", "window", None])
def test_post_rollout_pack_scope_fails_fast_when_present(value: str | None) -> None:
    assert "Remove it" in refused_key("rollout_matching.post_rollout_pack_scope", value)


@pytest.mark.req("RES-06", "CFG-03")
def test_rollout_buffer_fails_fast_when_present() -> None:
    assert "Remove it" in refused_key("rollout_matching.rollout_buffer", {"enabled": True})


@pytest.mark.req("RES-06", "CFG-03")
@pytest.mark.parametrize("key", ["temperature", "top_p", "top_k"])
def test_legacy_decoding_keys_fail_fast(key: str) -> None:
    for section in ("rollout_matching", OLD):
        assert f"rollout_matching.decoding.{key}" in refused_key(f"{section}.{key}", 0.5)


@pytest.mark.req("CFG-09")
def test_canonical_grouped_config_drives_trainer_contract() -> None:
    written = BASE["rollout_matching"]
    rollout = parse_config(BASE).rollout_matching
    assert rollout.rollout_backend == written["rollout_backend"]
    assert rollout.vllm.mode == written["vllm"]["mode"]
    assert rollout.vllm.server is not None
    assert [server.model_dump() for server in rollout.vllm.server.servers] == (
        written["vllm"]["server"]["servers"]
    )
    for section in ("decoding", "repeat_terminate", "matching"):
        resolved = getattr(rollout, section).model_dump()
        assert {key: resolved[key] for key in written[section]} == written[section]


@pytest.mark.req("CFG-09")
def test_preflight_runtime_consume_a_shared_validated_rollout_contract() -> None:
    path = ROOT / "configs/stage2_two_channel/prod/default.yaml"
    learner = parse_config(load_mapping(path)).rollout_matching.model_dump()
    server = read_run_config(path).rollout.model_dump()
    assert server == {key: learner[key] for key in server}


@pytest.mark.req("CFG-09")
def test_runtime_rollout_injection_path_stays_stable() -> None:
    learner = parse_config(load_mapping(ROOT / "configs/stage2_two_channel/prod/default.yaml"))
    again = parse_config(learner.model_dump())
    assert again.rollout_matching == learner.rollout_matching


@pytest.mark.req("CFG-08", "RES-02")
def test_missing_rollout_pipeline_fails_fast() -> None:
    mapping = load_mapping(ROOT / "configs/stage2_rollout_aligned/base.yaml")
    del mapping["rollout_matching"]["pipeline"]
    assert refused(mapping).where == "rollout_matching.pipeline"


@pytest.mark.req("CFG-01", "RES-02")
def test_rollout_matching_enabled_via_trainer_variant() -> None:
    mapping = load_mapping(ROOT / "configs/stage2_rollout_aligned/base.yaml")
    config = parse_config(mapping)
    assert config.custom.trainer_variant == "stage2_rollout_aligned"
    assert config.pipeline is config.rollout_matching.pipeline
    assert config.b_ratio == 1
    assert config.allow_poly
