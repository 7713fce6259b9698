"""Our weight transfer engines, made known to vLLM: its plugin entry point."""

from functools import cache

from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from rollout_server.orphans import die_with_parent
from rollout_server.transfer_info import ENGINES
from rollout_server.weight_engine_gloo import GlooWeightTransferEngine
from rollout_server.weight_engine_ipc import IpcWeightTransferEngine


@cache
def register() -> None:
    """In every process of an engine: our engines, and a life tied to its parent's."""
    die_with_parent()
    WeightTransferEngineFactory.register_engine(ENGINES["gloo"], GlooWeightTransferEngine)
    WeightTransferEngineFactory.register_engine(ENGINES["ipc"], IpcWeightTransferEngine)
