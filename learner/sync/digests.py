"""Digests of the weights of a push, made while they are on their way out (SYNC-06)."""

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from shared_contracts.digests import countable_bits, matrix_shape, multipliers, sample, written
from shared_contracts.rollout_config import Verify
from shared_contracts.weights import DtypeName, ParameterDigest, ParameterMeta

# Elements digested at once: on a processor their 64-bit products stay in its cache.
_CPU_CHUNK, _GPU_CHUNK = 2**15, 2**24

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Columns of a parameter that are digested; None for all.
Columns = list[int] | None


def verified_columns(
    verify: Verify, parameters: Sequence[ParameterMeta], version: int
) -> dict[str, Columns]:
    """Which parameters a push of `version` has digests of, by name."""
    match verify:
        case "off":
            return {}
        case "sample":
            return dict(sample(parameters, version))
        case "full":
            return {parameter.name: None for parameter in parameters}


class Outgoing:
    """One pass of weights: as it goes by, the parameters in `columns` are digested.

    newest: name of the last one that was taken; None before the first.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]], columns: dict[str, Columns]) -> None:
        self._weights = weights
        self._columns = columns
        self._sums: dict[str, Tensor] = {}
        self.newest: str | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._weights:
            self.newest = name
            if name in self._columns:
                self._sums[name] = digest_sum(weight, self._columns[name])
            yield name, weight

    def digests(self) -> list[ParameterDigest]:
        """Of what went by so far, in that order."""
        return [
            ParameterDigest(name=name, columns=self._columns[name], digest=written(int(total)))
            for name, total in self._sums.items()
        ]


def digests_of(
    weights: Iterable[tuple[str, Tensor]], columns: dict[str, Columns]
) -> list[ParameterDigest]:
    """Of weights that go nowhere."""
    passed = Outgoing(weights, columns)
    for _ in passed:
        pass
    return passed.digests()


@torch.no_grad()
def digest_sum(weight: Tensor, columns: Columns) -> Tensor:
    """The digest of `shared_contracts.digests` as a 64-bit scalar on the weight's device."""
    height, width = matrix_shape(weight.shape)
    if columns is None:
        return _all(weight.reshape(-1))
    chosen = torch.tensor(columns, dtype=torch.int64, device=weight.device)
    rows = torch.arange(height, device=weight.device)[:, None]
    return _terms(weight.reshape(height, width)[:, chosen], rows * width + chosen).sum()


def _all(flat: Tensor) -> Tensor:
    chunk = _CPU_CHUNK if flat.device.type == "cpu" else _GPU_CHUNK
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), chunk):
        part = flat[start : start + chunk]
        total += _terms(part, torch.arange(start, start + part.numel(), device=flat.device)).sum()
    return total


def _terms(weight: Tensor, positions: Tensor) -> Tensor:
    bits = weight.contiguous().view(_SIGNED[weight.element_size()]).to(torch.int64)
    dtype = cast(DtypeName, str(weight.dtype).removeprefix("torch."))
    terms: Tensor = countable_bits(bits, dtype) * multipliers(positions)
    return terms
