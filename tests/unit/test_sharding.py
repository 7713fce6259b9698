"""What FSDP2 cannot be combined with is refused before anything heavy is imported."""

from pathlib import Path
from typing import Any

import pytest

from learner.config import merge, parse_config
from learner.data.toy import ToyData
from learner.training.input_checks import check_inputs
from shared_contracts.errors import ContractError
from tests.unit.small_run import small_mapping

HF = {"rollout_matching": {"rollout_backend": "hf", "max_new_tokens": 12}}
OFFLOAD = {
    "rollout_matching": {"offload": {"enabled": True, "offload_model": True}, "max_new_tokens": 12}
}
CHANNEL_B = {"stage2_ab": {"schedule": {"b_ratio": 1.0}}}
LORA = {"tuner": {"train_type": "lora", "lora_rank": 4, "lora_alpha": 8}}


@pytest.mark.req("RUN-02", "DDP-02", "CFG-05", "ROLL-03")
@pytest.mark.parametrize(
    ("processes", "changes", "named"),
    [
        (2, {}, None),
        (2, HF, None),
        (1, {}, "one learner process"),
        (2, LORA, "tuner.train_type lora"),
        (2, HF | CHANNEL_B, "rollout_backend hf"),
        (2, OFFLOAD | CHANNEL_B, "rollout_matching.offload"),
    ],
    ids=["channel A", "hf without channel B", "one process", "lora", "hf", "offload"],
)
def test_sharding_of_a_model_that_has_to_be_whole_is_refused(
    toy_checkpoint: Path,
    toy_data: ToyData,
    tmp_path: Path,
    processes: int,
    changes: dict[str, Any],
    named: str | None,
) -> None:
    mapping = merge(small_mapping(toy_checkpoint, toy_data, tmp_path / "run"), changes)
    if "rollout_matching" in changes:
        mapping["rollout_matching"] = changes["rollout_matching"]
    mapping["training"]["data_parallel"] = "fsdp2"
    config, environment = parse_config(mapping), {"WORLD_SIZE": str(processes)}
    if named is None:
        check_inputs(config, environment)
        return
    with pytest.raises(ContractError) as caught:
        check_inputs(config, environment)
    assert caught.value.where == "training.data_parallel"
    assert caught.value.do.startswith("Set it to ddp")
    assert named in caught.value.found
