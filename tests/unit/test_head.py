"""The head on supervised rows alone, a chunk at a time: values, gradients and shapes (FULL-02)."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from learner.data.toy import ToyData
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
