"""The head on supervised rows alone, by chunks: values, gradients and shapes (FULL-02)."""

import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from benchmarks.full_size import peak_of
from learner.data.toy import ToyData
from learner.models import head
from learner.models.head import chunked
from learner.models.layers import train_rows_alone
from learner.models.self_context import SelfContext
from learner.models.toy import make_model
from learner.objectives import logit_stats
from learner.objectives.logit_stats import ForwardStats
from learner.types import Channel, Sample
from tests.unit.loaded_models import load_small
from tests.unit.packed_logits import as_given, packed_logits
from tests.unit.tensor_shapes import Shapes
from tests.unit.toy_learner import ToyLearner

pytestmark = pytest.mark.req("FULL-02")

VOCABULARY = 1342
CHUNK = 8
OF_HEAD = {"train_type": "lora", "lora_rank": 4, "lora_alpha": 8, "target_modules": ["lm_head"]}
TUNERS = {"full": {"train_type": "full"}, "adapter on the head": OF_HEAD}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_stats, "HEAD_ELEMENTS", CHUNK * VOCABULARY)


class Products(TorchDispatchMode):
    """Collects the rows of all products with the head, while it is open."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and found.shape[1] == VOCABULARY and len(found):
            self.rows.append(len(found))
        return found


LearnerOf = Callable[..., ToyLearner]


@pytest.fixture
def learner_of(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> LearnerOf:
    def learner_of(*, tie: bool = True, iterations: int = 1, **sections: Any) -> ToyLearner:
        checkpoint = toy_checkpoint
        if not tie:
            checkpoint = tmp_path / "untied"
            make_model(checkpoint, seed=0, tie=False)
        loaded = load_small(checkpoint, toy_data, tmp_path, **sections)
        return ToyLearner(loaded, SelfContext(iterations, "soft"))

    return learner_of


@pytest.mark.req("RES-17")
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("tuner", TUNERS.values(), ids=TUNERS)
def test_values_and_gradients_are_those_of_the_logits_of_the_whole_row(
    learner_of: LearnerOf, samples: list[Sample], tie: bool, tuner: dict[str, Any]
) -> None:
    learner = learner_of(tie=tie, tuner=tuner)
    pack = learner.pack(samples)
    selection = learner.pipeline.select(pack.supervision, "A")
    rows = len(selection.text_rows) + len(selection.slot_rows)
    assert len(selection.text_rows) % CHUNK  # a chunk has rows of both kinds
    assert rows > 3 * CHUNK
    whole = as_given(packed_logits(learner.model, pack))
    stats = learner.pipeline.reader(selection).anchor(whole._replace(vocabulary=1))
    plain = learner.pipeline(ForwardStats(stats, stats), selection, "A")
    found = learner.loss(pack)
    assert found.atoms == pytest.approx(plain.atoms, abs=1e-6)
    wanted = learner.gradients(plain)
    for name, gradient in learner.gradients(found).items():
        assert torch.allclose(gradient, wanted[name], rtol=1e-4, atol=1e-5), name


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("channel", ["A", "B"])
@pytest.mark.parametrize("iterations", [1, 3])
def test_no_tensor_has_more_rows_of_the_vocabulary_than_a_chunk(
    learner_of: LearnerOf, samples: list[Sample], channel: Channel, iterations: int
) -> None:
    learner = learner_of(iterations=iterations)
    pack = learner.pack(samples)
    shapes = Shapes()
    with shapes:
        learner.loss(pack, channel).total.backward()
    weights = {(VOCABULARY, 128), (128, VOCABULARY)}
    wide = set(shapes.with_sides(VOCABULARY)) - weights
    assert (CHUNK, VOCABULARY) in wide
    assert max(map(math.prod, wide)) <= CHUNK * VOCABULARY, wide


@pytest.mark.req("CHA-01")
@pytest.mark.usefixtures("small_chunks")
def test_forwards_between_the_first_and_the_last_read_slots_alone(
    learner_of: LearnerOf, samples: list[Sample]
) -> None:
    learner = learner_of(iterations=3)
    pack = learner.pack(samples)
    selection = learner.pipeline.select(pack.supervision, "A")
    texts, slots = len(selection.text_rows), len(selection.slot_rows)
    products = Products()
    with products:
        learner.loss(pack)
    assert sum(products.rows) == (texts + slots) + slots + (texts + slots)


ROWS = 24
PART = 5
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

        parts = zip(hidden.split(PART), self.pulls.split(PART), strict=True)
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
    """A step of channel A has two forwards in one backward."""
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
    """FSDP2 gathers such a weight. A sum of 64 chunks in bfloat16 is off by over a percent."""
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
