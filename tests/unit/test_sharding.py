"""What FSDP2 cannot be combined with is refused before anything heavy is imported."""

from pathlib import Path
from typing import Any

import pytest

from learner.config import merge, parse_config
from learner.data.toy import ToyData
from learner.training.start_checks import check_inputs
from shared_contracts.errors import ContractError
from tests.unit.small_run import small_mapping

HF = {"rollout_matching": {"rollout_backend": "hf"}}
CHANNEL_B = {"stage2_ab": {"schedule": {"b_ratio": 1.0}}}
LORA = {"tuner": {"train_type": "lora", "lora_rank": 4, "lora_alpha": 8}}


def refusal(
    model: Path, data: ToyData, out: Path, processes: int, changes: dict[str, Any]
) -> ContractError | None:
    mapping = merge(small_mapping(model, data, out / "run"), changes)
    if "rollout_matching" in changes:
        mapping["rollout_matching"] = changes["rollout_matching"] | {"max_new_tokens": 12}
    mapping["training"]["data_parallel"] = "fsdp2"
    try:
        check_inputs(parse_config(mapping), {"WORLD_SIZE": str(processes)})
    except ContractError as error:
        return error
    return None


@pytest.mark.req("RUN-02", "DDP-02")
@pytest.mark.parametrize(
    ("processes", "changes", "named"),
    [
        (2, {}, None),
        (2, HF, None),
        (1, {}, "one learner process"),
        (2, LORA, "tuner.train_type lora"),
        (2, merge(HF, CHANNEL_B), "rollout_backend hf"),
    ],
    ids=["channel_a", "hf_that_is_not_asked", "one_process", "lora", "hf"],
)
def test_sharding_what_has_to_be_whole_is_refused(
    toy_checkpoint: Path,
    toy_data: ToyData,
    tmp_path: Path,
    processes: int,
    changes: dict[str, Any],
    named: str | None,
) -> None:
    error = refusal(toy_checkpoint, toy_data, tmp_path, processes, changes)
    if named is None:
        assert error is None
    else:
        assert error is not None
        assert error.where == "training.data_parallel"
        assert error.do.startswith("Set it to ddp")
        assert named in error.found
