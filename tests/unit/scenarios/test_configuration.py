"""Scenarios of the training YAML and its profiles, each under its own name."""

from pathlib import Path

import pytest

from learner.config import (
    load_mapping,
    merge,
    parse_config,
)
from learner.data.toy import ToyData
from learner.rollout.policy import request_settings
from learner.training.input_checks import check_backend, check_inputs
from shared_contracts.errors import ContractError
from tests.unit.config_faults import CONFIGS, changed
from tests.unit.small_run import small_mapping

TWO_CHANNEL = CONFIGS / "stage2_two_channel"
BASE = load_mapping(TWO_CHANNEL / "base.yaml")


@pytest.mark.req("CFG-05", "SYNC-01")
def test_invalid_vllm_configuration_fails_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.training.input_checks.find_spec", lambda name: None)
    with pytest.raises(ContractError) as error:
        check_backend(parse_config(changed("rollout_matching.vllm", {}, BASE)), {})
    assert error.value.where == "rollout_matching.vllm.mode"
    assert "hf" in error.value.do


@pytest.mark.req("CFG-05", "CFG-09")
@pytest.mark.scenario("Canonical grouped config drives trainer contract")
def test_canonical_grouped_rollout_config_is_visible_to_trainer() -> None:
    sampled = {"temperature": 0.5, "top_p": 0.9, "top_k": 40}
    rollout = {"max_new_tokens": 77, "repetition_penalty": 1.1, "decoding": sampled}
    config = parse_config(merge(BASE, {"rollout_matching": rollout | {"decode_mode": "sampling"}}))
    request = request_settings(config).config
    assert request.model_dump(include={"temperature", "top_p", "top_k"}) == sampled
    assert (request.max_tokens, request.repetition_penalty) == (77, 1.1)


@pytest.mark.req("CFG-02")
def test_runtime_validator_does_not_own_static_key_allowlists(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    """Once the schema has been passed, no key is refused."""
    mapping = small_mapping(toy_checkpoint, toy_data, tmp_path / "out")
    section = parse_config(mapping).rollout_matching.model_dump(mode="json")
    del section["pipeline"]
    check_inputs(parse_config(mapping | {"rollout_matching": section}))
