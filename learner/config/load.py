"""From a YAML file to a checked `Config` and back; the JSON Schema. Imports no torch.

Relative paths inside a file start at the current working directory, except `extends`,
which starts at the file's own folder. `~` is a home folder; a path with `${VAR}` is refused.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from learner.config.schema import Config
from learner.config.training import NULL_MEANS_DERIVED
from learner.config.yaml12 import dump_annotated, dump_mapping, read_document
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.strict_model import contract_errors, joined
from shared_contracts.yaml12 import Steps, merge_chain, read_chain

# `file:line` of every key and list item: the place in effect, then those it overrides.
Origins = dict[Steps, tuple[str, ...]]
_LAST_STEP = re.compile(r"(\.?[^.\[\]]+|\[\d+\])$")


class Written(NamedTuple):
    """A training YAML, merged into the files it extends; the values are unchecked.

    faults: those of a canonical profile (CFG-04).
    """

    mapping: dict[str, Any]
    origins: Origins
    faults: list[ContractError]


def load_config(path: str | Path) -> Config:
    """Return the checked config of a YAML file; raises ContractErrors with every fault."""
    return check_written(read_written(path))


def check_written(written: Written) -> Config:
    """Return the checked config; raises ContractErrors with every fault and its line."""
    try:
        return parse_config(written.mapping, written.faults)
    except ContractErrors as error:
        raise ContractErrors([located(e, written.origins) for e in error.errors]) from None


def load_mapping(path: str | Path) -> dict[str, Any]:
    """Return the mapping of a YAML file, merged into the files it extends, unchecked."""
    written = read_written(path)
    if written.faults:
        raise ContractErrors(written.faults)
    return written.mapping


def read_written(path: str | Path) -> Written:
    """Read a YAML file and the files it extends; raises ContractError for invalid YAML."""
    lines: list[dict[Steps, int]] = []

    def read(file: Path) -> dict[str, Any]:
        document = read_document(file)
        lines.append(document.lines)
        return document.mapping

    chain, mappings = read_chain(Path(path), read)
    faults = list(leaf_errors(mappings[0], chain))
    merged = merge_chain(mappings)
    # A path has the value of the first file, from the leaf on, that has the path. If a file
    # replaces a section around it, `merged` does not have the path.
    files = list(zip(map(_tidy, chain), lines, strict=True))
    origins = {
        steps: tuple(f"{file}:{known[steps]}" for file, known in files if steps in known)
        for steps in _paths(merged)
    }
    return Written(merged, origins, faults)


def parse_config(mapping: dict[str, Any], known: Sequence[ContractError] = ()) -> Config:
    """Check a mapping; ContractErrors has every unknown, retired, missing and wrong key.

    known: earlier faults, which are reported with them.
    """
    errors = [*known, *retired_errors(mapping)]
    section, key = IGNORED_KEY  # in silence (RES-13)
    if isinstance(mapping.get(section), dict):
        mapping = {**mapping, section: {k: v for k, v in mapping[section].items() if k != key}}
    try:
        config = Config.model_validate(mapping)
    except ValidationError as error:
        found = contract_errors(error, Config)
        errors += [with_instead(e) for e in found if not any(_related(e, k) for k in errors)]
    if errors:
        raise ContractErrors(errors)
    return config


def _related(error: ContractError, known: ContractError) -> bool:
    short, long = sorted((error.where, known.where), key=len)
    return long == short or long.startswith((f"{short}.", f"{short}["))


def located(error: ContractError, origins: Origins) -> ContractError:
    """Return the error with the line of its key, or of the section that lacks the key."""
    places = {dotted(steps): places[0] for steps, places in origins.items()}
    path = error.where
    while path and path not in places:
        path = _LAST_STEP.sub("", path)
    if not path:
        return error
    place = places[path] if path == error.where else f"{path}: {places[path]}"
    return ContractError(error.where, f"{error.found} ({place})", error.do)


def dotted(steps: Steps) -> str:
    """Join steps: `("a", 0, "b")` -> `a[0].b`."""
    names = (f"[{step}]" if isinstance(step, int) else step for step in steps)
    return reduce(joined, names, "")


def _paths(value: Any, at: Steps = ()) -> Iterator[Steps]:
    below: Any = enumerate(value) if isinstance(value, list) else ()
    for step, item in value.items() if isinstance(value, dict) else below:
        yield (*at, step)
        yield from _paths(item, (*at, step))


def _tidy(path: Path) -> Path:
    """Shorten `prod/../base.yaml` to `base.yaml`, unless a link makes that another file."""
    short = Path(os.path.normpath(path))
    return short if short.exists() and short.samefile(path) else path


def show_config(path: Path, all_origins: bool = False) -> str:
    """Return YAML text that loads to an equal config; raises ContractErrors as `load_config`.

    The comment beside a value is its `file:line`, `derived` (from another key) or `default`.
    all_origins: the comment also has the lines that this one overrides.
    """
    written = read_written(path)
    config = check_written(written)
    training = written.mapping["training"]
    derived = {("training", key) for key in NULL_MEANS_DERIVED if training.get(key) is None}

    def note(steps: Steps) -> str:
        if steps in derived:
            return "derived"
        places = written.origins.get(steps, ("default",))
        return " over ".join(places if all_origins else places[:1])

    return dump_annotated(config.model_dump(), note)


def dump_resolved(config: Config) -> str:
    return dump_mapping(config.model_dump())


# --- Canonical profiles (CFG-04): `configs/VARIANT/{prod,smoke}/*.yaml` extend exactly
# `../base.yaml`, which extends nothing, and have the fields below, even if the base has them.

LEAF_FOLDERS = ("prod", "smoke")
BASE = "../base.yaml"
_ALIGNED_FIELDS = (
    "model.model",
    *("training.run_name", "training.output_dir", "training.logging_dir"),
    *("training.learning_rate", "training.vit_lr", "training.aligner_lr"),
    *("training.effective_batch_size", "training.eval_strategy", "training.eval_steps"),
    *("training.save_strategy", "training.save_steps"),
)
LEAF_FIELDS = {
    "stage2_two_channel": (
        *_ALIGNED_FIELDS,
        *("stage2_ab.schedule.b_ratio", "stage2_ab.n_softctx_iter"),
    ),
    "stage2_rollout_aligned": _ALIGNED_FIELDS,
    "stage2_group_relative": (
        *_ALIGNED_FIELDS,
        *("stage2_ab.schedule.b_ratio", "group_relative.group_size"),
    ),
}


def canonical_variant(path: Path) -> str | None:
    """Return the variant of a canonical profile; None for another file.

    The profile is one folder below the base of its variant. A run folder may be called `prod`,
    too, but has no base.
    """
    folder = Path(os.path.abspath(path)).parent  # resolves `..`, unlike Path.absolute
    variant = folder.parent.name
    named = folder.name in LEAF_FOLDERS and variant in LEAF_FIELDS
    return variant if named and (folder / BASE).is_file() else None


def leaf_errors(leaf: dict[str, Any], chain: list[Path]) -> Iterator[ContractError]:
    """Yield the faults of a canonical profile; none for other files.

    leaf: the file's own mapping, `extends` included.
    chain: the files from the leaf to the last base.
    """
    variant, shown = canonical_variant(chain[0]), " -> ".join(map(str, chain))
    if variant is not None and (leaf.get("extends") != BASE or len(chain) != 2):
        do = f"A canonical profile extends {BASE} directly, and that extends nothing"
        yield ContractError(f"{chain[0]}: extends", f"the chain is {shown}", do)
    for field in LEAF_FIELDS[variant] if variant else ():
        stated: Any = leaf
        *sections, key = field.split(".")
        for section in sections:
            stated = stated.get(section) if isinstance(stated, dict) else None
        derived = key in NULL_MEANS_DERIVED
        stated = stated if isinstance(stated, dict) else {}
        if key not in stated or (derived and stated[key] is None):
            found = f"the canonical profile does not have the key itself ({shown})"
            do = f"Set it in {chain[0]}{', and not to null' if derived else ''}"
            yield ContractError(field, found, do)


# --- Retired keys: each is an error that says what to use instead (CFG-03).

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


# --- JSON Schema (draft 2020-12) of a training YAML, for editors (CFG-10).

_EXTENDS = {
    "type": "string",
    "minLength": 1,
    "description": "file, relative to this one, whose keys this one adds to or replaces: mappings "
    "merge, all else is replaced whole",
}


class _Partial(GenerateJsonSchema):
    """Schemas without required keys; a union accepts what any member accepts."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        return False

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> dict[str, Any]:
        union = super().tagged_union_schema(schema)
        return {"anyOf": union["oneOf"]}


def schema_text() -> str:
    """Return the schema of the whole file.

    It requires no key: the file in `extends` may have it. It leaves out what only the loader
    checks, such as keys that must agree with each other.
    """
    schema = Config.model_json_schema(schema_generator=_Partial)
    schema["$defs"]["CustomConfig"]["properties"][IGNORED_KEY[1]] = {"description": "ignored"}
    training = schema["$defs"]["TrainingConfig"]["properties"]
    for key in NULL_MEANS_DERIVED:
        training[key] = {"anyOf": [training[key], {"type": "null"}]}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Training YAML",
        "properties": {"extends": _EXTENDS} | schema["properties"],
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
