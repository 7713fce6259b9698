"""Channel A's forwards on the real architecture: what goes in, and what is fed back."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from learner.config.schema import CoordContextMode, SoftContextGradMode
from learner.models.load import LoadedModel
from learner.models.packs import Pack
from learner.models.self_context import SelfContext
from learner.types import Sample
from tests.unit.loaded_models import loaded_from
from tests.unit.toy_learner import (
    Forward,
    ToyLearner,
    forwards_of,
    sharpened,
)

MODES: tuple[CoordContextMode, ...] = get_args(CoordContextMode)


@pytest.fixture(scope="module")
def loaded(toy_checkpoint: Path) -> LoadedModel:
    return sharpened(loaded_from(toy_checkpoint), 8)


@pytest.fixture(scope="module")
def pack(loaded: LoadedModel, samples: list[Sample]) -> Pack:
    return ToyLearner(loaded).pack(samples)


@torch.no_grad()
def forwards(loaded: LoadedModel, pack: Pack, context: SelfContext) -> list[Forward]:
    learner = ToyLearner(loaded, context)
    with forwards_of(learner.model) as seen:
        learner.loss(pack)
    return seen


def embedded(loaded: LoadedModel, ids: Tensor) -> Tensor:
    """By the model's own module; under test is who else calls it."""
    found: Tensor = loaded.inner.get_input_embeddings()(ids).detach()
    return found


def slots(pack: Pack) -> Tensor:
    return pack.supervision.coord_positions


@pytest.mark.req("CHA-02")
@pytest.mark.scenario("Multimodal forward does not fail under iterative inputs_embeds")
@pytest.mark.parametrize("mode", MODES)
def test_only_coordinate_slots_differ_from_the_embedded_ids_to_the_bit(
    loaded: LoadedModel, pack: Pack, mode: CoordContextMode
) -> None:
    base = embedded(loaded, pack.input_ids)[0]
    is_slot = torch.zeros(len(pack), dtype=torch.bool)
    is_slot[slots(pack)] = True
    is_image = pack.mm_token_types[0] == 1
    assert is_image.sum() == 16 + 24 + 6 + 24
    for seen in forwards(loaded, pack, SelfContext(4, mode))[1:]:
        (row,) = seen.arguments["inputs_embeds"]
        assert torch.equal(row[~is_slot], base[~is_slot])
        assert torch.equal(row[is_image], base[is_image])
        assert (row[is_slot] != base[is_slot]).any(dim=-1).all()


@pytest.mark.req("CHA-01")
@pytest.mark.parametrize(
    ("grad_mode", "recorded"),
    [("unroll", [True, True, True, True]), ("em_detach", [True, False, False, True])],
)
def test_detached_iterations_between_the_first_and_the_last_record_no_graph(
    loaded: LoadedModel, samples: list[Sample], grad_mode: SoftContextGradMode, recorded: list[bool]
) -> None:
    learner = ToyLearner(loaded, SelfContext(4, "soft", grad_mode))
    with forwards_of(learner.model) as seen:
        learner.loss(learner.pack(samples[2:3]))
    assert [forward.recorded for forward in seen] == recorded
