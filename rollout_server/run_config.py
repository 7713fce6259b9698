"""`--run-config`: the settings that a training YAML gives its servers (CFG-09, REP-04).

    rollout_matching.decode_batch_size    per GPU; `max_num_seqs` is per replica
    rollout_matching.repeat_terminate     repeat_terminate
    rollout_matching.vllm.sync.transport  weight_transport, unless it is `auto`
    rollout_matching.vllm.max_model_len, enable_prefix_caching, enable_lora
    tuner.lora_rank                       with enable_lora: max_lora_rank, rounded up

`extends` is followed and YAML is read as the learner does. Of the rest of the file nothing
is looked at: what else may be wrong in it is the learner's to say.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollout_server.yaml_file import read_yaml
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.extends import merge_chain, read_chain
from shared_contracts.rollout_config import SharedRolloutConfig
from shared_contracts.strict_model import contract_errors, shown

OPTION = "--run-config"
SECTION = "rollout_matching"


@dataclass(frozen=True)
class RunConfig:
    """lora_rank: of the adapter that is trained; None without one."""

    rollout: SharedRolloutConfig
    lora_rank: int | None


def read_run_config(path: Path) -> RunConfig:
    """What a training YAML says to learner and servers alike.

    Raises ContractErrors naming every bad key of that part by its path in the file.
    """
    _, mappings = read_chain(path, partial(read_yaml, option=OPTION))
    merged = merge_chain(mappings)
    section = merged.get(SECTION)
    if not isinstance(section, dict):
        raise ContractError(
            SECTION, f"{path} has {shown(section)} there, not a mapping", "Name a training YAML"
        )
    known = {k: v for k, v in section.items() if k in SharedRolloutConfig.model_fields}
    try:
        rollout = SharedRolloutConfig.model_validate(known)
    except ValidationError as error:
        raise ContractErrors(contract_errors(error, SharedRolloutConfig, at=SECTION)) from None
    return RunConfig(rollout, _lora_rank(merged.get("tuner")))


def _lora_rank(tuner: Any) -> int | None:
    """None as well where the learner would refuse what is written."""
    rank = tuner.get("lora_rank") if isinstance(tuner, dict) else None
    return rank if type(rank) is int and rank > 0 else None
