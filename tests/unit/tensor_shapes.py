"""The shapes of all tensors that operations make, and the code path of CUDA on the CPU."""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from learner.objectives import numerics


class Shapes(TorchDispatchMode):
    """Collects the shapes of all results but transposed matrices, which are views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        leaves = [] if func is torch.ops.aten.t.default else tree_leaves(found)
        self.made |= {tuple(each.shape) for each in leaves if isinstance(each, torch.Tensor)}
        return found

    def with_sides(self, *sides: int) -> list[tuple[int, ...]]:
        """The shapes that have each of these sides; a side given twice has to be there twice."""
        return sorted(
            shape for shape in self.made if all(shape.count(n) >= sides.count(n) for n in sides)
        )


def as_on_cuda() -> AbstractContextManager[object]:
    """Let tensors of the CPU take the code path of CUDA tensors in the block."""
    return patch.object(numerics, "is_on_cuda", lambda _: True)
