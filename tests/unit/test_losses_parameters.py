"""What each knob of a pipeline reaches in a real model: parameters, and forwards of channel A."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learner.config.schema import SoftContextGradMode
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.models.load import LoadedModel
from learner.models.packed_forward import Pack, make_pack
from learner.models.self_context import SelfContext
from learner.models.toy import make_model
from learner.objectives.config import ObjectiveModule
from learner.types import Channel, Role, Sample
from tests.unit.answers import entry
from tests.unit.loaded_models import loaded_from
from tests.unit.loss_rows import bbox_geo, coord_reg, token_ce
from tests.unit.packed_logits import logits_through
from tests.unit.test_channels import CAT, DOG, GHOST
from tests.unit.toy_learner import Gradients, ToyLearner, sharpened

pytestmark = pytest.mark.usefixtures("one_thread")

HEAD = "lm_head.weight"
TWICE = SelfContext(2, "soft", "unroll")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Its head is its own: the rows of the head are the columns of the logits."""
    path = tmp_path_factory.mktemp("untied") / "model"
    make_model(path, seed=0, tie=False)
    return sharpened(loaded_from(path), 4)


@pytest.fixture(scope="module")
def scene(toy_data: ToyData) -> Sample:
    sample = read_samples(toy_data.train_jsonl, allow_poly=False)[0]
    return replace(sample, objects=(CAT, DOG))


@pytest.fixture(scope="module")
def packs(loaded: LoadedModel, scene: Sample) -> dict[Channel, Pack]:
    """B: a match, a ghost, an object that is dropped; one is appended. A: the annotation."""
    learner = ToyLearner(loaded)
    said = [entry(1, CAT.desc, CAT.shape.coords), entry(2, GHOST.desc, GHOST.shape.coords)]
    text = f"{{{', '.join([*said, entry(3, DOG.desc, DOG.shape.coords[:3])])}}}"
    segments, (answer,) = learner.channel_b.segments([scene], [learner.answer(scene, text)])
    found = answer.match
    assert [len(n) for n in (found.pairs, found.false_negatives, found.false_positives)] == [1] * 3
    return {"A": learner.pack([scene]), "B": make_pack(segments)}


def only(module: ObjectiveModule, **keys: Any) -> ObjectiveModule:
    """A module with no weight in its config but these."""
    config = module.config
    zeros = {key: 0.0 for key in type(config).model_fields if key.endswith("_weight")}
    return module.model_copy(update={"config": config.model_copy(update={**zeros, **keys})})


UNTAUGHT = token_ce(weight=0.0)
MULTIPLIER = "rollout_drop_invalid_struct_ce_multiplier"
STRUCT, CONTEXT = "rollout_matched_prefix_struct_weight", "self_context_struct_ce_weight"


def text_knob(**keys: Any) -> list[ObjectiveModule]:
    return [only(token_ce(), **keys)]


def slot_knob(**keys: Any) -> list[ObjectiveModule]:
    return [UNTAUGHT, only(coord_reg(), **keys)]


# (channel, forwards, the knob at rest, moved, whether every row of the head moves or only those
# of the coordinates)
KNOBS: dict[str, tuple[Channel, list[ObjectiveModule], list[ObjectiveModule], bool]] = {
    "desc_ce": ("A", text_knob(), text_knob(desc_ce_weight=0.5), True),
    "rollout_fn_desc": ("B", text_knob(), text_knob(rollout_fn_desc_weight=0.5), True),
    "matched_struct": ("B", text_knob(), text_knob(**{STRUCT: 0.5}), True),
    "drop_multiplier": ("B", text_knob(**{MULTIPLIER: 1.0}), text_knob(**{MULTIPLIER: 3.0}), True),
    "self_context": ("A", text_knob(), text_knob(**{CONTEXT: 0.5}), True),
    "smoothl1": ("B", [], [only(bbox_geo(), smoothl1_weight=1.0)], False),
    "ciou": ("B", [], [only(bbox_geo(), ciou_weight=1.0)], False),
    "coord_ce": ("B", [], slot_knob(coord_ce_weight=1.0), False),
    "soft_ce": ("B", [], slot_knob(soft_ce_weight=1.0), False),
    "w1": ("B", [], slot_knob(w1_weight=1.0), False),
    "coord_gate": ("B", [], slot_knob(coord_gate_weight=1.0), True),
    "text_gate": ("B", [], slot_knob(text_gate_weight=1.0), True),
    "temperature": (
        "B",
        slot_knob(text_gate_weight=1.0, temperature=1.0),
        slot_knob(text_gate_weight=1.0, temperature=0.5),
        True,
    ),
    "target_sigma": (
        "B",
        slot_knob(soft_ce_weight=1.0, target_truncate=None, target_sigma=2.0),
        slot_knob(soft_ce_weight=1.0, target_truncate=None, target_sigma=300.0),
        False,
    ),
    "target_truncate": (
        "B",
        slot_knob(w1_weight=1.0, target_sigma=50.0, target_truncate=None),
        slot_knob(w1_weight=1.0, target_sigma=50.0, target_truncate=4),
        False,
    ),
    "weight of token_ce": ("B", [], [token_ce(weight=0.5)], True),
    "weight of bbox_geo": ("B", [], [bbox_geo(weight=0.5)], False),
    "weight of coord_reg": ("B", [UNTAUGHT], [UNTAUGHT, coord_reg(weight=0.5)], True),
}


def gradients(
    loaded: LoadedModel,
    packs: dict[Channel, Pack],
    channel: Channel,
    modules: list[ObjectiveModule],
) -> Gradients:
    learner = ToyLearner(loaded, TWICE, modules or [UNTAUGHT])
    return learner.gradients(learner.loss(packs[channel], channel))


@pytest.mark.req("LOSS-01", "LOSS-03", "LOSS-04", "LOSS-05", "CFG-08")
@pytest.mark.parametrize("knob", KNOBS)
def test_each_knob_alone_moves_the_gradient_of_the_parameters_it_should(
    loaded: LoadedModel, packs: dict[Channel, Pack], knob: str
) -> None:
    channel, rest, set_, whole_head = KNOBS[knob]
    before, after = (gradients(loaded, packs, channel, modules) for modules in (rest, set_))
    moved = {name for name, gradient in after.items() if not torch.equal(gradient, before[name])}
    assert moved == set(after)
    rows = (after[HEAD] != before[HEAD]).any(1).nonzero().flatten().tolist()
    assert rows == (list(range(len(after[HEAD]))) if whole_head else sorted(loaded.vocab.ids))


@pytest.mark.req("LOSS-01", "CFG-08")
@pytest.mark.parametrize(
    ("channel", "knob"),
    [
        ("A", "rollout_fn_desc"),
        ("A", "matched_struct"),
        ("A", "drop_multiplier"),
        ("B", "desc_ce"),
        ("B", "self_context"),
    ],
)
def test_a_knob_of_the_other_channel_moves_nothing(
    loaded: LoadedModel, packs: dict[Channel, Pack], channel: Channel, knob: str
) -> None:
    _, rest, set_, _ = KNOBS[knob]
    before, after = (gradients(loaded, packs, channel, modules) for modules in (rest, set_))
    assert all(torch.equal(gradient, before[name]) for name, gradient in after.items())


@contextmanager
def kept_logits(model: nn.Module) -> Iterator[list[Tensor]]:
    """(1, L, V) of every forward while this is open, with the gradients that arrive there."""
    seen: list[Tensor] = []

    def keep(logits: Tensor) -> Tensor:
        logits.retain_grad()
        seen.append(logits)
        return logits

    with logits_through(model, keep):
        yield seen


def arriving(
    loaded: LoadedModel, pack: Pack, mode: SoftContextGradMode, modules: Sequence[ObjectiveModule]
) -> list[Tensor]:
    """Gradient at the logits (L, V) of the first and of the last of two forwards."""
    learner = ToyLearner(loaded, SelfContext(2, "soft", mode), modules)
    with kept_logits(learner.model) as forwards:
        learner.loss(pack).total.backward()
    loaded.model.zero_grad()
    assert len(forwards) == 2
    return [torch.zeros_like(z[0]) if z.grad is None else z.grad[0] for z in forwards]


@pytest.mark.req("LOSS-01", "LOSS-04", "CHA-01")
@pytest.mark.parametrize("mode", ["unroll", "em_detach"])
@pytest.mark.parametrize("knob", ["self_context", "text_gate"])
def test_terms_on_text_of_the_last_forward_reach_the_first_through_its_coordinates_alone(
    loaded: LoadedModel, packs: dict[Channel, Pack], knob: str, mode: SoftContextGradMode
) -> None:
    pack, (_, rest, set_, _) = packs["A"], KNOBS[knob]
    before = arriving(loaded, pack, mode, rest or [UNTAUGHT])
    first, last = (
        after != rested
        for after, rested in zip(arriving(loaded, pack, mode, set_), before, strict=True)
    )
    taught = pack.supervision
    text = [Role.APPENDED_STRUCTURE, Role.CLOSURE]
    if knob == "text_gate":
        text.append(Role.APPENDED_DESC)
    wanted = torch.isin(taught.roles, torch.tensor([int(role) for role in text]))
    assert last.any(1)[:-1].tolist() == wanted[1:].tolist()
    rows, columns = first.any(1).nonzero().flatten(), first.any(0).nonzero().flatten()
    if mode == "em_detach":
        assert not len(rows)
    else:
        assert set(rows.tolist()) <= set((taught.coord_positions - 1).tolist())
        assert len(rows)
        assert columns.tolist() == sorted(loaded.vocab.ids)
