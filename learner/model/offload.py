"""Room on the device: the model and its optimizer state wait in host memory (ROLL-03).

Parameters stay the same objects, so whoever holds them (the optimizer, a push) goes on with
them; their data comes back to the device and in the type it had.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

ToHost = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Offload:
    """What is moved away.

    model, optimizer: None stays where it is.
    to_host: a copy of a tensor in host memory.
    """

    model: nn.Module | None
    optimizer: Optimizer | None
    to_host: ToHost = Tensor.cpu

    @contextmanager
    def room(self) -> Iterator[None]:
        """Host memory for the length of a block, then the devices of before."""
        devices: list[tuple[Tensor, torch.device]] = []
        try:
            for tensor in self._tensors():
                devices.append((tensor, tensor.device))
                tensor.data = self.to_host(tensor.data)
            _release()
            yield
        finally:
            for tensor, device in devices:
                tensor.data = tensor.data.to(device)

    def _tensors(self) -> Iterator[Tensor]:
        """Each tensor once; gradients before their parameters."""
        if self.model is not None:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    yield parameter.grad
                yield parameter
            yield from self.model.buffers()
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))


def _release() -> None:
    """Give freed blocks back to the device, for others to take."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
