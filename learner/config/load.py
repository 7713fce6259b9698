"""From a YAML file to a checked `Config`: extends, retired keys, types. Imports no torch.

    read_written   file -> mapping, `extends` merged in, and the line of each key
    load_mapping   file -> that mapping alone
    parse_config   mapping -> Config; reports all errors together
    load_config    file -> Config; each error has its file and line
    dump_resolved  Config -> YAML text that loads to an equal Config

Relative paths inside a file start at the current working directory, except `extends`,
which starts at the file's own folder. `~` is a home folder; a path with `${VAR}` is refused.
"""

import os
import re
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from learner.config.moved_keys import IGNORED_KEY, retired_errors, with_instead
from learner.config.schema import Config
from learner.config.training import NULL_MEANS_DERIVED
from learner.config.yaml12 import dump_annotated, dump_mapping, read_document
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.extends import merge_chain, read_chain
from shared_contracts.strict_model import contract_errors, joined
from shared_contracts.yaml12 import Steps

# `file:line` of every key and list item: the place in effect, then those it overrides.
Origins = dict[Steps, tuple[str, ...]]


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
    """Return whether the paths of two errors are equal, or one is a section of the other."""
    short, long = sorted((error.where, known.where), key=len)
    return long == short or long.startswith((f"{short}.", f"{short}["))


def dump_resolved(config: Config) -> str:
    """Return YAML text of every key with its effective value."""
    return dump_mapping(config.model_dump())


_LAST_STEP = re.compile(r"(\.?[^.\[\]]+|\[\d+\])$")


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
