"""Keys and values of the contract that this learner refuses, and what to do instead.

One table of keys, one of values. A path writes every list index as `[]`. Nothing here is a default
or an alias: a hit is always an error.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from learner.config.rollout_matching import RolloutMatchingConfig
from shared_contracts.errors import ContractError
from shared_contracts.strict_model import joined, shown, unknown_key

OLD_ROLLOUT_SECTION = "custom.extra.rollout_matching"
IGNORED_KEY = ("custom", "coord_loss")

_PIPELINES = ("stage2_ab.pipeline", "rollout_matching.pipeline")


class Retired(NamedTuple):
    verdict: Literal["was removed", "has moved"]
    do: str


def _pipeline_key(module: str, key: str) -> Retired:
    return Retired("has moved", f"Set stage2_ab.pipeline.objective[name={module}].config.{key}")


def _removed(do: str) -> Retired:
    return Retired("was removed", do)


_DECODE_BATCH = Retired("has moved", "Use rollout_matching.decode_batch_size")
_ASYNC = "rollout_matching.async_rollout"

_ALIASES = {
    "bbox_smoothl1_weight": "smoothl1_weight",
    "bbox_ciou_weight": "ciou_weight",
    "coord_soft_ce_weight": "soft_ce_weight",
    "coord_w1_weight": "w1_weight",
}

RETIRED_KEYS: dict[str, Retired] = {
    "extra": _removed("Move its keys to custom.extra, the only free section"),
    "custom.coord_soft_ce_w1": _removed(
        "Set soft_ce_weight and w1_weight of the pipeline's coord_reg module, in "
        "stage2_ab.pipeline or rollout_matching.pipeline"
    ),
    "training.deepspeed": _removed(
        "Remove it; to shard the model over processes, set training.data_parallel to fsdp2"
    ),
    "training.logging_steps": _removed("Remove it: every step is logged"),
    # stage2_ab
    "stage2_ab.schedule.pattern": _removed("Set stage2_ab.schedule.b_ratio"),
    "stage2_ab.desc_ce_weight": _pipeline_key("token_ce", "desc_ce_weight"),
    "stage2_ab.fmt_struct_ce_weight": _removed(
        "Remove it: structure tokens weigh 1; scale the token_ce module by its weight"
    ),
    "stage2_ab.bbox_smoothl1_weight": _pipeline_key("bbox_geo", "smoothl1_weight"),
    "stage2_ab.bbox_ciou_weight": _pipeline_key("bbox_geo", "ciou_weight"),
    "stage2_ab.coord_ce_weight": _pipeline_key("coord_reg", "coord_ce_weight"),
    "stage2_ab.coord_el1_weight": _removed("Use the w1_weight of the coord_reg module"),
    "stage2_ab.coord_ehuber_weight": _removed("Use the smoothl1_weight of the bbox_geo module"),
    "stage2_ab.coord_entropy_weight": _removed("Use the soft_ce_weight of the coord_reg module"),
    "stage2_ab.coord_gate_weight": _pipeline_key("coord_reg", "coord_gate_weight"),
    "stage2_ab.text_gate_weight": _pipeline_key("coord_reg", "text_gate_weight"),
    "stage2_ab.channel_b.reordered_gt_sft": _removed(
        "Remove it: the target is always the rollout's prefix with the missed objects appended"
    ),
    "stage2_ab.channel_b.desc_ce_weight_matched": _removed(
        "Remove it: descriptions of matched objects are never supervised"
    ),
    "stage2_ab.channel_b.semantic_desc_gate": _removed(
        "Remove it: descriptions of matched objects are never supervised"
    ),
    "stage2_ab.channel_b.mode": _removed(
        f"Remove it: channel B runs in step mode, unless {_ASYNC}.enabled is true"
    ),
    "stage2_ab.channel_b.async": Retired("has moved", f"Use the same keys of {_ASYNC}"),
    "stage2_ab.channel_b.enable_pipeline": _removed(
        "Remove it: rollouts and training overlap where the servers have devices of their own"
    ),
    "stage2_ab.channel_b.rollouts_per_step": _removed("Set training.effective_batch_size"),
    "stage2_ab.channel_b.rollout_decode_batch_size": _DECODE_BATCH,
    **{
        f"stage2_ab.channel_b.{key}": _removed(
            "Remove it: the closing brace and <|im_end|> are always supervised"
        )
        for key in ("stop_neutral", "stop_neutral_ce", "mask_im_end")
    },
    # of both pipelines
    **{
        f"{pipeline}.objective[].config.{alias}": Retired("has moved", f"Write {key}")
        for pipeline in _PIPELINES
        for alias, key in _ALIASES.items()
    },
    # rollout_matching
    "rollout_matching.rollout_buffer": _removed("Remove it: every step makes fresh rollouts"),
    "rollout_matching.post_rollout_pack_scope": _removed(
        "Remove it: packs are planned over the samples of one optimizer step"
    ),
    "rollout_matching.rollout_generate_batch_size": _DECODE_BATCH,
    "rollout_matching.rollout_infer_batch_size": _DECODE_BATCH,
    "rollout_matching.temperature": Retired(
        "has moved", "Use rollout_matching.decoding.temperature"
    ),
    "rollout_matching.top_p": Retired("has moved", "Use rollout_matching.decoding.top_p"),
    "rollout_matching.top_k": Retired("has moved", "Use rollout_matching.decoding.top_k"),
    "rollout_matching.vllm.server.base_url": Retired(
        "has moved", "Use rollout_matching.vllm.server.servers[].base_url"
    ),
    "rollout_matching.vllm.server.group_port": Retired(
        "has moved", "Use rollout_matching.vllm.server.servers[].group_port"
    ),
}

# Sections without keys, and what to use in place of those of other programs (RES-30).
EMPTY_SECTIONS = {
    "quantization": "to train adapters over frozen weights, set tuner.train_type to lora",
    "rlhf": "the objective is the pipeline of the trainer's variant",
    "debug": "your own tools may have keys in custom.extra",
    "experiment": "training.run_name names the run, and custom.extra may have notes",
    "deepspeed": "to shard the model over processes, set training.data_parallel to fsdp2",
}

RETIRED_VALUES: dict[str, dict[str, Retired]] = {
    "custom.trainer_variant": {
        "stage2_ab_training": _removed("Use stage2_two_channel"),
        "rollout_matching_sft": _removed("Use stage2_rollout_aligned"),
    },
}


def retired_errors(value: Any, where: str = "", pattern: str = "") -> Iterator[ContractError]:
    """Every retired key or value in a mapping, in the order they are written.

    where: the path of `value`, with list indices; pattern: the same with `[]` for each.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _entry_errors(item, joined(where, key), joined(pattern, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from retired_errors(item, f"{where}[{index}]", f"{pattern}[]")


def _entry_errors(value: Any, where: str, pattern: str) -> Iterator[ContractError]:
    if pattern == OLD_ROLLOUT_SECTION:
        yield from _relocated(value, where, "rollout_matching")
    elif retired := RETIRED_KEYS.get(pattern):
        yield _error(where, "this key", retired)
    elif instead := EMPTY_SECTIONS.get(pattern):
        do = f"Remove it: there are no keys here; {instead}"
        for key in value if isinstance(value, dict) else ():
            yield ContractError(joined(where, key), "unknown key", do)
        if value is not None and not isinstance(value, dict):
            yield ContractError(where, f"{shown(value)} is not a mapping", do)
    elif isinstance(value, str) and value in (known := RETIRED_VALUES.get(pattern, {})):
        retired = known[value]
        yield _error(where, shown(value), retired)
    else:
        yield from retired_errors(value, where, pattern)


def _relocated(value: Any, where: str, new: str) -> Iterator[ContractError]:
    """Each key of the section's old place, with its path in the new one (RES-01)."""
    if retired := RETIRED_KEYS.get(new):
        yield _error(where, "this key", retired)
    elif isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _relocated(item, joined(where, key), joined(new, key))
    elif unknown := unknown_key(RolloutMatchingConfig, new, "rollout_matching"):
        found = f"this section has moved, and there is no {unknown.where}"
        yield ContractError(where, found, unknown.do)
    else:
        yield _error(where, "this key", Retired("has moved", f"Use {new}"))


def _error(where: str, what: str, retired: Retired) -> ContractError:
    return ContractError(where, f"{what} {retired.verdict}", retired.do)
