"""The registry of objectives (section 10 of the contract).

An objective is one file with its config, its terms and its metrics, and one line here. The types
of the config and the declared metrics follow from these lists. Imports no torch.
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
