"""Canonical profiles say for themselves what they vary (CFG-04).

`configs/VARIANT/{prod,smoke}/*.yaml` extend exactly `../base.yaml`, which extends nothing, and
state the fields below themselves, whatever the base says. Null states nothing where it means
that the value is derived from another key.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from learner.config.training import NULL_MEANS_DERIVED
from shared_contracts.errors import ContractError

LEAF_FOLDERS = ("prod", "smoke")
BASE = "../base.yaml"

EXPLICIT_LEAF_FIELDS = (
    "model.model",
    "training.run_name",
    "training.output_dir",
    "training.logging_dir",
    "training.learning_rate",
    "training.vit_lr",
    "training.aligner_lr",
    "training.effective_batch_size",
    "training.eval_strategy",
    "training.eval_steps",
    "training.save_strategy",
    "training.save_steps",
    "stage2_ab.schedule.b_ratio",
    "stage2_ab.n_softctx_iter",
)


_NULL_STATES_NOTHING = tuple(f"training.{key}" for key in NULL_MEANS_DERIVED)

# By variant; only stage2_two_channel has a section stage2_ab.
LEAF_FIELDS = {
    "stage2_two_channel": EXPLICIT_LEAF_FIELDS,
    "stage2_rollout_aligned": tuple(
        field for field in EXPLICIT_LEAF_FIELDS if not field.startswith("stage2_ab.")
    ),
}


def is_canonical_leaf(path: Path) -> bool:
    return _variant(path) is not None


def _variant(path: Path) -> str | None:
    """The variant whose canonical leaf a file is: it lies beside the variant's base, one below.

    A run folder may have the name of a leaf's folder, and has no base.
    """
    folder = Path(os.path.abspath(path)).parent  # folds `..`, unlike Path.absolute
    variant = folder.parent.name
    named = folder.name in LEAF_FOLDERS and variant in LEAF_FIELDS
    return variant if named and (folder / BASE).is_file() else None


def leaf_errors(leaf: dict[str, Any], chain: list[Path]) -> Iterator[ContractError]:
    """Faults of a canonical leaf.

    leaf: the file's own mapping, `extends` included.
    chain: the files from the leaf to the last base.
    """
    shown = " -> ".join(str(path) for path in chain)
    if leaf.get("extends") != BASE or len(chain) != 2:
        yield ContractError(
            f"{chain[0]}: extends",
            f"the chain is {shown}",
            f"A canonical profile extends {BASE} directly, and that extends nothing",
        )
    variant = _variant(chain[0])
    assert variant is not None, "asked about leaves only"
    for field in LEAF_FIELDS[variant]:
        if not _states(leaf, field):
            yield ContractError(
                field,
                f"the canonical profile does not state it itself ({shown})",
                f"State it in {chain[0]}{_not_as_null(field)}",
            )


def _states(mapping: dict[str, Any], field: str) -> bool:
    here: Any = mapping
    for key in field.split("."):
        if not isinstance(here, dict) or key not in here:
            return False
        here = here[key]
    return here is not None or field not in _NULL_STATES_NOTHING


def _not_as_null(field: str) -> str:
    return ", and not as null" if field in _NULL_STATES_NOTHING else ""
