"""One process, without an accelerator."""

from contextlib import AbstractContextManager, nullcontext

from accelerate import Accelerator
from torch import Tensor, nn


class PlainAccelerator(Accelerator):
    def __init__(self) -> None:
        """Leave the state of processes alone, which all accelerators share."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()
