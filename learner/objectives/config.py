"""`PipelineConfig`: the declared pipeline of a trainer variant (CFG-08).

    stage2_ab.pipeline            stage2_two_channel, stage2_group_relative
    rollout_matching.pipeline     stage2_rollout_aligned

Every module states every key of its config: only the drop-invalid multiplier has a default.
Imports no torch.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from learner.objectives import DIAGNOSTICS, OBJECTIVES
from learner.objectives.objective import Diagnostic, ModuleEntry, Objective
from shared_contracts.strict_model import Refusal, StrictModel, refuse_all


def _one_of(modules: Sequence[type[ModuleEntry]]) -> Any:
    """The type of an entry, which its `name` selects."""
    if len(modules) == 1:
        return modules[0]
    return Annotated[reduce(or_, modules), Field(discriminator="name")]


if TYPE_CHECKING:
    ObjectiveModule = Objective
    DiagnosticModule = Diagnostic
else:
    ObjectiveModule = _one_of(OBJECTIVES)
    DiagnosticModule = _one_of(DIAGNOSTICS)


class PipelineConfig(StrictModel):
    """The loss modules of the objective, and monitoring modules (section 10)."""

    objective: Annotated[tuple[ObjectiveModule, ...], Field(strict=False)] = Field(
        description="loss modules; each has exactly `name, enabled, weight, channels, config`"
    )
    diagnostics: Annotated[tuple[DiagnosticModule, ...], Field(strict=False)] = Field(
        description="monitoring modules, written like loss modules; `[]`: none"
    )

    @field_validator("objective", "diagnostics")
    @classmethod
    def _each_once(
        cls, modules: tuple[ModuleEntry, ...], info: ValidationInfo
    ) -> tuple[ModuleEntry, ...]:
        if not modules and info.field_name == "objective":
            raise Refusal("the list is empty", "Declare at least one module")
        names = [module.name for module in modules]
        refuse_all(
            Refusal(f"'{name}' is listed already", "List every module once", f"[{index}].name")
            for index, name in enumerate(names)
            if name in names[:index]
        )
        return modules

    def disagreements(self) -> Iterator[Refusal]:
        enabled = [module for module in self.objective if module.enabled]
        for index, module in enumerate(self.objective):
            for fault in module.conflicts(enabled) if module.enabled else ():
                yield Refusal(fault.found, fault.do, f"objective[{index}].{fault.key}")
