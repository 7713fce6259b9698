"""What a model takes of a server's memory: one arithmetic for both programs (FULL-05, FULL-06).

The server refuses what cannot fit by it; the learner estimates by it and derives `max_model_len`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared_contracts.adapters import checkpoint_chain
from shared_contracts.errors import ContractError

MIB, GIB = 2**20, 2**30

# Of a GPU, what an engine takes at most, unless it is stated: vLLM's default.
ENGINE_SHARE = 0.9
# A push has two buckets at once, each as large as the largest tensor or this,
BUCKET_BYTES = 512 * MIB
# and its communicator (NCCL's channels and the CUDA context of the transfer).
COMMUNICATOR_BYTES = GIB

# Contexts are rounded up to a multiple of it.
CONTEXT_STEP = 256


def cache_elements(text: Mapping[str, Any]) -> int:
    """Elements of the KV cache of one token: a key and a value in every layer.

    Source: Kwon et al., "Efficient memory management for large language model serving with
    PagedAttention", SOSP 2023, section 3. text: the `text_config` of a model.

    Raises LookupError, TypeError or ZeroDivisionError for a config that describes no such model.
    """
    heads = text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    return int(
        2 * text["num_hidden_layers"] * (text.get("num_key_value_heads") or heads) * head_dim
    )


def text_config(checkpoint: Path) -> Mapping[str, Any]:
    """The `text_config` of a checkpoint, or of what an adapter is over; empty if it has none."""
    try:
        *_, folder = checkpoint_chain(checkpoint, "model")
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = described.get("text_config", described)
    except (ContractError, OSError, ValueError, AttributeError):
        return {}
    return text if isinstance(text, dict) else {}


def run_context(checkpoint: Path, prompt: int, answer: int) -> int:
    """The `max_model_len` of a run: room for `prompt` and `answer` tokens, rounded up.

    At most the model's own context.
    """
    needed = -(-(prompt + answer) // CONTEXT_STEP) * CONTEXT_STEP
    own = text_config(checkpoint).get("max_position_embeddings")
    return min(needed, own) if type(own) is int and own > 0 else needed


def engine_share(total: float, largest: float) -> float:
    """The fraction of a GPU for an engine that leaves room for a push, in whole percent.

    total: bytes of the GPU. largest: bytes of the model's largest tensor, which a push has three
    times: in two buckets, and once while the engine's layer is put together.
    """
    push = 2 * max(BUCKET_BYTES, largest) + largest + COMMUNICATOR_BYTES
    return max(0.01, min(ENGINE_SHARE, int(100 * (1 - push / total)) / 100))
