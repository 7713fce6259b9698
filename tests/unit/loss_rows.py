"""Rows, logits and pipelines that the tests of the objectives share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from learner.config.pipeline import (
    BboxGeoConfig,
    BboxGeoModule,
    CoordDiagModule,
    CoordRegConfig,
    CoordRegModule,
    ObjectiveModule,
    PipelineConfig,
    TokenCEConfig,
    TokenCEModule,
)
from learner.config.values import EmptySection
from learner.coords import COORD_BINS
from learner.losses.pipeline import PackLoss, Pipeline
from learner.losses.reading import Readings
from learner.losses.supervision import Selection, Supervision
from learner.types import Channel, Role
from tests.unit.plain_losses import Plain

BOTH: tuple[Channel, ...] = ("A", "B")
VOCAB = 1021
# Coordinate tokens anywhere in the vocabulary, bin after bin out of order; the rest is text.
COORD_IDS = [(37 * k + 11) % VOCAB for k in range(COORD_BINS)]
TEXT_IDS = sorted(set(range(VOCAB)) - set(COORD_IDS))

# A loss takes a millisecond and a plain one many, so they are computed of fewer examples.
SOME = settings(max_examples=settings().max_examples // 4)
FEW = settings(max_examples=settings().max_examples // 12)

TOKEN_CE = TokenCEConfig(
    desc_ce_weight=0.5,
    rollout_fn_desc_weight=0.25,
    rollout_matched_prefix_struct_weight=0.75,
    self_context_struct_ce_weight=0.3,
    rollout_drop_invalid_struct_ce_multiplier=2.0,
)
BBOX_GEO = BboxGeoConfig(smoothl1_weight=2.0, ciou_weight=0.5)
COORD_REG = CoordRegConfig(
    coord_ce_weight=0.1,
    soft_ce_weight=0.2,
    w1_weight=0.3,
    coord_gate_weight=0.4,
    text_gate_weight=0.5,
    temperature=0.9,
    target_sigma=2.0,
    target_truncate=8,
)


def token_ce(config: TokenCEConfig = TOKEN_CE, weight: float = 1.5, **entry: Any) -> TokenCEModule:
    keys = {"enabled": True, "channels": BOTH, **entry}
    return TokenCEModule(name="token_ce", weight=weight, config=config, **keys)


def bbox_geo(config: BboxGeoConfig = BBOX_GEO, weight: float = 0.7, **entry: Any) -> BboxGeoModule:
    keys = {"enabled": True, "channels": BOTH, **entry}
    return BboxGeoModule(name="bbox_geo", weight=weight, config=config, **keys)


def coord_reg(
    config: CoordRegConfig = COORD_REG, weight: float = 1.1, **entry: Any
) -> CoordRegModule:
    keys = {"enabled": True, "channels": BOTH, **entry}
    return CoordRegModule(name="coord_reg", weight=weight, config=config, **keys)


def coord_diag(weight: float = 1.0, **entry: Any) -> CoordDiagModule:
    keys = {"enabled": True, "channels": BOTH, **entry}
    return CoordDiagModule(name="coord_diag", weight=weight, config=EmptySection(), **keys)


def declared(
    *modules: ObjectiveModule, diagnostics: Sequence[CoordDiagModule] = ()
) -> PipelineConfig:
    return PipelineConfig(objective=modules, diagnostics=tuple(diagnostics))


EVERYTHING = declared(token_ce(), bbox_geo(), coord_reg(), diagnostics=[coord_diag()])
# All but CIoU, whose alpha is a constant for the gradient and whose slope jumps at points.
SMOOTH = declared(
    token_ce(), bbox_geo(BboxGeoConfig(smoothl1_weight=2.0, ciou_weight=0.0)), coord_reg()
)


@dataclass(frozen=True)
class Case:
    """A pipeline asked about one row in one channel."""

    config: PipelineConfig
    row: Supervision
    channel: Channel

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(self.config, COORD_IDS)

    @property
    def plain(self) -> Plain:
        return Plain(self.config, self.channel, self.row, COORD_IDS)

    def select(self) -> Selection:
        return self.pipeline.select(self.row, self.channel)

    def loss(self, logits: Sequence[Tensor], selection: Selection | None = None) -> PackLoss:
        """Of one forward's logits, or of the first and last of several."""
        chosen = self.select() if selection is None else selection
        reader = self.pipeline.reader(chosen)
        anchor = reader.anchor(logits[0])
        final = reader.final(logits[-1]) if len(logits) > 1 else anchor
        return self.pipeline(Readings(anchor, final), chosen, self.channel)

    def gradients(
        self, logits: Sequence[Tensor], selection: Selection | None = None
    ) -> list[Tensor]:
        """Of the total, with respect to each of the forwards' logits; of their type."""
        leaves = [forward.detach().clone().requires_grad_() for forward in logits]
        self.loss(leaves, selection).total.backward()
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


def make_row(
    roles: Sequence[Role],
    dropped: Sequence[bool],
    slots: Sequence[tuple[int, float]],
    boxes: Sequence[Sequence[int]],
) -> Supervision:
    """slots: (position, bin). Text has ids of text, coordinates and false positives any."""
    draw = torch.Generator().manual_seed(len(roles))
    ids = torch.tensor(TEXT_IDS)[torch.randint(len(TEXT_IDS), (len(roles),), generator=draw)]
    for position, role in enumerate(roles):
        if role == Role.COORD or (role == Role.FALSE_POSITIVE and position % 2):
            ids[position] = COORD_IDS[(position * 97) % COORD_BINS]
    return Supervision(
        input_ids=ids,
        roles=torch.tensor([int(role) for role in roles], dtype=torch.int8),
        has_dropped=torch.tensor(dropped, dtype=torch.bool),
        coord_positions=torch.tensor([position for position, _ in slots], dtype=torch.long),
        coord_bins=torch.tensor([target for _, target in slots], dtype=torch.float32),
        boxes=torch.tensor(boxes, dtype=torch.long).view(-1, 4),
    )


# One sample of each kind of answer: prompt, a matched box, a false positive, an appended polygon
# (its bins between bins, its coordinates in no box), a description with a coordinate in it.
_SAMPLE = [
    *[Role.PROMPT, Role.PROMPT, Role.MATCHED_STRUCTURE, Role.MATCHED_DESC, *[Role.COORD] * 4],
    *[Role.FALSE_POSITIVE, Role.FALSE_POSITIVE, Role.APPENDED_STRUCTURE, Role.APPENDED_DESC],
    *[Role.COORD, Role.APPENDED_DESC, *[Role.COORD] * 6, Role.CLOSURE, Role.CLOSURE],
]
_BOX, _POLYGON = range(4, 8), range(14, 20)


def answer_row(samples: int = 2) -> Supervision:
    """Packed samples with every role; the first one lost an invalid object."""
    size = len(_SAMPLE)
    slots: list[tuple[int, float]] = []
    for start in range(0, samples * size, size):
        slots += list(zip([start + p for p in _BOX], [100.0, 200, 500, 990], strict=True))
        bins = [0.0, 300.25, 301.5, 640.75, 999.0, 7.5]
        slots += list(zip([start + p for p in _POLYGON], bins, strict=True))
    dropped = [position < size for position in range(samples * size)]
    boxes = [list(range(start, start + 4)) for start in range(0, samples * 10, 10)]
    return make_row(_SAMPLE * samples, dropped, slots, boxes)


def annotation_row() -> Supervision:
    """What channel A sees: a sample whose two boxes are all ground truth."""
    one = [Role.APPENDED_STRUCTURE, Role.APPENDED_DESC, *[Role.COORD] * 4]
    roles = [Role.PROMPT, *one, *one, Role.CLOSURE, Role.CLOSURE]
    bins = [10.0, 20, 500, 999, 0, 300, 301, 302]
    slots = list(zip([3, 4, 5, 6, 9, 10, 11, 12], bins, strict=True))
    return make_row(roles, [False] * len(roles), slots, [[0, 1, 2, 3], [4, 5, 6, 7]])


def logits_for(row: Supervision, seed: int, scale: float = 3.0, peak: float = 6.0) -> Tensor:
    """(L, V) float64: noise of `scale`, and in each row one column that stands `peak` above.

    Text is as likely as the coordinates together, in spite of their number.
    """
    draw = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(len(row.roles), VOCAB, generator=draw, dtype=torch.float64)
    logits[:, TEXT_IDS] += 4
    columns = torch.randint(VOCAB, (len(row.roles), 1), generator=draw)
    return logits.scatter_add(1, columns, torch.full_like(columns, 1, dtype=torch.float64) * peak)


# (row, channel, forwards) of every kind of pack.
EXAMPLES: list[tuple[Supervision, Channel, int]] = [
    (answer_row(), "B", 1),
    (annotation_row(), "A", 1),
    (annotation_row(), "A", 2),
]


@st.composite
def rows(draw: st.DrawFn, channel: Channel) -> Supervision:
    """Roles in any order, any part of the coordinates taught, any part of those in boxes."""
    in_a = [Role.APPENDED_STRUCTURE, Role.APPENDED_DESC, Role.COORD, Role.CLOSURE]
    known = in_a if channel == "A" else [role for role in Role if role != Role.PROMPT]
    kinds = draw(st.sets(st.sampled_from(known), min_size=1))
    tail = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=14))
    roles = [Role.PROMPT, *tail]
    dropped = [channel == "B" and draw(st.booleans()) for _ in roles]
    coords = [p for p, role in enumerate(roles) if role == Role.COORD]
    taught = [p for p in coords if draw(st.integers(0, 4))]
    # Sixteenths of bins are exact in float32, also where a target is cut off.
    bins = [draw(st.integers(0, 999 * 16)) / 16 for _ in taught]
    order = draw(st.permutations(range(len(taught))))
    boxes = [order[i : i + 4] for i in range(0, len(order) - 3, 4)]
    kept = boxes[: draw(st.integers(0, len(boxes)))]
    return make_row(roles, dropped, list(zip(taught, bins, strict=True)), kept)


WEIGHTS = st.one_of(st.just(0.0), st.floats(0.01, 4.0))
_ENTRIES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "enabled": st.integers(0, 7).map(bool),
        "weight": WEIGHTS,
        "channels": st.sampled_from([BOTH, BOTH, BOTH, ("A",), ("B",)]),
    }
)


@st.composite
def configs(draw: st.DrawFn) -> PipelineConfig:
    """Any of the modules in any order, with any weights."""
    ce = TokenCEConfig(
        desc_ce_weight=draw(WEIGHTS),
        rollout_fn_desc_weight=draw(WEIGHTS),
        rollout_matched_prefix_struct_weight=draw(WEIGHTS),
        self_context_struct_ce_weight=draw(WEIGHTS),
        rollout_drop_invalid_struct_ce_multiplier=draw(st.floats(1, 4)),
    )
    text = token_ce(ce, **draw(_ENTRIES))
    box = BboxGeoConfig(smoothl1_weight=draw(WEIGHTS), ciou_weight=draw(WEIGHTS))
    geometry = bbox_geo(box, **draw(_ENTRIES))
    has_text = draw(st.booleans())
    gated = has_text and text.enabled
    reg = CoordRegConfig(
        coord_ce_weight=draw(WEIGHTS),
        soft_ce_weight=draw(WEIGHTS),
        w1_weight=draw(WEIGHTS),
        coord_gate_weight=draw(WEIGHTS),
        text_gate_weight=draw(WEIGHTS) if gated else 0.0,
        temperature=draw(st.one_of(st.just(1.0), st.floats(0.25, 4.0))),
        target_sigma=draw(st.floats(0.01, 50.0)),
        target_truncate=draw(st.one_of(st.none(), st.integers(1, 40))),
    )
    entry = draw(_ENTRIES)
    regression = coord_reg(reg, **(entry | {"channels": text.channels} if gated else entry))
    modules: list[ObjectiveModule] = [geometry, regression, *([text] if has_text else [])]
    return declared(*draw(st.permutations(modules)), diagnostics=[coord_diag()])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    channel = draw(st.sampled_from(BOTH))
    return Case(draw(configs()), draw(rows(channel)), channel)


@st.composite
def forwards(draw: st.DrawFn, case: Case) -> list[Tensor]:
    """Logits of one forward, or of the first and last of several in channel A."""
    count = draw(st.integers(1, 2)) if case.channel == "A" else 1
    scale, peak = draw(st.floats(0.5, 4.0)), draw(st.floats(0.0, 20.0))
    seeds = [draw(st.integers(0, 10**6)) for _ in range(count)]
    return [logits_for(case.row, seed, scale, peak) for seed in seeds]
