"""What the rollout-aligned objective teaches: which tokens, which bins, and nothing else.

The answers are written by hand; parser, matching, targets, segments and objective are real. The
logits are random, so that a gradient of exactly 0 is one of a token that is not taught.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.config import parse_config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.models.packed_forward import PromptEncoder, Segment, make_pack
from learner.objectives.logit_stats import ForwardStats
from learner.objectives.pipeline import PackLoss, Pipeline
from learner.stages.coords import COORD_BINS
from learner.training.channels import ChannelB, Encoding
from learner.types import CoordGroup, GroundTruthObject, Shape
from tests.unit.answers import coords, encode, pieces
from tests.unit.config_faults import ALIGNED, changed
from tests.unit.loaded_models import loaded_from
from tests.unit.packed_logits import as_given
from tests.unit.small_run import rollout

pytestmark = pytest.mark.usefixtures("one_thread")

OBJECTIVE = "rollout_matching.pipeline.objective"
TOKEN_CE, COORD_REG = f"{OBJECTIVE}.0.config", f"{OBJECTIVE}.1.config"
BBOX_GEO = {
    "name": "bbox_geo",
    "enabled": True,
    "weight": 1.0,
    "channels": ["B"],
    "config": {"smoothl1_weight": 1.0, "ciou_weight": 1.0},
}


def poly(desc: str, *bins: int) -> GroundTruthObject:
    return GroundTruthObject(desc, Shape("poly", bins))


def box(desc: str, *bins: int) -> GroundTruthObject:
    return GroundTruthObject(desc, Shape("bbox_2d", bins))


ROOF = poly("red roof", 300, 100, 520, 480, 90, 470)
SIGN = box("sign", 600, 610, 900, 905)


def entry(index: int, item: GroundTruthObject) -> str:
    bins = coords(*item.shape.coords)
    return f'"object_{index}": {{"desc": "{item.desc}", "{item.shape.kind}": {bins}}}'


ROOF_SAID = entry(1, poly("a house", 310, 90, 500, 500, 80, 490))
SIGN_SAID = entry(2, box("plate", 590, 600, 905, 900))
GHOST_SAID = entry(3, poly("ghost", 950, 0, 999, 0, 999, 60))


@dataclass(frozen=True)
class Lesson:
    """The loss of one answer, and the gradient of the logits (L, V) that it was computed from."""

    segment: Segment
    text: list[str]
    loss: PackLoss
    logits: Tensor
    gradient: Tensor

    @property
    def groups(self) -> list[CoordGroup]:
        return self.segment.target.coord_groups

    def rows(self, name: str) -> Tensor:
        """`logits` or `gradient` that predict each token of the target, (T, V)."""
        rows: Tensor = getattr(self, name)
        first = len(self.segment) - len(self.text)
        return rows[first - 1 : -1]

    @property
    def pulls(self) -> Tensor:
        """Size of the gradient at each token of the target, (T,)."""
        return self.rows("gradient").abs().sum(dim=-1)

    @property
    def taught(self) -> set[int]:
        """Positions in the target of the tokens with a gradient; nothing else has one."""
        found = set(self.pulls.nonzero().squeeze(1).tolist())
        assert int(self.gradient.any(dim=-1).sum()) == len(found)
        return found

    @property
    def tail(self) -> set[int]:
        """Tokens of what was appended, the closure included."""
        return set(range(self.segment.target.prefix_len, len(self.text)))

    def of(self, part: str) -> set[int]:
        """Positions of the tokens that hold a character of a part of the target's text."""
        whole = "".join(self.text)
        assert whole.count(part) == 1, part
        start, stop = whole.index(part), whole.index(part) + len(part)
        ends = np.cumsum([len(piece) for piece in self.text]).tolist()
        spans = [(end - len(piece), end) for end, piece in zip(ends, self.text, strict=True)]
        return {i for i, (first, end) in enumerate(spans) if first < stop and end > start}

    def coordinates(self, part: str) -> set[int]:
        """Those of them that are coordinate tokens."""
        return {i for i in self.of(part) if self.text[i].startswith("<|coord_")}


Teach = Callable[..., Lesson]


@pytest.fixture(scope="module")
def teach(toy_checkpoint: Path, toy_data: ToyData) -> Teach:
    """The lesson of an answer to a sample with these ground truths."""
    loaded = loaded_from(toy_checkpoint)
    prompt = PromptEncoder(loaded.processor, "Detect every object in the image.", None)
    encoding = Encoding(loaded.inner, prompt, loaded.tokenizer, "desc_first")
    scene = read_samples(toy_data.train_jsonl, allow_poly=False)[0]

    def lesson(
        answer: str,
        *truths: GroundTruthObject,
        mapping: dict[str, Any] = ALIGNED,
        logits: Tensor | None = None,
    ) -> Lesson:
        config = parse_config(mapping)
        channel = ChannelB(encoding, config.rollout_matching.matching, allow_poly=config.allow_poly)
        sample = replace(scene, objects=truths)
        said = rollout(prompt(sample).ids.tolist(), encode(loaded.tokenizer, answer))
        (segment,), _ = channel.segments([sample], [said])
        if logits is None:
            generator = torch.Generator().manual_seed(3)
            vocabulary = len(loaded.processor.tokenizer)
            logits = torch.randn(len(segment), vocabulary, generator=generator).double()
        logits = logits.detach().clone().requires_grad_()
        pipeline = Pipeline(config.pipeline, loaded.vocab.ids)
        selection = pipeline.select(make_pack([segment]).supervision, "B")
        stats = pipeline.reader(selection).anchor(as_given(logits))
        loss = pipeline(ForwardStats(stats, stats), selection, "B")
        (gradient,) = torch.autograd.grad(loss.total, logits)
        text = pieces(loaded.tokenizer, segment.target.token_ids)
        return Lesson(segment, text, loss, logits.detach(), gradient)

    return lesson


# --- Plain references, loop by loop in float64 -------------------------------------------


def points_of(shape: Shape) -> list[tuple[int, int]]:
    c = shape.coords
    if shape.kind == "bbox_2d":
        return [(c[0], c[1]), (c[2], c[1]), (c[2], c[3]), (c[0], c[3])]
    return list(zip(c[0::2], c[1::2], strict=True))


def projected(predicted: Shape, truth: Shape) -> list[list[float]]:
    """Barycentric projection of the predicted points: Sinkhorn by scaling exp(-cost / epsilon)."""
    settings = ALIGNED["rollout_matching"]["matching"]
    assert settings["ot_cost"] == "l2"
    ours, theirs = points_of(predicted), points_of(truth)
    kernel = np.array(
        [[math.exp(-math.dist(p, g) / settings["ot_epsilon"]) for g in theirs] for p in ours]
    )
    v = np.ones(len(theirs))
    for _ in range(settings["ot_iters"]):
        u = 1 / len(ours) / (kernel @ v)
        v = 1 / len(theirs) / (kernel.T @ u)
    plan = u[:, None] * kernel * v
    points: list[list[float]] = (plan @ theirs / plan.sum(axis=1, keepdims=True)).tolist()
    return points


def plain_coord_terms(
    lesson: Lesson, aims: dict[int, float], coord_ids: list[int]
) -> dict[str, float]:
    """Means over slots; aims: a target in bins for each position."""
    config = ALIGNED["rollout_matching"]["pipeline"]["objective"][1]["config"]
    soft = w1 = gate = 0.0
    for position, aim in aims.items():
        z = lesson.rows("logits")[position].numpy()
        log_p = z[coord_ids] - np.logaddexp.reduce(z[coord_ids])
        q = np.zeros(COORD_BINS)
        for k in range(COORD_BINS):
            if abs(k - aim) <= config["target_truncate"]:
                q[k] = math.exp(-(((k - aim) / config["target_sigma"]) ** 2) / 2)
        q /= q.sum()
        soft -= float((q * log_p).sum())
        w1 += sum(abs(d) for d in np.cumsum(np.exp(log_p) - q)) / 999
        gate += float(np.logaddexp.reduce(z) - np.logaddexp.reduce(z[coord_ids]))
    count = len(aims)
    return {"coord_soft_ce": soft / count, "coord_w1": w1 / count, "coord_gate": gate / count}


# --- Polygons ----------------------------------------------------------------------------


@pytest.mark.req("OT-01", "LOSS-04", "RES-10")
@pytest.mark.parametrize(
    ("said", "truth"),
    [
        (poly("house", 310, 90, 500, 500, 300, 510, 80, 490), ROOF),
        (poly("plate", 590, 600, 905, 620, 910, 760, 890, 900, 610, 890), SIGN),
    ],
    ids=["polygon to polygon", "polygon to box"],
)
def test_a_matched_polygon_is_taught_its_projection_between_bins(
    teach: Teach, said: GroundTruthObject, truth: GroundTruthObject, coord_ids: list[int]
) -> None:
    lesson = teach("{" + entry(1, said) + "}", truth)
    slots = sorted(lesson.coordinates(entry(1, said)))
    bins = [value for point in projected(said.shape, truth.shape) for value in point]
    assert any(abs(value - round(value)) > 0.01 for value in bins)
    expected = plain_coord_terms(lesson, dict(zip(slots, bins, strict=True)), coord_ids)
    for name, value in expected.items():
        assert lesson.loss.atoms[f"loss/B_coord/{name}"] == pytest.approx(value, rel=1e-5)
    assert set(slots) < lesson.taught


@pytest.mark.req("OT-01", "LOSS-04")
def test_a_box_matched_to_a_polygon_is_taught_the_mean_of_its_corners_projections(
    teach: Teach, coord_ids: list[int]
) -> None:
    said = box("house", 100, 110, 500, 490)
    lesson = teach("{" + entry(1, said) + "}", ROOF)
    slots = sorted(lesson.coordinates(entry(1, said)))
    (ax, ay), (bx, by), (cx, cy), (dx, dy) = projected(said.shape, ROOF.shape)
    bins = [(ax + dx) / 2, (ay + by) / 2, (bx + cx) / 2, (cy + dy) / 2]
    expected = plain_coord_terms(lesson, dict(zip(slots, bins, strict=True)), coord_ids)
    for name, value in expected.items():
        assert lesson.loss.atoms[f"loss/B_coord/{name}"] == pytest.approx(value, rel=1e-5)
    assert [group.is_box for group in lesson.groups] == [False]


@pytest.fixture(scope="module")
def coord_ids(toy_checkpoint: Path) -> list[int]:
    return loaded_from(toy_checkpoint).vocab.ids


# --- Which tokens are taught -------------------------------------------------------------


@pytest.mark.req("LOSS-01", "LOSS-03", "RES-05", "RES-09")
def test_of_an_answer_only_matched_coordinates_are_taught_and_all_of_the_append_but_descriptions(
    teach: Teach,
) -> None:
    lesson = teach("{" + ROOF_SAID + ", " + GHOST_SAID + "}", ROOF, SIGN)
    assert lesson.tail >= lesson.of("}<|im_end|>")
    assert lesson.taught == lesson.coordinates(ROOF_SAID) | (lesson.tail - lesson.of(SIGN.desc))


@pytest.mark.req("LOSS-01", "RES-05")
def test_an_answer_that_missed_nothing_is_taught_its_end_and_its_coordinates(teach: Teach) -> None:
    lesson = teach("{" + ROOF_SAID + "}", ROOF)
    assert lesson.taught == lesson.coordinates(ROOF_SAID) | lesson.of("}<|im_end|>")
    eos = lesson.segment.target.token_ids[-1]
    assert lesson.rows("gradient")[-1, eos] < 0, "the logit of <|im_end|> is pulled up"


@pytest.mark.req("LOSS-03", "LOSS-04", "CHB-01")
@pytest.mark.parametrize("kind", ["poly", "bbox_2d"])
def test_a_false_positive_is_silent(teach: Teach, kind: str) -> None:
    ghost = poly("ghost", 950, 0, 999, 0, 999, 60) if kind == "poly" else box("ghost", 0, 0, 9, 9)
    lesson = teach("{" + entry(1, ghost) + "}", ROOF)
    assert lesson.taught == lesson.tail - lesson.of(ROOF.desc)


@pytest.mark.req("CHB-01", "LOSS-01", "PARSE-05")
@pytest.mark.parametrize("answer", ["a roof and a sign", "{", "{}", ""])
def test_an_answer_without_an_object_is_taught_the_whole_annotation(
    teach: Teach, answer: str
) -> None:
    lesson = teach(answer, ROOF, SIGN)
    everything = set(range(len(lesson.text)))
    assert lesson.taught == everything - lesson.of(ROOF.desc) - lesson.of(SIGN.desc)


@pytest.mark.req("RES-09", "LOSS-01")
def test_descriptions_of_appended_objects_are_taught_when_they_weigh_something(
    teach: Teach,
) -> None:
    answer = "{" + ROOF_SAID + "}"
    silent = teach(answer, ROOF, SIGN)
    lesson = teach(
        answer, ROOF, SIGN, mapping=changed(f"{TOKEN_CE}.rollout_fn_desc_weight", 0.5, ALIGNED)
    )
    assert lesson.taught - silent.taught == lesson.of(SIGN.desc)
    assert lesson.loss.atoms["loss/B_rollout_text/desc_ce"] > 0
    assert "loss/B_rollout_text/desc_ce" not in silent.loss.atoms


@pytest.mark.req("LOSS-01")
def test_structure_of_matched_objects_is_taught_when_it_weighs_something(teach: Teach) -> None:
    answer = "{" + ROOF_SAID + ", " + GHOST_SAID + "}"
    key = f"{TOKEN_CE}.rollout_matched_prefix_struct_weight"
    silent, lesson = (
        teach(answer, ROOF, SIGN, mapping=changed(key, weight, ALIGNED)) for weight in (0.0, 0.5)
    )
    matched = lesson.of("{" + ROOF_SAID) - lesson.of("a house")
    assert lesson.taught - silent.taught == matched - lesson.coordinates(ROOF_SAID)


@pytest.mark.req("LOSS-01", "RES-15")
def test_structure_weighs_more_in_a_sample_that_lost_an_object(teach: Teach) -> None:
    key = f"{TOKEN_CE}.rollout_drop_invalid_struct_ce_multiplier"
    three = '"object_2": {"desc": "torn", "bbox_2d": ' + coords(1, 2, 3) + "}"
    for answer, factor in (
        ("{" + ROOF_SAID + ", " + three + "}", 3.0),
        ("{" + ROOF_SAID + ", " + GHOST_SAID + "}", 1.0),
    ):
        plain, lesson = (
            teach(answer, ROOF, SIGN, mapping=changed(key, weight, ALIGNED)) for weight in (1, 3)
        )
        assert lesson.taught == plain.taught
        end = lesson.pulls[-1] / plain.pulls[-1]
        structure = sorted(
            lesson.tail
            - lesson.of(SIGN.desc)
            - lesson.coordinates(coords(*SIGN.shape.coords))
            - lesson.of("}<|im_end|>")
        )
        assert structure
        ratio = lesson.pulls[structure] / plain.pulls[structure] / end
        assert torch.allclose(ratio, torch.full_like(ratio, factor))


@pytest.mark.req("LOSS-04")
def test_text_gate_presses_on_coordinates_at_taught_text_and_nowhere_else(
    teach: Teach, coord_ids: list[int]
) -> None:
    mapping = changed(f"{COORD_REG}.text_gate_weight", 1.0, ALIGNED)
    answer = "{" + ROOF_SAID + ", " + GHOST_SAID + "}"
    calm = teach(answer, ROOF, SIGN, mapping=mapping)
    offset = len(calm.segment) - len(calm.text) - 1

    def leaking_at(position: int) -> PackLoss:
        logits = calm.logits.clone()
        logits[offset + position, coord_ids] += 20.0
        return teach(answer, ROOF, SIGN, mapping=mapping, logits=logits).loss

    key = "loss/B_coord/text_gate"
    at_structure = min(calm.tail - calm.of(SIGN.desc))
    assert leaking_at(at_structure).atoms[key] > calm.loss.atoms[key] + 0.1
    silent = calm.of("ghost") | calm.of("a house") | calm.of(SIGN.desc)
    for position in silent:
        assert leaking_at(position).total == calm.loss.total
    assert key not in teach(answer, ROOF, SIGN).loss.atoms


# --- Decoded coordinates -----------------------------------------------------------------

BOX_SAID, BOX_TRUE = entry(1, box("a", 610, 600, 890, 890)), SIGN
POLY_SAID = entry(2, poly("b", 5, 0, 200, 0, 200, 200, 0, 195))
POLY_TRUE_BOX = box("table", 0, 0, 200, 200)
BOX_SAID_POLY = entry(3, box("c", 300, 0, 500, 190))
BOX_TRUE_POLY = poly("kite", 300, 0, 500, 0, 500, 200, 300, 200)
MISSED_BOX, MISSED_POLY = box("door", 0, 600, 200, 800), poly("tent", 300, 600, 500, 600, 400, 800)
MIXED = "{" + ", ".join((BOX_SAID, POLY_SAID, BOX_SAID_POLY)) + "}"
TRUTHS = (BOX_TRUE, POLY_TRUE_BOX, BOX_TRUE_POLY, MISSED_BOX, MISSED_POLY)


@pytest.mark.req("RES-10", "LOSS-03", "OT-01")
def test_decoded_coordinates_are_of_boxes_matched_to_boxes_and_of_appended_boxes(
    teach: Teach,
) -> None:
    lesson = teach(MIXED, *TRUTHS, mapping=changed(OBJECTIVE, [BBOX_GEO], ALIGNED))
    assert [(g.matched, g.is_box) for g in lesson.groups] == [
        (True, True),
        (True, False),
        (True, False),
        (False, True),
        (False, False),
    ]
    appended = lesson.coordinates(coords(*MISSED_BOX.shape.coords))
    assert lesson.taught == lesson.coordinates(BOX_SAID) | appended
    assert set(lesson.loss.atoms) == {"loss/B_coord/bbox_smoothl1", "loss/B_coord/bbox_ciou"}


@pytest.mark.req("RES-10", "LOSS-05")
def test_without_bbox_geo_nothing_is_decoded_and_every_slot_is_taught(teach: Teach) -> None:
    lesson = teach(MIXED, *TRUTHS)
    assert set(lesson.loss.atoms) == {
        "loss/B_rollout_text/struct_ce",
        "loss/B_coord/coord_soft_ce",
        "loss/B_coord/coord_w1",
        "loss/B_coord/coord_gate",
    }
    slots = {position for group in lesson.groups for position in group.positions}
    assert slots == {i for i, piece in enumerate(lesson.text) if piece.startswith("<|coord_")}
    assert slots <= lesson.taught
    assert sum(lesson.loss.atoms.values()) == pytest.approx(lesson.loss.total.item(), abs=1e-4)
