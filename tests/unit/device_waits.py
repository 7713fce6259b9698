"""What a GPU would be waited for, counted without one.

Tensors of the device are fake, those of the host are real, as in `tests.unit.fake_step`.
"""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from learner.models.attention import Patches
from learner.models.packs import IMAGE, Pack
from learner.objectives.logit_stats import Supervision
from tests.unit.fake_step import HostValues
from tests.unit.tensor_shapes import as_on_cuda

_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._to_copy.default}


class Waits(HostValues):
    """Counts, by function, what asks for a value of the device: a number, or where a mask is true.

    mixed: operations between tensors of the device and of the host, which a GPU refuses.
    operations: all on tensors of the device.
    """

    def __init__(self, images: Tensor) -> None:
        super().__init__(images)
        self.asked: Counter[str] = Counter()
        self.mixed: set[str] = set()
        self.operations: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs or {})) if isinstance(each, Tensor)]
        on_device = [isinstance(each, FakeTensor) for each in tensors]
        if any(on_device):
            self.operations.add(func._schema.name)
            if func is _aten._local_scalar_dense.default or _searches(func, args):
                self.asked[_asking()] += 1
            here = [t for t, there in zip(tensors, on_device, strict=True) if not there]
            if any(each.ndim for each in here) and func not in _COPIES:
                self.mixed.add(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _searches(func: Any, args: Any) -> bool:
    """Whether how many elements a mask has decides the shape of what comes out."""
    if func in (_aten.nonzero.default, _aten.masked_select.default):
        return True
    if "index" not in str(func):
        return False
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else []
    return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in indices)


def _asking() -> str:
    """The function whose value is asked for, nearest to the operation and outside of torch."""
    for frame, _ in traceback.walk_stack(None):
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name == "_engine_run_backward":
            return "backward"
        if "/torch/" not in file and not file.endswith(("device_waits.py", "fake_step.py")):
            return name
    raise AssertionError("no function outside of torch")


def on_device(mode: FakeTensorMode, pack: Pack) -> Pack:
    """As `Pack.to` has it, with fakes for what is moved."""

    def moved(part: Supervision) -> Supervision:
        found = {f.name: getattr(part, f.name) for f in fields(part)}
        fakes = {k: mode.from_tensor(v) for k, v in found.items() if isinstance(v, Tensor)}
        return replace(part, **fakes)

    values: dict[str, Any] = {}
    there = pack.to(torch.device("meta"))
    for name, part in vars(there).items():
        own = getattr(pack, name)
        if isinstance(part, Tensor):
            values[name] = mode.from_tensor(own) if part.is_meta else own
        elif isinstance(part, Supervision):
            values[name] = moved(own)
        elif isinstance(part, Patches):
            values[name] = replace(
                own,
                rows={k: mode.from_tensor(row) for k, row in own.rows.items()},
                frames=replace(own.frames, bounds=mode.from_tensor(own.frames.bounds)),
                window_index=None if own.windows is None else mode.from_tensor(own.window_index),
                windows=own.windows
                and replace(own.windows, bounds=mode.from_tensor(own.windows.bounds)),
            )
    return replace(pack, **values)


@contextmanager
def counting_waits(pack: Pack) -> Iterator[tuple[FakeTensorMode, Waits]]:
    """Within the block floats are fake; see `tests.unit.fake_step.faked`."""
    mode, waits = FakeTensorMode(allow_non_fake_inputs=True), Waits(pack.mm_token_types == IMAGE)
    with mode, waits, as_on_cuda():
        yield mode, waits
