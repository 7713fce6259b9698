"""What-if: the same run with other values of some keys.

servers=1,2,4      how many servers; replicas, tensor_parallel_size: of each
ranks=1,2          learner processes
any key of _KEYS   a key of the training YAML, checked as the YAML is
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from learner.config import merge, parse_config
from learner.simulate.machines import Setting
from shared_contracts.errors import ContractError

_ASYNC = "rollout_matching.async_rollout"
_KEYS = {
    "decode_batch_size": "rollout_matching.decode_batch_size",
    "max_new_tokens": "rollout_matching.max_new_tokens",
    "effective_batch_size": "training.effective_batch_size",
    "packing_buffer": "training.packing_buffer",
    "global_max_length": "global_max_length",
    "b_ratio": "stage2_ab.schedule.b_ratio",
    "n_softctx_iter": "stage2_ab.n_softctx_iter",
    "queue_limit": f"{_ASYNC}.queue_limit",
    "prefetch_target_packs": f"{_ASYNC}.prefetch_target_packs",
    "version_window": f"{_ASYNC}.version_window",
    "sync_every_steps": f"{_ASYNC}.sync_every_steps",
}
_MACHINES = ("servers", "ranks", "replicas", "tensor_parallel_size")

Values = Mapping[str, int | float]


@dataclass(frozen=True)
class Given:
    """What was asked for. mapping: the training YAML. at: the setting without variations."""

    mapping: dict[str, Any]
    at: Setting

    def with_values(self, values: Values) -> Setting:
        """Raises ContractError for what no run could have."""
        nested: dict[str, Any] = {}
        for name, value in values.items():
            if name in _KEYS:
                nested = merge(nested, _nested(_KEYS[name].split("."), value))
        config = parse_config(merge(self.mapping, nested)) if nested else self.at.config
        return self.at.with_machines(config, {k: int(values[k]) for k in _MACHINES if k in values})


def parse_variation(option: str) -> tuple[str, list[int | float]]:
    """`servers=1,2` -> `("servers", [1, 2])`; raises ContractError."""
    name, _, listed = option.partition("=")
    if name not in (*_MACHINES, *_KEYS):
        raise ContractError(
            "--vary", f"{name!r} is no key", f"Use one of: {', '.join((*_MACHINES, *_KEYS))}"
        )
    try:
        values: list[int | float] = [_number(name, part) for part in listed.split(",")]
    except ValueError:
        raise ContractError(
            f"--vary {name}", f"{listed!r}", f"Give numbers, e.g. {name}=1,2,4"
        ) from None
    if name in _MACHINES and min(values) < 1:
        raise ContractError(f"--vary {name}", f"{listed!r}", "Give numbers from 1 on")
    return name, values


def _number(name: str, text: str) -> int | float:
    return float(text) if name == "b_ratio" else int(text)


def sweep(variations: Sequence[tuple[str, Sequence[int | float]]]) -> list[Values]:
    """Every combination, the last key changing fastest."""
    names = [name for name, _ in variations]
    return [
        dict(zip(names, values, strict=True)) for values in product(*(v for _, v in variations))
    ]


def _nested(keys: Sequence[str], value: object) -> dict[str, Any]:
    nested: Any = value
    for key in reversed(keys):
        nested = {key: nested}
    assert isinstance(nested, dict)
    return nested
