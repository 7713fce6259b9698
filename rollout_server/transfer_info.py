"""What a worker's transfer engine is told, in the words of the engine of each transport."""

from collections.abc import Sequence
from typing import Any

from shared_contracts.weights import GLOO_TRANSPORTS, InitCommunicator, ParameterMeta, Transport

# Under which vLLM knows the engine of each transport; its own `ipc` takes pickled handles.
ENGINES: dict[Transport, str] = {"gloo": "gloo", "nccl": "nccl", "ipc": "shared-memory"}


def init_info(init: InitCommunicator, transport: Transport, rank_offset: int) -> dict[str, Any]:
    """What a worker's transfer engine is told to join the group.

    rank_offset: rank of the engine's first worker; the learner is rank 0.
    """
    if transport in GLOO_TRANSPORTS:
        return {
            "host": init.host,
            "port": init.port,
            "rank_offset": rank_offset,
            "world_size": init.world_size,
            "bucket_bytes": init.bucket_bytes,
            "timeout_s": init.timeout_s,
        }
    assert transport == "nccl"
    return {
        "nccl_unique_id_b64": init.nccl_unique_id,
        "rank_offset": rank_offset,
        "world_size": init.world_size,
        "packed": True,
        "packed_buffer_size_bytes": init.bucket_bytes,
    }


def update_info(transport: Transport, parameters: Sequence[ParameterMeta]) -> dict[str, Any]:
    """What a worker's transfer engine is told to receive."""
    if transport in GLOO_TRANSPORTS:
        return {"parameters": [parameter.model_dump() for parameter in parameters]}
    assert transport == "nccl"
    return {
        "names": [parameter.name for parameter in parameters],
        "dtype_names": [parameter.dtype for parameter in parameters],
        "shapes": [parameter.shape for parameter in parameters],
    }
