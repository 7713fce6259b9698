"""The output head, and the gradient of its weight.

The head takes the rows of a pack a chunk at a time (`learner.objectives.logit_stats`). Autograd
would make a gradient of the whole weight for each chunk. While it adds two of them, three tensors
of (V, H) exist: 4.4 GiB in float32 for a model of 4B. `chunked` makes one tensor, to which the
backward of each chunk adds its product.

    weight -> _OneGradient -> _Product, for each chunk -> logits
    weight <- _OneGradient <- _Total <- _Product, for each chunk <- gradient of the logits

Autograd gets the sum after the last chunk, so DDP, FSDP2 and a tied embedding get a usual
gradient. Liger Kernel (arXiv 2410.10989) and Cut Cross-Entropy (arXiv 2411.09009) accumulate the
gradient of a head over chunks, too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers import PreTrainedModel

from shared_contracts.errors import ContractError

T = TypeVar("T")

# Elements of the weight's gradient that are added at once: 64 MiB in float32.
_BLOCK_ELEMENTS = 2**24


def output_head(model: nn.Module) -> nn.Module:
    """Return the output head of a model or its wrapper, with the head's adapter if it has one.

    Raises ContractError for a model without a head.
    """
    module: nn.Module
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "lm_head":
            return module
    raise refused("it has no lm_head")


def whole_model(model: nn.Module) -> PreTrainedModel:
    """Return the model of transformers without its wrappers."""
    return next(part for part in model.modules() if isinstance(part, PreTrainedModel))


def check_head(model: PreTrainedModel) -> None:
    """Raise ContractError unless the head, without adapters, is a product of (V, H)."""
    head, text = output_head(model), model.config.get_text_config()
    if not _is_product(head):
        raise refused(f"its lm_head is {head}, and no linear layer without a bias")
    if head.weight.shape != (text.vocab_size, text.hidden_size):
        raise refused(
            f"its lm_head has a weight of {' x '.join(map(str, head.weight.shape))}, and its "
            f"config has vocab_size {text.vocab_size} and hidden_size {text.hidden_size}"
        )


def chunked(head: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the head's function for the chunks of one forward: (r, H) -> logits (r, V).

    head: a product, or a frozen one that peft has wrapped. `check_head` refuses others.
    """
    if not _is_product(head):
        return partial(type(head).forward, head)
    one_gradient = cast(Callable[..., Tensor], _OneGradient.apply)
    product = cast(Callable[..., Tensor], _Product.apply)
    total = _Total()
    weight = one_gradient(head.weight, total)
    return lambda hidden: product(hidden, weight, total)


@contextmanager
def reading(head: nn.Module, read: Callable[[Tensor], T]) -> Iterator[None]:
    """Within the block the head returns `read` of its input, in place of logits."""
    head.forward = read
    try:
        yield
    finally:
        del head.forward


def _is_product(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether it is an `nn.Linear` without bias; FSDP2 makes a subclass of it."""
    return (
        isinstance(head, nn.Linear)
        and type(head).forward is nn.Linear.forward
        and head.bias is None
    )


def refused(found: str) -> ContractError:
    return ContractError("model.model", found, "Use a model of the Qwen-VL family")


class _Total:
    """The gradient of the weight in one backward, float32 or wider (FULL-03)."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._backward = -1

    def add(self, gradient: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Add `gradient.T @ hidden`; (r, V), (r, H) -> (V, H).

        It adds blocks of V, because a whole 16-bit product would take memory.
        """
        backward = torch._C._current_graph_task_id()
        if self._sum is None or backward != self._backward:  # the sum is an earlier one's
            dtype = torch.promote_types(weight.dtype, torch.float32)
            self._sum, self._backward = torch.zeros_like(weight, dtype=dtype), backward
        step = max(1, _BLOCK_ELEMENTS // weight.shape[1])
        for part, columns in zip(self._sum.split(step), gradient.split(step, dim=1), strict=True):
            part += columns.T @ hidden

    def take(self) -> Tensor | None:
        taken, self._sum = self._sum, None
        return taken


class _OneGradient(torch.autograd.Function):
    """(V, H) weight -> the same; its backward, after that of all `_Product`s, returns `total`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: _Total) -> Tensor:
        ctx.total = total
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, None]:
        return ctx.total.take(), None


class _Product(torch.autograd.Function):
    """(r, H) rows, (V, H) weight -> (r, V), in autocast's type; its backward adds to `total`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, total: _Total) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.total = total
        return linear(hidden, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        hidden, weight = ctx.saved_tensors
        to_hidden = None
        if ctx.needs_input_grad[0]:
            to_hidden = (gradient @ weight.to(gradient.dtype)).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            ctx.total.add(gradient, hidden.to(gradient.dtype), weight)
        return to_hidden, None, None
