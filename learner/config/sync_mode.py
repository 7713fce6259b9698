"""What a push sends: the whole model, or the LoRA adapter alone (SYNC-01)."""

from typing import Literal

from learner.config.schema import Config
from shared_contracts.errors import ContractError

SyncMode = Literal["full", "adapter"]


def wanted_sync_mode(config: Config) -> SyncMode:
    """`sync.mode` without `auto`, which is `adapter` where one is trained and served."""
    vllm = config.rollout_matching.vllm
    served = vllm.enable_lora and config.tuner.train_type == "lora"
    if vllm.sync.mode == "full" or (vllm.sync.mode == "auto" and not served):
        return "full"
    return "adapter"


def resolved_sync_mode(config: Config, learner_world_size: int) -> SyncMode:
    """`wanted_sync_mode` of a run; ContractError for adapters of several processes (RES-04)."""
    wanted = wanted_sync_mode(config)
    if wanted == "adapter" and learner_world_size > 1:
        raise ContractError(
            "rollout_matching.vllm.sync.mode",
            f"{config.rollout_matching.vllm.sync.mode} resolves to adapter, and there are "
            f"{learner_world_size} learner processes",
            "Use full, or one learner process",
        )
    return wanted
