"""Scenarios of the training YAML and its profiles, each under its own name."""

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from learner.config import (
    dump_mapping,
    load_config,
    load_mapping,
    merge,
    parse_config,
)
from learner.config.load import EXPLICIT_LEAF_FIELDS
from learner.config.rollout_matching import RolloutMatchingConfig
from learner.config.yaml12 import read_mapping
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.rollout.policy import asking_of
from learner.training.start_checks import check_backend, check_inputs, reach_servers
from rollout_server.settings.options import read_run_config
from shared_contracts.errors import ContractError
from shared_contracts.repeat_guard import RepeatTerminateConfig
from tests.unit.config_faults import CONFIGS, changed, only_error
from tests.unit.scripted_server import info, scripted_server
from tests.unit.small_run import small_mapping
from tests.unit.test_config_profiles import written

LEARNER = Path(__file__).parents[3] / "learner"
TWO_CHANNEL = CONFIGS / "stage2_two_channel"
BASE = load_mapping(TWO_CHANNEL / "base.yaml")
SERVER: dict[str, Any] = {"base_url": "http://127.0.0.1:9", "group_port": 51216}


def test_the_base_is_valid() -> None:
    parse_config(BASE)


@pytest.mark.req("CFG-05", "SYNC-04")
def test_invalid_server_configuration_fails_fast(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    servers = "rollout_matching.vllm.server.servers"
    assert only_error(changed(servers, [], BASE)).where == servers
    for missing in ("base_url", "group_port"):
        entry = {key: value for key, value in SERVER.items() if key != missing}
        assert only_error(changed(servers, [entry], BASE)).where == f"{servers}[0].{missing}"
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
    assert only_error(changed(both, 2, BASE)).where == both
    adapter = only_error(changed("rollout_matching.vllm.sync.mode", "adapter", BASE))
    assert "enable_lora" in adapter.do
    monkeypatch.setattr("learner.training.start_checks.find_spec", lambda name: None)
    with pytest.raises(ContractError) as error:
        check_backend(parse_config(changed("rollout_matching.vllm", {}, BASE)), {})
    assert error.value.where == "rollout_matching.vllm.mode"
    assert "hf" in error.value.do


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
    path = TWO_CHANNEL / "prod/default.yaml"
    learner = parse_config(load_mapping(path)).rollout_matching.model_dump()
    server = read_run_config(path).rollout.model_dump()
    assert server == {key: learner[key] for key in server}


# --- Profiles ---------------------------------------------------------------------------


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    """A copy of the shipped profiles, to break."""
    return shutil.copytree(TWO_CHANNEL, tmp_path / TWO_CHANNEL.name)


def leaf(profiles: Path, folder: str = "prod") -> dict[str, Any]:
    """A shipped leaf's own mapping, `extends` included."""
    return read_mapping(profiles / folder / "default.yaml")


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


# --- From the YAML to the trainer -------------------------------------------------------


@pytest.mark.req("CFG-05", "CFG-09")
def test_canonical_grouped_rollout_config_is_visible_to_trainer() -> None:
    sampled = {"temperature": 0.5, "top_p": 0.9, "top_k": 40}
    rollout = {"max_new_tokens": 77, "repetition_penalty": 1.1, "decoding": sampled}
    config = parse_config(merge(BASE, {"rollout_matching": rollout | {"decode_mode": "sampling"}}))
    told = asking_of(config).config
    assert told.model_dump(include={"temperature", "top_p", "top_k"}) == sampled
    assert (told.max_tokens, told.repetition_penalty) == (77, 1.1)


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
