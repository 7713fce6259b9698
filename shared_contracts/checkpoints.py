"""Folders of checkpoints and of peft adapters over them, and the memory of a model on a server.

Both programs compute the memory alike (FULL-05, FULL-06): the server refuses settings that do not
fit; the learner makes estimates and derives `max_model_len`.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared_contracts.errors import ContractError

MIB, GIB = 2**20, 2**30
ADAPTER = "adapter_config.json"


def checkpoint_chain(folder: Path, where: str) -> list[Path]:
    """Return the folder, its base checkpoint, and so on; the last is no adapter.

    Raises ContractError at `where` for an adapter without a base checkpoint on this machine.
    """
    chain = [folder]
    while (file := chain[-1] / ADAPTER).is_file():
        try:
            base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
            over = Path(base)
        except (OSError, ValueError, KeyError, TypeError) as error:
            found = f"{file} does not name the base checkpoint ({error!r})"
            raise ContractError(where, found, "Save the adapter again with peft") from error
        if not over.is_dir() or over in chain:
            found = f"{chain[-1]} is an adapter over {base}, which is no other folder here"
            do = f"Name the folder of that checkpoint in {file}, as base_model_name_or_path"
            raise ContractError(where, found, do)
        chain.append(over)
    return chain


def weight_files(folder: Path, where: str) -> list[Path]:
    """Return the `*.safetensors` of a checkpoint; raises ContractError at `where` without any."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        found = f"{folder} holds no *.safetensors file"
        raise ContractError(where, found, "Save the weights as safetensors")
    return files


def text_config(checkpoint: Path) -> Mapping[str, Any]:
    """Return the `text_config` of a checkpoint or of an adapter's base; empty if unknown."""
    try:
        *_, folder = checkpoint_chain(checkpoint, "model")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config", config)
    except (ContractError, OSError, ValueError, AttributeError):
        return {}
    return text if isinstance(text, dict) else {}


# Largest default share of a GPU for an engine, as in vLLM.
ENGINE_SHARE = 0.9
# Smallest size of the two buckets of a push; a larger tensor has a larger bucket.
BUCKET_BYTES = 512 * MIB
# NCCL's channels and the CUDA context of the transfer.
COMMUNICATOR_BYTES = GIB

# Contexts are rounded up to a multiple of this.
CONTEXT_STEP = 256
# Most tokens of a prompt that proves a push, with its answer; the toy's tokenizer makes so many.
PROOF_TOKENS = 300


def cache_elements(text: Mapping[str, Any]) -> int:
    """Return the elements of one token's KV cache: a key and a value in every layer.

    Source: Kwon et al., "Efficient memory management for large language model serving with
    PagedAttention", SOSP 2023, section 3. text: the `text_config` of a model.

    Raises LookupError, TypeError or ZeroDivisionError for an incomplete config.
    """
    heads = text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    return int(
        2 * text["num_hidden_layers"] * (text.get("num_key_value_heads") or heads) * head_dim
    )


def run_context(checkpoint: Path, prompt: int, answer: int) -> int:
    """Return the `max_model_len` of a run: `prompt + answer` tokens, rounded up.

    The result has room for the proof of a push, and is at most the model's context.
    """
    needed = math.ceil(max(prompt + answer, PROOF_TOKENS) / CONTEXT_STEP) * CONTEXT_STEP
    own = text_config(checkpoint).get("max_position_embeddings")
    return min(needed, own) if type(own) is int and own > 0 else needed


def engine_share(total: float, largest: float) -> float:
    """Return the share of a GPU for an engine that leaves room for a push, in whole percent.

    total: bytes of the GPU. largest: bytes of the model's largest tensor, which a push holds three
    times: in two buckets, and in the engine's new layer.
    """
    push = 2 * max(BUCKET_BYTES, largest) + largest + COMMUNICATOR_BYTES
    return max(0.01, min(ENGINE_SHARE, int(100 * (1 - push / total)) / 100))
