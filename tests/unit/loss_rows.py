"""Rows, logits and pipelines that the tests of the objectives share."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from learner.objectives.bbox_geo import BboxGeoConfig, BboxGeoModule
from learner.objectives.config import ObjectiveModule, PipelineConfig
from learner.objectives.coord_diag import CoordDiagModule
from learner.objectives.coord_reg import CoordRegConfig, CoordRegModule
from learner.objectives.duplicate_ul import DuplicateULConfig, DuplicateULModule
from learner.objectives.logit_stats import ForwardStats, Selection, Supervision
from learner.objectives.pipeline import PackLoss, Pipeline
from learner.objectives.token_ce import TokenCEConfig, TokenCEModule
from learner.stages.tokens import COORD_BINS
from learner.types import Channel, Role
from shared_contracts.strict_model import EmptySection, StrictModel
from tests.unit.packed_logits import as_given
from tests.unit.plain_losses import Plain

BOTH: tuple[Channel, ...] = ("A", "B")
VOCAB = 1021
# Coordinate tokens anywhere in the vocabulary, bin after bin out of order; the rest is text.
COORD_IDS = [(37 * k + 11) % VOCAB for k in range(COORD_BINS)]
TEXT_IDS = sorted(set(range(VOCAB)) - set(COORD_IDS))

# A plain loss takes 0.1 s, so that a property computes it of fewer examples than the profile has.
FEW = settings(max_examples=max(settings().max_examples // 5, 5))

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


def duplicate_ul(weight: float = 0.6, radius: int | None = None, **entry: Any) -> DuplicateULModule:
    keys = {"enabled": True, "channels": ("B",), **entry}
    config = DuplicateULConfig(radius=radius)
    return DuplicateULModule(name="duplicate_ul", weight=weight, config=config, **keys)


def coord_diag(weight: float = 1.0, **entry: Any) -> CoordDiagModule:
    keys = {"enabled": True, "channels": BOTH, **entry}
    return CoordDiagModule(name="coord_diag", weight=weight, config=EmptySection(), **keys)


def declared(
    *modules: ObjectiveModule, diagnostics: Sequence[CoordDiagModule] = ()
) -> PipelineConfig:
    return PipelineConfig(objective=modules, diagnostics=tuple(diagnostics))


EVERYTHING = declared(
    token_ce(), bbox_geo(), coord_reg(), duplicate_ul(radius=20), diagnostics=[coord_diag()]
)
# All but CIoU, whose alpha is a constant for the gradient and whose slope jumps at points.
SMOOTH = declared(
    token_ce(),
    bbox_geo(BboxGeoConfig(smoothl1_weight=2.0, ciou_weight=0.0)),
    coord_reg(),
    duplicate_ul(),
)


@dataclass(frozen=True)
class Case:
    """A pipeline, one row and one channel."""

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
        return self.pipeline.select(self.row.to(torch.device("cpu")), self.channel)

    def loss(self, logits: Sequence[Tensor], selection: Selection | None = None) -> PackLoss:
        """The loss by the logits of one forward, or of the first and last of several."""
        chosen = self.select() if selection is None else selection
        reader = self.pipeline.reader(chosen)
        anchor = reader.anchor(as_given(logits[0]))
        final = reader.final(as_given(logits[-1])) if len(logits) > 1 else anchor
        return self.pipeline(ForwardStats(anchor, final), chosen, self.channel)

    def gradients(
        self, logits: Sequence[Tensor], selection: Selection | None = None
    ) -> list[Tensor]:
        """Gradients of the total for the logits of each forward, in their dtype."""
        leaves = [forward.detach().clone().requires_grad_() for forward in logits]
        self.loss(leaves, selection).total.backward()
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


def make_row(
    roles: Sequence[Role],
    dropped: Sequence[bool],
    slots: Sequence[tuple[int, float]],
    boxes: Sequence[Sequence[int]],
    departing: Sequence[int] = (),
) -> Supervision:
    """slots: (position, bin). Text has ids of text, coordinates and false positives any.

    departing: positions where a duplicate departs, with some other token.
    """
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
        departures=torch.tensor(
            [[p, (int(ids[p]) + 1 + 5 * p) % VOCAB] for p in departing], dtype=torch.long
        ).view(-1, 2),
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
    # In the place of a coordinate, of a false positive, of structure and of the closure.
    departing = [start + p for start in range(0, samples * size, size) for p in (5, 9, 10, 20)]
    return make_row(_SAMPLE * samples, dropped, slots, boxes, departing)


def annotation_row() -> Supervision:
    """A row of channel A: one sample with two ground-truth boxes."""
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


def random_row(draw: Random, channel: Channel) -> Supervision:
    """Roles in any order, any part of the coordinates taught, any part of those in boxes."""
    in_a = [Role.APPENDED_STRUCTURE, Role.APPENDED_DESC, Role.COORD, Role.CLOSURE]
    known = in_a if channel == "A" else [role for role in Role if role != Role.PROMPT]
    kinds = draw.sample(known, draw.randint(1, len(known)))
    kinds += [Role.COORD] * draw.choice([0, len(kinds)])
    roles = [Role.PROMPT, *draw.choices(kinds, k=draw.randint(1, 20))]
    dropped = [channel == "B" and draw.random() < 0.5 for _ in roles]
    coords = [p for p, role in enumerate(roles) if role == Role.COORD]
    taught = [p for p in coords if draw.random() < 0.8]
    # Sixteenths of bins are exact in float32, also where a target is cut off.
    bins = [draw.randint(0, 999 * 16) / 16 for _ in taught]
    order = draw.sample(range(len(taught)), len(taught))
    boxes = [order[i : i + 4] for i in range(0, len(order) - 3, 4)]
    kept = boxes[: draw.choice([0, 1, len(boxes), len(boxes)])]
    departing = [p for p in range(1, len(roles)) if channel == "B" and draw.random() < 0.2]
    return make_row(roles, dropped, list(zip(taught, bins, strict=True)), kept, departing)


def random_weights(draw: Random, config: type[StrictModel]) -> dict[str, float]:
    """Draw each key of a module's config that is a weight; one in four is 0."""
    keys = [key for key in config.model_fields if key.endswith("_weight")]
    return {key: draw.choice([0.0, 1.0, 1.0, 1.0]) * draw.uniform(0.01, 4.0) for key in keys}


def random_entry(draw: Random) -> dict[str, Any]:
    """Draw an entry of a module without its config; most count in both channels."""
    return {
        "enabled": draw.random() < 0.9,
        "weight": draw.choice([0.0, *[1.0] * 7]) * draw.uniform(0.01, 4.0),
        "channels": draw.choice([BOTH, BOTH, BOTH, BOTH, ("A",), ("B",)]),
    }


def random_config(draw: Random) -> PipelineConfig:
    """Any of the modules in any order, with any weights."""
    multiplier = {"rollout_drop_invalid_struct_ce_multiplier": draw.uniform(1, 4)}
    ce = TokenCEConfig(**random_weights(draw, TokenCEConfig), **multiplier)
    text = token_ce(ce, **random_entry(draw))
    geometry = bbox_geo(BboxGeoConfig(**random_weights(draw, BboxGeoConfig)), **random_entry(draw))
    gated = text.enabled and draw.random() < 0.9
    shape = {
        "temperature": draw.choice([1.0, draw.uniform(0.25, 4.0)]),
        "target_sigma": draw.choice([draw.uniform(0.01, 1.0), draw.uniform(1.0, 50.0)]),
    }
    truncate = draw.choice([None, draw.randint(1, 40)])
    reg = CoordRegConfig(target_truncate=truncate, **shape, **random_weights(draw, CoordRegConfig))
    entry = random_entry(draw)
    if gated:
        entry["channels"] = text.channels
    else:
        reg = reg.model_copy(update={"text_gate_weight": 0.0})
    modules: list[ObjectiveModule] = [geometry, coord_reg(reg, **entry)]
    modules += [text] if gated or draw.random() < 0.5 else []
    radius = draw.choice([None, None, 0, draw.randint(1, 40), 999])
    modules += [duplicate_ul(radius=radius, **{**random_entry(draw), "channels": ("B",)})]
    return declared(*draw.sample(modules, len(modules)), diagnostics=[coord_diag()])


def random_forwards(draw: Random, case: Case) -> list[Tensor]:
    """Logits of one forward, or of the first and last of several in channel A."""
    count = draw.randint(1, 2) if case.channel == "A" else 1
    scale, peak = draw.uniform(0.5, 4.0), draw.uniform(0.0, 20.0)
    return [logits_for(case.row, draw.randrange(10**6), scale, peak) for _ in range(count)]


def random_case(seed: int) -> tuple[Case, list[Tensor]]:
    """A pipeline, a row, and its logits. From a seed, so that few examples are unlike enough."""
    draw = Random(seed)
    channel = draw.choice(BOTH)
    case = Case(random_config(draw), random_row(draw, channel), channel)
    return case, random_forwards(draw, case)


CASES = st.builds(random_case, st.integers(0, 2**32))
