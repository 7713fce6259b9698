"""Where the parameters of a manifest land in a worker's model: a dry run of its own loaders.

    trace(model, parameters, dtype, ties) -> Plan

vLLM's loaders fuse, shard and pad. The dry run gives them parameters without data (on the
meta device) and writes down every copy they would make, so that the plan holds for whatever
they do: which part of which parameter lands where, what of the model nobody fills, and what
of the manifest nobody reads. Parts are boxes of matrices (`shared_contracts.digests`). Later
pushes repeat the copies of the plan (`replay`), and verification reads by it (`read_back`).
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollout_server.engines.verification import Box, Fault, covered
from shared_contracts.digests import LAYER_INDEX, matrix_shape
from shared_contracts.weights import DtypeName, ParameterMeta

# Refused parameters after which the dry run stops.
MOST_FAILURES = 16

_COPY = torch.ops.aten.copy_.default
_SCALAR = torch.ops.aten.scalar_tensor.default  # of `tensor[...] = 0`, which is copied
_FILL, _ZERO = torch.ops.aten.fill_, torch.ops.aten.zero_
_CONSTANTS = (_FILL.Scalar, _FILL.Tensor, _ZERO.default)


class LoadableModel(Protocol):
    """What every model of vLLM is."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> object: ...


@dataclass(frozen=True)
class Target:
    """A parameter of the engine's model, as a matrix, in the form loaders fill.

    name: of the module that has it, dotted; tensor: what it is called there. The matrix is that
    of `matrix_shape`; one of which loaders fill each expert with a matrix has their columns.
    """

    name: str
    tensor: str
    rows: int
    columns: int

    @property
    def full_name(self) -> str:
        return f"{self.name}.{self.tensor}"


@dataclass(frozen=True)
class Placement:
    """A box of a parameter of the manifest, and the box of the model it lands in."""

    source: Box
    target: Target
    box: Box


@dataclass(frozen=True)
class Constant:
    """What loaders fill a box of a target with, before anything is copied into the box."""

    box: Box
    value: float


@dataclass
class Plan:
    """placements: by the manifest's names; a parameter whose target is tied has one for each
    module that reads it. constants: padding. faults: why the manifest cannot be loaded; empty
    when it can. besides: what the loaders write and the plan does not have, so that the plan
    can be read by but not replayed.
    """

    placements: dict[str, list[Placement]] = field(default_factory=lambda: defaultdict(list))
    constants: dict[Target, list[Constant]] = field(default_factory=lambda: defaultdict(list))
    faults: list[Fault] = field(default_factory=list)
    besides: list[str] = field(default_factory=list)


# Parameters that are one tensor: full name -> full names of the others.
Ties = Mapping[str, Sequence[str]]


def shared_parameters(model: nn.Module) -> Ties:
    """Which parameters of a model at rest (not being reloaded) are one tensor."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():  # each once, whatever has it
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            names[id(parameter)].append(f"{name}.{leaf}")
    return {
        name: [other for other in group if other != name]
        for group in names.values()
        if len(group) > 1
        for name in group
    }


def trace(
    model: nn.Module, parameters: Sequence[ParameterMeta], dtype: DtypeName, ties: Ties
) -> Plan:
    """Plan the load of `parameters` into a model prepared by vLLM's layerwise reload.

    Loads nothing and leaves the model as it was. dtype: in which the model holds its weights.
    """
    with _plain_loaders(model):
        run = _DryRun(_targets(model), _buffers(model))
        run.load(cast(LoadableModel, model), parameters)
    run.faults += _replaced(run, _targets(model))
    plan = Plan(constants=run.constants, besides=run.besides)
    plan.faults += run.faults
    if len(run.faults) < MOST_FAILURES:
        plan.faults += _unread(run, parameters) + _wrong_types(run, parameters, dtype)
        plan.faults += _filled_twice(run, ties) + _unfilled(run, ties)
    by_name = {target.full_name: target for target in run.targets}
    for source, placement in run.placements:
        readers = [placement.target.full_name, *ties.get(placement.target.full_name, ())]
        plan.placements[source] += [
            Placement(placement.source, by_name[reader], placement.box) for reader in readers
        ]
    return plan


def _targets(model: nn.Module) -> dict[StorageWeakRef, tuple[Target, Tensor]]:
    targets = {}
    for name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            rows, columns = matrix_shape(parameter.shape)
            targets[_storage(parameter)] = (Target(name, leaf, rows, columns), parameter)
    return targets


def _buffers(model: nn.Module) -> dict[StorageWeakRef, str]:
    return {_storage(buffer): name for name, buffer in model.named_buffers()}


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


@contextmanager
def _plain_loaders(model: nn.Module) -> Iterator[None]:
    """Take the layerwise reload's wrappers off the loaders while the block runs."""
    wrapped: list[tuple[Any, Callable[..., Any]]] = []
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            owner: Any = tensor
            if hasattr(owner, "weight_loader"):
                wrapped.append((owner, owner.weight_loader))
                owner.weight_loader = inspect.unwrap(owner.weight_loader, stop=_is_original)
    try:
        yield
    finally:
        for owner, loader in wrapped:
            owner.weight_loader = loader


def _is_original(loader: Callable[..., Any]) -> bool:
    return loader.__name__ != "online_process_loader"


class _DryRun(TorchDispatchMode):
    """Writes down what is written to the targets, and lets nothing of it happen.

    Every operation comes by here with the tensors it changes, so no change goes unseen: one that
    is neither a copy of a box nor a constant is a fault.
    """

    def __init__(
        self,
        targets: Mapping[StorageWeakRef, tuple[Target, Tensor]],
        buffers: Mapping[StorageWeakRef, str],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_storage = dict(targets)
        self._buffers = buffers
        self._sources: dict[StorageWeakRef, tuple[ParameterMeta, Tensor]] = {}
        self._scalars: dict[StorageWeakRef, tuple[float, Tensor]] = {}
        self.constants: dict[Target, list[Constant]] = defaultdict(list)
        self.placements: list[tuple[str, Placement]] = []
        self.filled: dict[Target, list[Box]] = defaultdict(list)
        self.faults: list[Fault] = []
        self.besides: list[str] = []
        self._last = ""

    @property
    def targets(self) -> dict[Target, Tensor]:
        return dict(self.by_storage.values())

    def load(self, model: LoadableModel, parameters: Sequence[ParameterMeta]) -> None:
        """Let the model load `parameters`; one that it refuses is a fault, and the rest goes on."""
        stream = self._stream(parameters)
        while len(self.faults) < MOST_FAILURES:
            try:
                with self:
                    model.load_weights(stream)
                return
            except Exception as error:  # noqa: BLE001  whatever the model's loader raises
                self.faults.append(_refused(self._last, error))

    def _stream(self, parameters: Sequence[ParameterMeta]) -> Iterator[tuple[str, Tensor]]:
        seen: set[str] = set()
        for parameter in parameters:
            if parameter.name in seen:
                self.faults.append(Fault(parameter.name, "duplicate", "it is listed twice"))
                continue
            seen.add(parameter.name)
            self._last = parameter.name
            dtype = getattr(torch, parameter.dtype)
            try:
                tensor = torch.empty(parameter.shape, dtype=dtype, device="meta")
            except RuntimeError as error:
                self.faults.append(Fault(parameter.name, "shape", f"no tensor has it ({error})"))
                continue
            # Kept with the storage: another tensor must not get the same one.
            self._sources[_storage(tensor)] = (parameter, tensor)
            yield parameter.name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _COPY or func in _CONSTANTS:
            into = args[0]
            if _storage(into) in self.by_storage:
                if into.numel() > 0:
                    self._note(into, func, *args[1:2])
                return into
        for tensor in _written(func, args, kwargs or {}):
            self._look_at(tensor, func)
        result = func(*args, **(kwargs or {}))
        if func is _SCALAR:
            self._scalars[_storage(result)] = (args[0], result)
        return result

    def _look_at(self, written: Tensor, func: Any) -> None:
        """Note an operation that changes `written` and is no copy into a target."""
        storage = _storage(written)
        if storage in self.by_storage:
            self._cannot_follow(f"{self.by_storage[storage][0].full_name} ({func})")
        elif storage in self._sources:
            self._cannot_follow(f"the model ({func} changes it first)")
        elif storage in self._buffers:
            self.besides.append(f"{self._buffers[storage]} ({func})")

    def _note(self, part: Tensor, func: Any, value: Any = 0) -> None:
        """value: what is copied, or the constant."""
        target, whole = self._target(part, value)
        plain = whole.is_contiguous() and part.dtype == whole.dtype
        into = box_of(part, target.columns) if plain else None
        constant, origin = self._constant(func, value), self._origin(value)
        if into is not None and constant is not None:
            if any(into.overlaps(box) for box in self.filled[target]):
                self._cannot_follow(f"{target.full_name} (it is overwritten)")
            self.constants[target].append(Constant(into, constant))
        elif into is not None and origin is not None and origin[1].shape == into.shape:
            self.filled[target].append(into)
            self.placements.append((origin[0], Placement(origin[1], target, into)))
        else:
            self._cannot_follow(target.full_name)

    def _constant(self, func: Any, value: Any) -> float | None:
        """What `func` fills its target with; None where that is not one number."""
        if isinstance(value, Tensor) and _storage(value) in self._scalars:
            return float(self._scalars[_storage(value)][0])
        if func is _COPY or (isinstance(value, Tensor) and value.is_meta):
            return None
        return float(value)

    def _target(self, part: Tensor, value: Any) -> tuple[Target, Tensor]:
        """The target of which `part` is one, with the columns of what fills it first."""
        target, whole = self.by_storage[_storage(part)]
        source = self._source(value)
        columns = whole.shape[-1] if whole.ndim > 2 else target.columns
        experts = source is not None and source[1].ndim < whole.ndim
        if experts and columns != target.columns and not self.filled[target]:
            target = Target(target.name, target.tensor, whole.numel() // columns, columns)
            self.by_storage[_storage(part)] = (target, whole)
        return target, whole

    def _source(self, value: Any) -> tuple[ParameterMeta, Tensor] | None:
        """The parameter of the manifest whose memory `value` has."""
        return self._sources.get(_storage(value)) if isinstance(value, Tensor) else None

    def _origin(self, value: Any) -> tuple[str, Box] | None:
        """Of which parameter `value` is which box."""
        source = self._source(value)
        if source is None or value.dtype != source[1].dtype:
            return None
        box = box_of(value, matrix_shape(source[0].shape)[1])
        return None if box is None else (source[0].name, box)

    def _cannot_follow(self, where: str) -> None:
        detail = f"how it is loaded into {where} cannot be followed"
        self.faults.append(Fault(self._last, "untraceable", detail))


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors among the arguments that an operation changes."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        yield from (each for each in tree_leaves(value) if isinstance(each, Tensor))


def box_of(view: Tensor, columns: int) -> Box | None:
    """The box that `view` is of a contiguous matrix of so many columns; None if it is none."""
    if view.numel() == 0:
        return None
    row, column = divmod(int(view.storage_offset()), columns)
    match _runs(view):
        case []:
            return Box(row, column, 1, 1)
        case [(count, 1)] if column == 0 and count % columns == 0:
            return Box(row, 0, count // columns, columns)
        case [(count, 1)] if column + count <= columns:
            return Box(row, column, 1, count)
        case [(rows, stride)] if stride == columns:
            return Box(row, column, rows, 1)
        case [(rows, stride), (width, 1)] if stride == columns and column + width <= columns:
            return Box(row, column, rows, width)
        case _:
            return None


def _runs(view: Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the dimensions, outermost first, with those merged that are one run."""
    runs: list[tuple[int, int]] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return runs


# --- faults


def _refused(name: str, error: Exception) -> Fault:
    """vLLM's models look a name up (ValueError, KeyError) before they look at a shape."""
    detail = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, ValueError | KeyError):
        return Fault(name, "unexpected", f"the model has no place for it ({detail})")
    return Fault(name, "shape", f"it does not fit ({detail})")


def _replaced(run: _DryRun, after: Mapping[StorageWeakRef, object]) -> list[Fault]:
    """Targets that have other memory now, which no operation shows."""
    detail = "its tensor is replaced while it is loaded"
    return [
        Fault(target.full_name, "untraceable", detail)
        for storage, (target, _) in run.by_storage.items()
        if storage not in after
    ]


def _unread(run: _DryRun, parameters: Sequence[ParameterMeta]) -> list[Fault]:
    accounted = {name for name, _ in run.placements} | {fault.name for fault in run.faults}
    return [
        Fault(parameter.name, "unexpected", "the model does not read it")
        for parameter in parameters
        if parameter.name not in accounted
    ]


def _wrong_types(
    run: _DryRun, parameters: Sequence[ParameterMeta], dtype: DtypeName
) -> list[Fault]:
    """A parameter travels in the model's type, or in the type of the tensor it lands in."""
    fitting: dict[str, set[str]] = defaultdict(lambda: {dtype})
    for name, placement in run.placements:
        held = run.targets[placement.target].dtype
        fitting[name].add(str(held).removeprefix("torch."))
    return [
        Fault(p.name, "dtype", f"it is {p.dtype}, and the model holds {dtype}")
        for p in parameters
        if p.dtype not in fitting[p.name]
    ]


def _filled_twice(run: _DryRun, ties: Ties) -> list[Fault]:
    """Parameters that fill what another fills, in a tensor or in one that is tied to it."""
    filled: dict[str, list[tuple[str, Box]]] = defaultdict(list)
    faults: list[Fault] = []
    for name, placement in run.placements:
        shared = min([placement.target.full_name, *ties.get(placement.target.full_name, ())])
        for earlier, box in filled[shared]:
            if box.overlaps(placement.box):
                detail = f"what it fills, {earlier} fills, too"
                faults.append(Fault(name, "duplicate", detail))
                break
        else:
            filled[shared].append((name, placement.box))
    return faults


def _unfilled(run: _DryRun, ties: Ties) -> list[Fault]:
    """Targets of which the manifest does not fill everything."""
    filled = _filled(run)
    full = {t.full_name for t in run.targets if filled[t] >= t.rows * t.columns}
    told = {fault.name for fault in run.faults}
    usual = _usual_names(run)
    faults: list[Fault] = []
    for target in run.targets:
        if full.intersection([target.full_name, *ties.get(target.full_name, ())]):
            continue
        full.add(target.full_name)  # a tensor that several share is reported once
        counts = f"{filled[target]} of {target.rows * target.columns} elements"
        detail = f"{counts} of {target.full_name} are filled"
        names = _likely_names(run, target, usual) or [target.full_name]
        faults += [Fault(name, "missing", detail) for name in names if name not in told]
    return faults


def _filled(run: _DryRun) -> dict[Target, int]:
    """Elements of each target that are filled or padded."""
    return {
        target: covered({*run.filled[target], *(each.box for each in run.constants[target])})
        for target in run.targets
    }


# Names of targets -> what fills them, box by box; numbers of layers are left out of all names.
UsualNames = Mapping[str, Collection[tuple[Box, str]]]


def _usual_names(run: _DryRun) -> UsualNames:
    usual: dict[str, set[tuple[Box, str]]] = defaultdict(set)
    for name, placement in run.placements:
        kind = LAYER_INDEX.sub("*", placement.target.full_name)
        usual[kind].add((placement.box, LAYER_INDEX.sub("*", name)))
    return usual


def _likely_names(run: _DryRun, target: Target, usual: UsualNames) -> list[str]:
    """What would fill the empty boxes of `target`, as in the other layers."""
    kind, here = LAYER_INDEX.sub("*", target.full_name), LAYER_INDEX.findall(target.full_name)
    own = {placement.box for _, placement in run.placements if placement.target == target}
    names = {name for box, name in usual.get(kind, ()) if box not in own}
    return sorted(
        name.replace("*", "{}").format(*here) for name in names if name.count("*") == len(here)
    )
