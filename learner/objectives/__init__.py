"""The registries of objectives (section 10 of the contract) and of trainer variants.

The types of the config and the declared metrics follow from them. Imports no torch.
"""

from typing import NamedTuple

from learner.objectives.bbox_geo import BboxGeoModule
from learner.objectives.coord_diag import CoordDiagModule
from learner.objectives.coord_reg import CoordRegModule
from learner.objectives.duplicate_ul import DuplicateULModule
from learner.objectives.objective import Diagnostic, Objective
from learner.objectives.policy_gradient import PolicyGradientModule
from learner.objectives.token_ce import TokenCEModule

OBJECTIVES: list[type[Objective]] = [
    TokenCEModule,
    BboxGeoModule,
    CoordRegModule,
    DuplicateULModule,
    PolicyGradientModule,
]
DIAGNOSTICS: list[type[Diagnostic]] = [
    CoordDiagModule,
]


class Variant(NamedTuple):
    """A value of `custom.trainer_variant`.

    recipe: class of its training recipe, imported when a run starts.

    meaning: a line for the reference. polygons: whether they are trained and predicted beside boxes
    (RES-02).
    sections: of the config, which it requires and other variants refuse. `stage2_ab` has the
    schedule of the channels and the objective; without it channel B runs alone, and
    `rollout_matching.pipeline` has the objective. With `group_relative` several answers to a sample
    are compared in channel B (GROUP-01).
    """

    recipe: str
    meaning: str
    sections: tuple[str, ...]
    polygons: bool = False


_RECIPE = "learner.training.channels:Recipe"

VARIANTS = {
    "stage2_two_channel": Variant(_RECIPE, "channels A and B, boxes", ("stage2_ab",)),
    "stage2_rollout_aligned": Variant(
        _RECIPE, "channel B alone, boxes and polygons", ("pipeline",), polygons=True
    ),
    "stage2_group_relative": Variant(
        _RECIPE,
        "channels A and B, boxes; B by rewards of several answers to a sample",
        ("stage2_ab", "group_relative"),
    ),
}
