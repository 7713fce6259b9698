"""Objectives (section 10 of the contract): small typed units, and the registry of them.

An objective is one file with its config, its terms and its metrics, and one line here. The config
and the metrics are made from these lists when they are imported. Imports no torch.
"""

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
