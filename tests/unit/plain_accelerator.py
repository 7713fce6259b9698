"""The accelerator of a step in one process."""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn


class PlainAccelerator:
    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()
