"""Reading back what a model holds of the parameters of a plan (SYNC-06).

On the CPU a linear layer may give its weight away for a packed form, and a language-model head
may multiply with a packed copy of its weight; the processor decides (AVX-512: both, AVX2:
neither). Such a matrix is read through the layer: times unit vectors it gives its columns. Packed
experts are unpacked.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from rollout_server.engines.verification import RawPart
from rollout_server.engines.vllm.load_plan import Placement, Plan, Target
from rollout_server.engines.vllm.packed_experts import unpacked
from shared_contracts.digests import countable_bits, matrix_shape, multipliers
from shared_contracts.weights import DtypeName, ParameterMeta

# Columns that are read at once; elements whose digest is worked out at once: on the CPU what fits
# into its caches, on a GPU few and large kernels, which need 24 bytes an element.
COLUMNS_AT_ONCE = {"cpu": 256, "cuda": 2**20}
ELEMENTS_AT_ONCE = {"cpu": 2**17, "cuda": 2**23}

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Columns of a target, ascending -> those columns of its rows: (rows, columns).
Read = Callable[[Sequence[int]], Tensor]


@dataclass(frozen=True)
class Asked:
    """A parameter of the manifest and those of its columns that are asked for; None: all."""

    parameter: ParameterMeta
    columns: Sequence[int] | None


@dataclass
class _Part:
    """A box of a parameter and where it is; its subtotal grows as columns are read.

    wanted: columns of the target. index: which of `asked` it belongs to.
    subtotal: stays on the device, which so need not be waited for; modulo 2**64.
    """

    index: int
    parameter: ParameterMeta
    placement: Placement
    wanted: Collection[int]
    subtotal: Tensor | int = 0


@torch.inference_mode()
def subtotals(model: nn.Module, plan: Plan, asked: Sequence[Asked]) -> list[list[RawPart]]:
    """The parts of each parameter in `asked` and the sums over their elements.

    Every target is read once, some columns at a time, whatever it is fused of.
    """
    parts = [part for index, each in enumerate(asked) for part in _parts(index, each, plan)]
    by_target: dict[Target, list[_Part]] = defaultdict(list)
    for part in parts:
        by_target[part.placement.target].append(part)
    for target, readers in by_target.items():
        module = model.get_submodule(target.name)
        held = module.get_parameter(target.tensor)
        _read_target(_reader(module, held, target), held.device.type, readers)
    answers: list[list[RawPart]] = [[] for _ in asked]
    for part in parts:
        box = part.placement.source
        raw = (part.placement.target.name, box.row, box.column, box.rows, box.columns)
        answers[part.index].append((*raw, int(part.subtotal) % 2**64))
    return answers


def _parts(index: int, asked: Asked, plan: Plan) -> Iterator[_Part]:
    for placement in plan.placements[asked.parameter.name]:
        source, box = placement.source, placement.box
        inside = range(source.column, source.column + source.columns)
        columns = inside if asked.columns is None else [c for c in asked.columns if c in inside]
        shift = box.column - source.column
        wanted = [column + shift for column in columns]
        yield _Part(index, asked.parameter, placement, frozenset(wanted))


def _read_target(read: Read, device: str, parts: Sequence[_Part]) -> None:
    columns = sorted(set().union(*(part.wanted for part in parts)))
    for start in range(0, len(columns), COLUMNS_AT_ONCE[device]):
        chunk = columns[start : start + COLUMNS_AT_ONCE[device]]
        values = read(chunk)
        for part in parts:
            _add(part, chunk, values)


def _add(part: _Part, chunk: Sequence[int], values: Tensor) -> None:
    """Add what `values` (all rows of the target's columns `chunk`) has of `part`."""
    box, source = part.placement.box, part.placement.source
    chosen = [i for i, column in enumerate(chunk) if column in part.wanted]
    if not chosen:
        return
    rows = _columns_of(values[box.row : box.row + box.rows], chosen)
    shift = source.column - box.column
    columns = _numbers([chunk[i] + shift for i in chosen], values.device)
    width = matrix_shape(part.parameter.shape)[1]
    at_once = max(ELEMENTS_AT_ONCE[values.device.type] // len(chosen), 1)
    for start in range(0, box.rows, at_once):
        piece = rows[start : start + at_once]
        first = source.row + start
        numbers = torch.arange(first, first + len(piece), device=values.device)
        positions = numbers[:, None] * width + columns
        part.subtotal += _subtotal(piece, positions, part.parameter.dtype)


def _subtotal(values: Tensor, positions: Tensor, dtype: DtypeName) -> Tensor:
    held = values.to(getattr(torch, dtype)).contiguous()
    bits = countable_bits(held.view(_INTEGERS[held.itemsize]), dtype)
    total: Tensor = (bits * multipliers(positions)).sum()
    return total


def _reader(module: nn.Module, held: nn.Parameter, target: Target) -> Read:
    packed = held.numel() == 0
    if not held.is_cuda and (packed or _may_multiply_with_a_copy(module, target)):
        return _through(module, target)
    matrix = unpacked(module, held.data).reshape(target.rows, target.columns)
    return lambda columns: _columns_of(matrix, columns)


def _may_multiply_with_a_copy(module: nn.Module, target: Target) -> bool:
    return isinstance(module, ParallelLMHead) and target.tensor == "weight"


def _columns_of(matrix: Tensor, columns: Sequence[int]) -> Tensor:
    if _contiguous(columns):
        return matrix[:, columns[0] : columns[-1] + 1]
    return matrix[:, _numbers(columns, matrix.device)]


def _numbers(columns: Sequence[int], device: torch.device) -> Tensor:
    """Ascending `columns` as a tensor on `device`, made without waiting for the device."""
    if _contiguous(columns):
        return torch.arange(columns[0], columns[-1] + 1, device=device)
    numbers = torch.tensor(columns, pin_memory=device.type == "cuda")
    return numbers.to(device, non_blocking=True)


def _contiguous(columns: Sequence[int]) -> bool:
    return columns[-1] - columns[0] == len(columns) - 1


def _through(module: nn.Module, target: Target) -> Read:
    """Reads the weight of a linear layer by its own product with unit vectors."""
    kept = module.get_parameter(target.tensor)
    method: Any = module.quant_method

    def read(columns: Sequence[int]) -> Tensor:
        units = torch.zeros(len(columns), target.columns, dtype=kept.dtype)
        units[torch.arange(len(columns)), torch.tensor(columns)] = 1
        product: Tensor = method.apply(module, units, None)
        return product.t()

    return read
