"""Retired keys: each is an error that says what to use instead (CFG-03)."""

import re
from collections.abc import Iterator
from typing import Any

from shared_contracts.errors import ContractError
from shared_contracts.strict_model import joined

IGNORED_KEY = ("custom", "coord_loss")
_OLD_ROLLOUT = "custom.extra.rollout_matching"
_INDEX = re.compile(r"\[\d+\]")

_CHANNEL_B = "stage2_ab.channel_b"
_DECODE_BATCH = "Use rollout_matching.decode_batch_size"
_NEVER = "Remove it: descriptions of matched objects are never supervised"
_ALWAYS = "Remove it: the closing brace and <|im_end|> are always supervised"


def _module(name: str, *keys: str) -> dict[str, str]:
    of_module = f"Set stage2_ab.pipeline.objective[name={name}].config"
    return {f"stage2_ab.{old}": f"{of_module}.{old.removeprefix('bbox_')}" for old in keys}


# Key, with `[]` for a list index -> what to do.
RETIRED_KEYS: dict[str, str] = {
    "extra": "Move its keys to custom.extra, the only free section",
    "custom.coord_soft_ce_w1": "Set soft_ce_weight and w1_weight of the pipeline's coord_reg "
    "module, in stage2_ab.pipeline or rollout_matching.pipeline",
    "training.deepspeed": "Remove it; to shard the model over processes, set "
    "training.data_parallel to fsdp2",
    "training.logging_steps": "Remove it: every step is logged",
    "stage2_ab.schedule.pattern": "Set stage2_ab.schedule.b_ratio",
    **_module("token_ce", "desc_ce_weight"),
    **_module("bbox_geo", "bbox_smoothl1_weight", "bbox_ciou_weight"),
    **_module("coord_reg", "coord_ce_weight", "coord_gate_weight", "text_gate_weight"),
    "stage2_ab.fmt_struct_ce_weight": "Remove it: structure tokens weigh 1; scale the token_ce "
    "module by its weight",
    "stage2_ab.coord_el1_weight": "Use the w1_weight of the coord_reg module",
    "stage2_ab.coord_ehuber_weight": "Use the smoothl1_weight of the bbox_geo module",
    "stage2_ab.coord_entropy_weight": "Use the soft_ce_weight of the coord_reg module",
    f"{_CHANNEL_B}.reordered_gt_sft": "Remove it: the target is always the rollout's prefix with "
    "the missed objects appended",
    f"{_CHANNEL_B}.desc_ce_weight_matched": _NEVER,
    f"{_CHANNEL_B}.semantic_desc_gate": _NEVER,
    f"{_CHANNEL_B}.mode": "Remove it: channel B runs in step mode, unless "
    "rollout_matching.async_rollout.enabled is true",
    f"{_CHANNEL_B}.async": "Use the same keys of rollout_matching.async_rollout",
    f"{_CHANNEL_B}.enable_pipeline": "Remove it: rollouts and training overlap where the servers "
    "have devices of their own",
    f"{_CHANNEL_B}.rollouts_per_step": "Set training.effective_batch_size",
    f"{_CHANNEL_B}.rollout_decode_batch_size": _DECODE_BATCH,
    **{f"{_CHANNEL_B}.{k}": _ALWAYS for k in ("stop_neutral", "stop_neutral_ce", "mask_im_end")},
    **{
        f"{section}.pipeline.objective[].config.{alias}": f"Write {key}"
        for section in ("stage2_ab", "rollout_matching")
        for alias, key in {
            "bbox_smoothl1_weight": "smoothl1_weight",
            "bbox_ciou_weight": "ciou_weight",
            "coord_soft_ce_weight": "soft_ce_weight",
            "coord_w1_weight": "w1_weight",
        }.items()
    },
    "rollout_matching.rollout_buffer": "Remove it: every step makes fresh rollouts",
    "rollout_matching.post_rollout_pack_scope": "Remove it: packs are planned over the samples of "
    "one optimizer step",
    "rollout_matching.rollout_generate_batch_size": _DECODE_BATCH,
    "rollout_matching.rollout_infer_batch_size": _DECODE_BATCH,
    **{
        f"rollout_matching.{key}": f"Use rollout_matching.decoding.{key}"
        for key in ("temperature", "top_p", "top_k")
    },
    **{
        f"rollout_matching.vllm.server.{key}": f"Use rollout_matching.vllm.server.servers[].{key}"
        for key in ("base_url", "group_port")
    },
}

# Retired values by key, and what to use.
RETIRED_VALUES = {
    "custom.trainer_variant": {
        "stage2_ab_training": "stage2_two_channel",
        "rollout_matching_sft": "stage2_rollout_aligned",
    },
}

# Sections without keys, and what replaces the keys that other programs have there (RES-30).
EMPTY_SECTIONS = {
    "quantization": "to train adapters over frozen weights, set tuner.train_type to lora",
    "rlhf": "the objective is the pipeline of the trainer's variant",
    "debug": "your own tools may have keys in custom.extra",
    "experiment": "training.run_name names the run, and custom.extra may have notes",
    "deepspeed": "to shard the model over processes, set training.data_parallel to fsdp2",
}


def retired_errors(value: Any, where: str = "") -> Iterator[ContractError]:
    """Yield an error for every retired key in the mapping at the path `where`, in its order."""
    entries: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        entries = ((f"[{index}]", item) for index, item in enumerate(value))
    for key, item in entries:
        path = joined(where, key)
        old = path.startswith(_OLD_ROLLOUT)  # keys below it have moved to `rollout_matching`
        new = _INDEX.sub("[]", path.replace(_OLD_ROLLOUT, "rollout_matching") if old else path)
        if do := RETIRED_KEYS.get(new):
            yield ContractError(path, "this key is retired", do)
        elif isinstance(item, str) and (name := RETIRED_VALUES.get(new, {}).get(item)):
            yield ContractError(path, f"{item!r} is retired", f"Use {name}")
        elif old and not (isinstance(item, dict) and item):
            yield ContractError(path, "this key has moved", f"Use {new}")
        else:
            yield from retired_errors(item, path)


def with_instead(error: ContractError) -> ContractError:
    """Return the error; for a section without keys, `do` also says what to use instead."""
    instead = EMPTY_SECTIONS.get(error.where.partition(".")[0])
    return ContractError(error.where, error.found, f"{error.do}; {instead}") if instead else error
