"""Channel A's forwards on the real architecture: what goes in, and what is fed back."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from learner.config.schema import CoordContextMode, SoftContextGradMode
from learner.models.load import LoadedModel
from learner.models.packs import Pack
from learner.models.self_context import SelfContext
from learner.objectives.logit_stats import ForwardStats
from learner.types import Sample
from tests.unit.loaded_models import loaded_from
from tests.unit.packed_logits import as_given, packed_logits
from tests.unit.toy_learner import (
    COORDINATES,
    EVERY_TERM,
    TEXT,
    Forward,
    ToyLearner,
    forwards_of,
    sharpened,
    stated_arguments,
)

MODES: tuple[CoordContextMode, ...] = get_args(CoordContextMode)
GRAD_MODES: tuple[SoftContextGradMode, ...] = get_args(SoftContextGradMode)


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


def expected_embeddings(loaded: LoadedModel, pack: Pack, logits: Tensor) -> Tensor:
    """The mean embedding at each slot under the logits of the token before; (K, hidden)."""
    table = embedded(loaded, torch.tensor(loaded.vocab.ids)).double()
    means = []
    for position in slots(pack).tolist():
        values = logits[position - 1, loaded.vocab.ids].double()
        weights = (values - values.max()).exp()
        means.append((weights[:, None] * table).sum(0) / weights.sum())
    return torch.stack(means)


# --- how often, and with what


@pytest.mark.req("CHA-01", "LOSS-03")
@pytest.mark.scenario("n_softctx_iter=2 runs exactly two forwards and uses final logits")
@pytest.mark.parametrize("grad_mode", GRAD_MODES)
@pytest.mark.parametrize("mode", MODES)
def test_every_pack_has_exactly_as_many_forwards_as_iterations(
    loaded: LoadedModel, samples: list[Sample], mode: CoordContextMode, grad_mode: Any
) -> None:
    small = ToyLearner(loaded).pack(samples[2:3])
    for iterations in (1, 2, 3, 4):
        seen = forwards(loaded, small, SelfContext(iterations, mode, grad_mode))
        assert len(seen) == iterations


@pytest.mark.req("CHA-02", "PACK-04")
@pytest.mark.scenario("Multimodal forward does not fail under iterative inputs_embeds")
@pytest.mark.parametrize("mode", MODES)
def test_what_reaches_the_model_is_the_same_in_every_iteration_but_the_embeddings(
    loaded: LoadedModel, pack: Pack, mode: CoordContextMode
) -> None:
    first, *later = forwards(loaded, pack, SelfContext(3, mode))
    assert pack.pixel_values is not None
    assert pack.image_grid_thw is not None
    assert torch.equal(first.arguments["input_ids"], pack.input_ids)
    for seen in (first, *later):
        given = {name: value for name, value in seen.arguments.items() if value is not None}
        assert given.keys() <= stated_arguments()
        assert given.keys() == {
            "input_ids" if seen is first else "inputs_embeds",
            "position_ids",
            "mm_token_type_ids",
            "pixel_values",
            "image_grid_thw",
            "cu_seq_lens_q",
            "cu_seq_lens_k",
            "max_length_q",
            "max_length_k",
            "use_cache",
        }
        assert given["use_cache"] is False
        assert given["position_ids"].shape == (4, 1, len(pack))
        assert torch.equal(given["position_ids"], pack.position_ids)
        assert torch.equal(pack.pixel_values, given["pixel_values"])
        assert torch.equal(pack.image_grid_thw, given["image_grid_thw"])
        assert torch.equal(given["mm_token_type_ids"], pack.mm_token_types)
        assert seen.logits.shape[0] == len(pack)


# --- what is fed back


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
def test_a_slot_reads_what_the_forward_before_expected_there(
    loaded: LoadedModel, pack: Pack
) -> None:
    seen = forwards(loaded, pack, SelfContext(4, "soft"))
    fed_back = [f.arguments["inputs_embeds"][0, slots(pack)] for f in seen[1:]]
    for before, context in zip(seen, fed_back, strict=False):
        wanted = expected_embeddings(loaded, pack, before.logits)
        assert torch.allclose(context.double(), wanted, atol=1e-5)
    assert not torch.allclose(fed_back[0], fed_back[1], atol=1e-4)


# --- what is recorded, and what the objectives look at


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


@pytest.mark.req("CHA-01")
@pytest.mark.parametrize(
    "modules", [TEXT, COORDINATES, EVERY_TERM], ids=["text", "coordinates", "all"]
)
def test_one_iteration_is_plain_teacher_forcing(
    loaded: LoadedModel, samples: list[Sample], modules: Any
) -> None:
    learner = ToyLearner(loaded, SelfContext(1, "soft", "em_detach"), modules)
    small = learner.pack(samples[1:3])
    selection = learner.pipeline.select(small.supervision, "A")
    stats = learner.pipeline.reader(selection).anchor(as_given(packed_logits(learner.model, small)))
    plain = learner.pipeline(ForwardStats(stats, stats), selection, "A")
    found = learner.loss(small)
    assert torch.allclose(found.total, plain.total, atol=1e-6)
    wanted = learner.gradients(plain)  # of the head over the whole row
    for name, gradient in learner.gradients(found).items():
        assert torch.allclose(gradient, wanted[name], rtol=1e-5, atol=1e-6), name
