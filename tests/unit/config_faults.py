"""Training configs to break, and the errors of a broken one."""

import copy
from pathlib import Path
from typing import Any

import pytest

from learner.config import load_mapping, parse_config
from shared_contracts.errors import ContractError, ContractErrors

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(CONFIGS.rglob("*.yaml"))
WARMUP = load_mapping(CONFIGS / "demo/warmup.yaml")
ALIGNED = load_mapping(CONFIGS / "stage2_rollout_aligned/base.yaml")

# A config of each variant, by where it declares its objective.
BY_PIPELINE = {"stage2_ab.pipeline": WARMUP, "rollout_matching.pipeline": ALIGNED}


def config_name(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def changed(dotted: str, value: Any, base: dict[str, Any] = WARMUP) -> dict[str, Any]:
    """A mapping with one value set; a number in the path is a list index."""
    mapping = copy.deepcopy(base)
    here, last = _parent(mapping, dotted)
    if isinstance(here, list) and last == len(here):
        here.append(value)
    else:
        here[last] = value
    return mapping


def without(dotted: str, base: dict[str, Any] = WARMUP) -> dict[str, Any]:
    mapping = copy.deepcopy(base)
    here, last = _parent(mapping, dotted)
    del here[last]
    return mapping


def _parent(mapping: Any, dotted: str) -> tuple[Any, Any]:
    """Return the mapping or list with the value, and its key; make missing sections."""
    *parents, last = [int(key) if key.isdecimal() else key for key in dotted.split(".")]
    here = mapping
    for key in parents:
        here = here.setdefault(key, {}) if isinstance(here, dict) else here[key]
    return here, last


def errors_of(mapping: dict[str, Any]) -> dict[str, ContractError]:
    """Every fault by its path; each has three parts, and no fault is reported twice."""
    with pytest.raises(ContractErrors) as caught:
        parse_config(mapping)
    assert all(error.found and error.do for error in caught.value.errors)
    wheres = [error.where for error in caught.value.errors]
    assert len(set(wheres)) == len(wheres), "a fault is reported twice"
    return {error.where: error for error in caught.value.errors}


def only_error(mapping: dict[str, Any]) -> ContractError:
    (error,) = errors_of(mapping).values()
    return error
