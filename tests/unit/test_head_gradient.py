"""The chunks of a head make one gradient of its weight, equal to that of `nn.Linear` (FULL-02)."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

from benchmarks.full_size import peak_of
from learner.models import head
from learner.models.head import chunked
from learner.models.layers import train_rows_alone
from tests.unit.tensor_shapes import Shapes

pytestmark = pytest.mark.req("FULL-02")

ROWS = 24
CHUNK = 5
Call = Callable[[Tensor], Tensor]


class Task:
    """A head of (V, H), and a loss of rows by chunks whose logits backward computes again.

    tied: the rows are looked up in the weight of the head.
    """

    def __init__(self, vocabulary: int, width: int, dtype: torch.dtype, *, tied: bool) -> None:
        chance = torch.Generator().manual_seed(0)
        self.head = nn.Linear(width, vocabulary, bias=False, dtype=dtype)
        with torch.no_grad():
            self.head.weight.normal_(generator=chance)
        self.ids = torch.randint(0, vocabulary, (ROWS,), generator=chance)
        self.rows = torch.randn(ROWS, width, generator=chance, dtype=dtype, requires_grad=True)
        self.pulls = torch.randn(ROWS, vocabulary, generator=chance, dtype=dtype)
        self.tied = tied

    @property
    def weight(self) -> Tensor:
        return self.head.weight

    def loss(self, call: Call) -> Tensor:
        hidden = self.rows.tanh()
        if self.tied:
            hidden = hidden + embedding(self.ids, self.weight)

        def of_chunk(own: Tensor, pulls: Tensor) -> Tensor:
            return (call(own).square() * pulls).sum()

        parts = zip(hidden.split(CHUNK), self.pulls.split(CHUNK), strict=True)
        losses = [checkpoint(of_chunk, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum()


def double(*, tied: bool) -> Task:
    return Task(50, 16, torch.float64, tied=tied)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_gradient_is_that_of_the_plain_product(tied: bool) -> None:
    task = double(tied=tied)
    both: Any = (task.weight, task.rows)
    wanted = torch.autograd.grad(task.loss(task.head.forward), both)
    torch.testing.assert_close(torch.autograd.grad(task.loss(chunked(task.head)), both), wanted)


def test_two_forwards_in_one_backward_add_up() -> None:
    """As those of channel A do."""
    task = double(tied=True)
    (once,) = torch.autograd.grad(task.loss(task.head.forward), task.weight)
    (task.loss(chunked(task.head)) + 2 * task.loss(chunked(task.head))).backward()
    torch.testing.assert_close(task.weight.grad, 3 * once)


def test_under_autocast_products_in_16_bits_are_added_in_32() -> None:
    task = Task(50, 16, torch.float32, tied=False)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        ours, plain = task.loss(chunked(task.head)), task.loss(task.head.forward)
    (found,) = torch.autograd.grad(ours, task.weight)
    (wanted,) = torch.autograd.grad(plain, task.weight)
    assert found.dtype == torch.float32
    assert found.to(torch.bfloat16).to(torch.float32).ne(found).any()
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.req("FULL-03")
def test_products_of_a_weight_in_16_bits_are_rounded_once() -> None:
    """As FSDP2 gathers it. A sum of 64 chunks in bfloat16 would be off by more than a percent."""
    head = nn.Linear(16, 50, bias=False, dtype=torch.bfloat16)
    rows = torch.rand(64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    call = chunked(head)
    torch.stack([call(row[None]).sum() for row in rows]).sum().backward()
    assert head.weight.grad is not None
    wanted = rows.double().sum(0).expand(50, 16)
    torch.testing.assert_close(head.weight.grad.double(), wanted, rtol=2**-8, atol=0.0)


def test_rows_that_peft_trains_need_no_copy_of_the_weight() -> None:
    task = double(tied=False)
    embedding = nn.Embedding.from_pretrained(task.weight.detach().clone())
    parts = OrderedDict(adapted=nn.Linear(4, 4), embedding=embedding, lm_head=task.head)
    indices = {"lm_head": [3, 40, 41], "embedding": [2, 5]}
    lora = LoraConfig(target_modules=["adapted"], trainable_token_indices=indices)
    adapted: Any = get_peft_model(nn.Sequential(parts), lora)  # type: ignore[arg-type]
    embedding, head = adapted.base_model.model[1:]
    rows = [part.token_adapter.trainable_tokens_delta["default"] for part in (embedding, head)]
    with torch.no_grad():
        for each in rows:
            each += torch.randn(each.shape, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[5, 3, 2, 2, 0]])
    both = (*rows, task.rows)

    def found() -> tuple[Tensor, ...]:
        output = embedding(ids)
        loss = task.loss(chunked(head)) + output.square().sum()
        return (output, *torch.autograd.grad(loss, both))

    wanted = found()
    train_rows_alone(adapted)
    with Shapes() as shapes:
        torch.testing.assert_close(found(), wanted)
    assert all(tuple(each.shape) in shapes.made for each in rows)
    assert not shapes.with_sides(*task.weight.shape)
    ids_of_rows = head.token_adapter.row_ids
    found()
    assert head.token_adapter.row_ids is ids_of_rows, "no copy to the device in each chunk"
    with adapted.disable_adapter():
        torch.testing.assert_close(embedding(ids), task.weight[ids])


@pytest.mark.parametrize(
    ("before", "dtype", "most"),
    [
        ("no gradient", torch.float32, 1.5),
        ("a gradient", torch.float32, 1.5),
        ("a gradient", torch.bfloat16, 2.0),
        ("frozen", torch.float32, 0.5),
    ],
)
def test_one_tensor_is_as_large_as_the_weight(
    before: str, dtype: torch.dtype, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in 16 bits a copy of the weight, while a chunk is computed; a frozen weight has none.

    before: what the weight has before the backward.
    """
    monkeypatch.setattr(head, "_BLOCK_ELEMENTS", 2**18)
    task = Task(10_000, 512, torch.float32, tied=False)
    task.weight.grad = torch.zeros_like(task.weight) if before == "a gradient" else None
    task.weight.requires_grad_(before != "frozen")

    def step() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16, cache_enabled=False):
            loss = task.loss(chunked(task.head))
        loss.backward()

    assert peak_of(step) < most * task.weight.nbytes
