"""What a push sends: the whole model, or the LoRA adapter alone (SYNC-01)."""

from typing import Literal

from learner.config.schema import Config
from shared_contracts.errors import ContractError

SyncMode = Literal["full", "adapter"]


def resolved_sync_mode(config: Config, learner_world_size: int) -> SyncMode:
    """`sync.mode` without `auto`, which is `adapter` where one is trained and served.

    Raises ContractError for adapters of several learner processes (RES-04).
    """
    vllm = config.rollout_matching.vllm
    served = vllm.enable_lora and config.tuner.train_type == "lora"
    if vllm.sync.mode == "full" or (vllm.sync.mode == "auto" and not served):
        return "full"
    if learner_world_size > 1:
        raise ContractError(
            "rollout_matching.vllm.sync.mode",
            f"{vllm.sync.mode} resolves to adapter, and there are {learner_world_size} learner "
            "processes",
            "Use full, or one learner process",
        )
    return "adapter"
