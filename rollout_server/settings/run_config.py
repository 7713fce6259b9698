"""The part of a training YAML that a rollout server reads: `--run-config` (CFG-09, REP-04).

    rollout_matching.decode_batch_size    per GPU; `max_num_seqs` is per replica
    rollout_matching.repeat_terminate     repeat_terminate, with custom.answer_format
    rollout_matching.vllm.sync.transport  weight_transport, unless it is `auto`
    rollout_matching.vllm.max_model_len, enable_prefix_caching, enable_lora
    rollout_matching.max_new_tokens       with global_max_length: max_model_len, unless stated
    tuner.lora_rank                       with enable_lora: max_lora_rank, rounded up

The learner checks all other keys.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError

from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.extends import merge_chain, read_chain
from shared_contracts.footprint import run_context
from shared_contracts.repeat_guard import ENTRY_CONTEXTS
from shared_contracts.rollout_config import SharedRolloutConfig
from shared_contracts.strict_model import contract_errors, shown
from shared_contracts.yaml12 import read_document

OPTION = "--run-config"
SECTION = "rollout_matching"

# The ranks of vLLM's adapter buffers.
LoraRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
LORA_RANKS: tuple[int, ...] = get_args(LoraRank)


def _vllm_rank(lora_rank: int) -> int:
    """Return the smallest of LORA_RANKS that is at least `lora_rank`."""
    for rank in LORA_RANKS:
        if rank >= lora_rank:
            return rank
    found = f"is {lora_rank}, and vLLM serves adapters up to rank {LORA_RANKS[-1]}"
    do = "Lower it, or set rollout_matching.vllm.enable_lora to false"
    raise ContractError("tuner.lora_rank", found, do)


def run_settings(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the server settings of a training YAML. given: the server's other settings.

    Raises ContractErrors with every bad key of the server's part, by its path in the file.
    """
    _, mappings = read_chain(path, partial(read_yaml, option=OPTION))
    merged = merge_chain(mappings)
    rollout = read_rollout_config(path, merged)
    vllm, transport = rollout.vllm, rollout.vllm.sync.transport
    gpus, length = given.get("tensor_parallel_size"), vllm.max_model_len
    settings = {
        "max_num_seqs": rollout.decode_batch_size * (gpus if isinstance(gpus, int) else 1),
        "repeat_terminate": rollout.repeat_terminate,
        "weight_transport": None if transport == "auto" else transport,
        "max_model_len": length or _context(given.get("model"), merged),
        "enable_prefix_caching": vllm.enable_prefix_caching,
        "enable_lora": vllm.enable_lora,
    }
    lora_rank = _positive(_section(merged, "tuner").get("lora_rank"))
    if vllm.enable_lora and lora_rank is not None and "max_lora_rank" not in given:
        settings["max_lora_rank"] = _vllm_rank(lora_rank)
    return settings


def read_rollout_config(path: Path, merged: Mapping[str, Any]) -> SharedRolloutConfig:
    """Return the section that both programs read. merged: the mapping of the file `path`."""
    section = merged.get(SECTION)
    if not isinstance(section, dict):
        raise ContractError(
            SECTION, f"{path} has {shown(section)} there, not a mapping", "Name a training YAML"
        )
    known = {k: v for k, v in section.items() if k in SharedRolloutConfig.model_fields}
    guard, custom = known.get("repeat_terminate"), _section(merged, "custom")
    if isinstance(guard, dict) and "answer_format" in custom:
        known["repeat_terminate"] = {"answer_format": _answer_format(custom)} | guard
    try:
        return SharedRolloutConfig.model_validate(known)
    except ValidationError as error:
        raise ContractErrors(contract_errors(error, SharedRolloutConfig, at=SECTION)) from None


def _context(model: Any, merged: Mapping[str, Any]) -> int | None:
    """Return the context of the run; None if the YAML sets no limit.

    `global_max_length` limits the prompt, as a pack contains it.
    """
    packed = _section(merged, "training").get("packing", True) is not False
    prompt = _positive(merged.get("global_max_length")) if packed else None
    answer = _positive(_section(merged, SECTION).get("max_new_tokens"))
    if prompt is None or answer is None or not isinstance(model, str | Path):
        return None
    return run_context(Path(model), prompt, answer)


def read_yaml(path: Path, option: str) -> dict[str, Any]:
    """Read the mapping in a YAML file. option: names the file in the ContractError."""
    from ruamel import yaml  # not for `--help`

    try:
        return read_document(path, yaml).mapping
    except ContractError as error:
        raise ContractError(option, f"{error.where}: {error.found}", error.do) from error


def _answer_format(custom: Mapping[str, Any]) -> str:
    name = custom["answer_format"]
    if not isinstance(name, str) or name not in ENTRY_CONTEXTS:
        known = ", ".join(ENTRY_CONTEXTS)
        raise ContractError(
            "custom.answer_format", f"{shown(name)} is not known", f"Use one of {known}"
        )
    return name


def _section(mapping: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = mapping.get(name)
    return section if isinstance(section, dict) else {}


def _positive(value: Any) -> int | None:
    """Return a positive integer; None for any other value, which the learner refuses."""
    return value if type(value) is int and value > 0 else None
