"""Scenarios of both channels' objective (seed 001): channel A's forwards, and what counts."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from learner.config.pipeline import ObjectiveModule
from learner.config.stage2_ab import SoftContextGradMode
from learner.coords import COORD_BINS, decode_bin
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.losses.bbox_geo import expected_coords
from learner.losses.pipeline import PackLoss
from learner.losses.reading import Readings
from learner.model.load import LoadedModel
from learner.model.packed_forward import Segment, make_pack
from learner.model.self_context import SelfContext
from learner.types import Channel, Role, Sample, Shape
from tests.unit.answers import entry
from tests.unit.loaded_models import loaded_from
from tests.unit.small_run import written
from tests.unit.test_channels import CAT, DOG, GHOST
from tests.unit.toy_learner import BOXES, ToyLearner, bins, forwards_of, text

pytestmark = pytest.mark.usefixtures("one_thread")


def with_keys(module: ObjectiveModule, keys: dict[str, float]) -> ObjectiveModule:
    """A module at weight 1 with some keys of its config changed."""
    config = module.config.model_copy(update=keys)
    return module.model_copy(update={"weight": 1.0, "config": config})


SMOOTHL1 = with_keys(BOXES, {"smoothl1_weight": 1.0, "ciou_weight": 0.0})
MISSED_AND_MADE_UP = written(CAT, GHOST)


@pytest.fixture(scope="module")
def loaded(toy_checkpoint: Path) -> LoadedModel:
    return loaded_from(toy_checkpoint)


@pytest.fixture(scope="module")
def scene(toy_data: ToyData) -> Sample:
    """A scene whose annotation is a cat and a dog."""
    sample = read_samples(toy_data.train_jsonl, allow_poly=False)[0]
    return replace(sample, objects=(CAT, DOG))


# --- Channel A's forwards ---------------------------------------------------------------


@pytest.mark.req("CHA-01")
def test_unroll_mode_does_not_detach_expected_coord_embeddings(
    loaded: LoadedModel, scene: Sample
) -> None:
    modes: tuple[SoftContextGradMode, ...] = ("unroll", "em_detach")
    reached = {}
    for mode in modes:
        learner = ToyLearner(loaded, SelfContext(2, "st", mode), [SMOOTHL1])
        pack = learner.pack([scene])
        selection = learner.pipeline.select(pack.supervision, "A")
        with forwards_of(learner.model) as seen:
            reader = learner.pipeline.reader(selection)
            readings = learner.channel_a.readings(learner.model, pack, reader)
        assert len(seen) == 2
        loss = learner.pipeline(readings, selection, "A").total
        fed_back = readings.anchor.slot_coord_logits
        (gradient,) = torch.autograd.grad(loss, fed_back, materialize_grads=True)
        reached[mode] = gradient.abs().sum().item()
    assert reached["unroll"] > 0
    assert reached["em_detach"] == 0


@pytest.mark.req("CHA-01", "LOSS-03")
def test_n_softctx_iter_2_runs_exactly_two_forwards_and_uses_final_logits(
    loaded: LoadedModel, scene: Sample
) -> None:
    learner = ToyLearner(loaded, SelfContext(iterations=2), [SMOOTHL1])
    pack = learner.pack([scene])
    with forwards_of(learner.model) as seen:
        loss = learner.loss(pack)
    assert len(seen) == 2
    rows = pack.supervision.coord_positions - 1
    plain = []
    for forward in seen:
        probs = forward.logits[rows][:, learner.coord_ids].double().softmax(-1)
        decoded = (probs * torch.arange(COORD_BINS) / 999).sum(-1)
        off = (decoded - pack.supervision.coord_bins / 999).abs()
        plain.append(torch.where(off < 1, off**2 / 2, off - 0.5).mean().item())
    assert plain[0] != pytest.approx(plain[1], rel=1e-4), "the two forwards differ"
    assert loss.total.item() == pytest.approx(plain[1], rel=1e-5)


@pytest.mark.req("CHA-02")
def test_multimodal_forward_does_not_fail_under_iterative_inputs_embeds(
    loaded: LoadedModel, scene: Sample
) -> None:
    learner = ToyLearner(loaded, SelfContext(iterations=3), [SMOOTHL1])
    pack = learner.pack([scene, scene])
    with forwards_of(learner.model) as seen:
        loss = learner.loss(pack)
    assert torch.isfinite(loss.total)
    embedded = learner.encoding.inner.get_input_embeddings()(pack.input_ids)
    placeholders = pack.mm_token_types == 1
    assert placeholders.any()
    assert pack.pixel_values is not None
    for arguments, _, _ in seen[1:]:
        assert arguments["input_ids"] is None
        assert torch.equal(arguments["pixel_values"], pack.pixel_values)
        assert torch.equal(arguments["inputs_embeds"][placeholders], embedded[placeholders])


# --- Text -------------------------------------------------------------------------------


class Taught(NamedTuple):
    """A supervised text token."""

    role: Role
    weight: float


def answered(learner: ToyLearner, scene: Sample, *answers: str) -> list[Segment]:
    """Channel B's segments of a scene that was answered so."""
    rollouts = [learner.answer(scene, said) for said in answers]
    segments, _ = learner.channel_b.segments([scene] * len(answers), rollouts)
    return segments


def taught(learner: ToyLearner, *segments: Segment) -> list[Taught]:
    """The text that channel B teaches of segments in one pack."""
    chosen = learner.pipeline.select(make_pack(segments).supervision, "B")
    pairs = zip(chosen.text_roles.tolist(), chosen.text_weights.tolist(), strict=True)
    return [Taught(Role(role), weight) for role, weight in pairs]


@pytest.mark.req("LOSS-01")
def test_dropped_invalid_instances_may_upweight_b3_structure_ce(
    loaded: LoadedModel, scene: Sample
) -> None:
    key = "rollout_drop_invalid_struct_ce_multiplier"
    plain, raised = (
        ToyLearner(loaded, None, [with_keys(text(self_context=0.0), {key: factor})])
        for factor in (1.0, 1.5)
    )
    broken = written(CAT).removesuffix("}") + f", {entry(2, 'wrong', (5, 6, 7))}}}"
    clean, dropped = answered(plain, scene, written(CAT), broken)
    structure = (Role.MATCHED_STRUCTURE, Role.APPENDED_STRUCTURE)
    assert taught(raised, clean, dropped) == taught(plain, clean) + [
        token._replace(weight=token.weight * 1.5) if token.role in structure else token
        for token in taught(plain, dropped)
    ]


class Given(NamedTuple):
    """The loss of logits (L, V) that were made up, and the size of their gradient by target token.

    Nothing but the tokens of the target has one.
    """

    loss: PackLoss
    pulls: Tensor


def given(learner: ToyLearner, segment: Segment, logits: Tensor, channel: Channel) -> Given:
    logits = logits.detach().requires_grad_()
    selection = learner.pipeline.select(make_pack([segment]).supervision, channel)
    reading = learner.pipeline.reader(selection).anchor(logits)
    loss = learner.pipeline(Readings(reading, reading), selection, channel)
    (gradient,) = torch.autograd.grad(loss.total, logits)
    size = gradient.abs().sum(-1)
    first = segment.prompt.ids.numel()
    assert not size[: first - 1].any()
    return Given(loss, size[first - 1 : -1])


def vocabulary(learner: ToyLearner) -> int:
    """Its size: the coordinate tokens come last."""
    return int(learner.coord_ids.max()) + 1


def random_logits(learner: ToyLearner, segment: Segment) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(len(segment), vocabulary(learner), generator=generator)


@pytest.mark.req("LOSS-01")
def test_desc_can_be_fully_masked_while_keeping_structure_ce(
    loaded: LoadedModel, scene: Sample
) -> None:
    module = with_keys(text(self_context=0.0), {"desc_ce_weight": 0.0})
    learner = ToyLearner(loaded, None, [module])
    (segment,) = learner.channel_a.segments([scene])
    _, pulls = given(learner, segment, random_logits(learner, segment), "A")
    roles = torch.from_numpy(segment.target.role)
    masked = (roles == Role.APPENDED_DESC) | (roles == Role.COORD)
    assert (roles == Role.APPENDED_DESC).any()
    assert not pulls[masked].any()
    assert (pulls[~masked] > 0).all()


# --- Coordinates ------------------------------------------------------------------------


@pytest.mark.req("LOSS-03")
def test_expectation_decoding_uses_probability_weighted_mean_not_argmax() -> None:
    logits = torch.full((COORD_BINS,), -1e4)
    logits[[0, 999]] = torch.tensor([0.0, 1e-3])  # the argmax is bin 999
    assert expected_coords(logits).item() == pytest.approx(0.5, abs=1e-3)


@pytest.mark.req("LOSS-03", "DATA-02")
def test_geometry_losses_operate_on_normalized_coordinates(
    loaded: LoadedModel, scene: Sample
) -> None:
    """SmoothL1 of a distance of 1.0 is 0.5: the whole image, not one bin of it."""
    assert decode_bin(999) == 1.0
    corner = replace(CAT, shape=Shape("bbox_2d", (999,) * 4))
    learner = ToyLearner(loaded, None, [SMOOTHL1])
    (segment,) = learner.channel_a.segments([replace(scene, objects=(corner,))])
    for said, cost in ((999, 0.0), (0, 0.5)):
        logits = torch.zeros(len(segment), vocabulary(learner))
        logits[:, learner.coord_ids[said]] = 1e4
        loss, _ = given(learner, segment, logits, "A")
        assert loss.total.item() == pytest.approx(cost, abs=1e-6)


@pytest.mark.req("LOSS-03", "LOSS-04")
@pytest.mark.parametrize("module", [SMOOTHL1, bins(text_gate=0.0)], ids=lambda m: str(m.name))
def test_channel_b_geometry_includes_matched_and_fn_but_excludes_fp(
    loaded: LoadedModel, scene: Sample, module: ObjectiveModule
) -> None:
    learner = ToyLearner(loaded, None, [module])
    (segment,) = answered(learner, scene, MISSED_AND_MADE_UP)
    _, pulls = given(learner, segment, random_logits(learner, segment), "B")
    matched, appended = segment.target.coord_groups
    assert (matched.matched, appended.matched) == (True, False)
    assert (pulls[[*matched.positions, *appended.positions]] > 0).all()
    assert (pulls > 0).sum() == 8, "and nothing else"
    assert coordinates_in(learner, segment) == 12, "of which four are the false positive's"


def coordinates_in(learner: ToyLearner, segment: Segment) -> int:
    known = set(learner.coord_ids.tolist())
    return sum(token_id in known for token_id in segment.target.token_ids)


@pytest.mark.req("LOSS-04", "LOSS-05")
def test_enabled_coord_soft_ce_w1_increases_stage_2_coord_regularization(
    loaded: LoadedModel, scene: Sample
) -> None:
    off, on = (
        ToyLearner(
            loaded,
            None,
            [with_keys(bins(text_gate=0.0), {"soft_ce_weight": weight, "w1_weight": weight})],
        )
        for weight in (0.0, 0.02)
    )
    (segment,) = answered(on, scene, MISSED_AND_MADE_UP)
    logits = random_logits(on, segment)
    before, after = (given(learner, segment, logits, "B").loss for learner in (off, on))
    added = ("loss/B_coord/coord_soft_ce", "loss/B_coord/coord_w1")
    assert not set(added) & set(before.atoms)
    assert all(after.atoms[key] > 0 for key in added)
    more = (after.total - before.total).item()
    assert more == pytest.approx(sum(after.atoms[key] for key in added), rel=1e-4)
