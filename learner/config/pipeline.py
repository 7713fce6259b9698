"""A declared pipeline: loss modules and monitors of either trainer variant (CFG-08).

    stage2_ab.pipeline            stage2_two_channel
    rollout_matching.pipeline     stage2_rollout_aligned

Every module states every key of its config: there are no defaults to drift, but the
drop-invalid multiplier's.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from learner.config.values import EmptySection, Weight, refuse_all
from learner.types import Channel
from shared_contracts.strict_model import Refusal, StrictModel


class TokenCEConfig(StrictModel):
    """What the tokens of a target weigh in `token_ce`, by their role (LOSS-01)."""

    desc_ce_weight: Weight = Field(description="channel A: weight of description tokens")
    rollout_fn_desc_weight: Weight = Field(
        description="channel B: weight of the description tokens of appended objects"
    )
    rollout_matched_prefix_struct_weight: Weight = Field(
        description="channel B: weight of the structure tokens of matched objects"
    )
    self_context_struct_ce_weight: Weight = Field(
        description="channel A: weight of structure tokens in the last of several iterations"
    )
    rollout_drop_invalid_struct_ce_multiplier: float = Field(
        default=1.0,
        ge=1,
        le=4,
        description="channel B: scales structure weights of samples with dropped objects",
    )

    @property
    def teaches(self) -> bool:
        """The structure of what is appended always has weight 1."""
        return True


class BboxGeoConfig(StrictModel):
    smoothl1_weight: Weight = Field(description="of SmoothL1 on the decoded coordinates")
    ciou_weight: Weight = Field(description="of CIoU on the decoded boxes")

    @property
    def teaches(self) -> bool:
        return self.smoothl1_weight + self.ciou_weight > 0


class CoordRegConfig(StrictModel):
    coord_ce_weight: Weight = Field(description="of hard CE on the bin")
    soft_ce_weight: Weight = Field(description="of CE against a Gaussian around the bin")
    w1_weight: Weight = Field(description="of the W1 distance to that Gaussian")
    coord_gate_weight: Weight = Field(description="of the non-coordinate mass at coordinate slots")
    text_gate_weight: Weight = Field(description="of the coordinate mass at text positions")
    temperature: float = Field(gt=0, description="divides the coordinate logits first")
    target_sigma: float = Field(ge=1e-3, description="width of the Gaussian in bins")
    target_truncate: int | None = Field(
        ge=1, description="bins beyond which the Gaussian is zero; null: never"
    )

    @property
    def teaches(self) -> bool:
        slots = self.coord_ce_weight + self.soft_ce_weight + self.w1_weight + self.coord_gate_weight
        return slots + self.text_gate_weight > 0


class _Module(StrictModel):
    """What every entry of a pipeline states besides its config; each module narrows the name."""

    name: str
    enabled: bool = Field(description="false: the module is left out")
    weight: Weight = Field(description="of the module's loss in the total")
    channels: Annotated[tuple[Channel, ...], Field(strict=False)] = Field(
        description="channels it runs in, a subset of [A, B]"
    )

    @field_validator("channels")
    @classmethod
    def _each_once(cls, channels: tuple[Channel, ...]) -> tuple[Channel, ...]:
        if len(set(channels)) < len(channels):
            raise Refusal("a channel is listed twice", "List each channel once")
        return channels

    def counts_in(self, channel: Channel) -> bool:
        """True where the module runs in the channel and its weight is not zero."""
        return self.enabled and self.weight > 0 and channel in self.channels


class TokenCEModule(_Module):
    name: Literal["token_ce"] = Field(description="cross-entropy of text tokens")
    config: TokenCEConfig = Field(description="all its keys")


class BboxGeoModule(_Module):
    name: Literal["bbox_geo"] = Field(description="geometry of boxes decoded by expectation")
    config: BboxGeoConfig = Field(description="all its keys")


class CoordRegModule(_Module):
    name: Literal["coord_reg"] = Field(description="distributions at coordinate slots")
    config: CoordRegConfig = Field(description="all its keys")


class CoordDiagModule(_Module):
    name: Literal["coord_diag"] = Field(
        description="coordinate distributions against the ground truth; monitors, no loss"
    )
    config: EmptySection = Field(description="no keys: `{}`")


ObjectiveModule = Annotated[
    TokenCEModule | BboxGeoModule | CoordRegModule, Field(discriminator="name")
]


class PipelineConfig(StrictModel):
    """The objective, module by module, and what is only looked at (section 10)."""

    objective: Annotated[tuple[ObjectiveModule, ...], Field(strict=False)] = Field(
        description="loss modules; each has exactly `name, enabled, weight, channels, config`"
    )
    diagnostics: Annotated[tuple[CoordDiagModule, ...], Field(strict=False)] = Field(
        description="monitoring modules, written like loss modules; `[]`: none"
    )

    @field_validator("objective")
    @classmethod
    def _something_is_declared(
        cls, modules: tuple[ObjectiveModule, ...]
    ) -> tuple[ObjectiveModule, ...]:
        if not modules:
            raise Refusal("the list is empty", "Declare at least one module")
        refuse_all(_listed_twice(modules))
        return modules

    @field_validator("diagnostics")
    @classmethod
    def _each_once(cls, modules: tuple[CoordDiagModule, ...]) -> tuple[CoordDiagModule, ...]:
        refuse_all(_listed_twice(modules))
        return modules

    @model_validator(mode="after")
    def _text_gates_have_text(self) -> "PipelineConfig":
        refuse_all(self._gates_without_text())
        return self

    def _gates_without_text(self) -> Iterator[Refusal]:
        """`text_gate` runs on the text that `token_ce` supervises (LOSS-04)."""
        modules = [m for m in self.objective if m.enabled]
        text = {c for m in modules if m.name == "token_ce" for c in m.channels}
        for index, module in enumerate(self.objective):
            if module.name != "coord_reg" or not module.enabled:
                continue
            weight = module.config.text_gate_weight
            if weight > 0 and (lost := sorted(set(module.channels) - text)):
                yield Refusal(
                    f"{weight} in channel {lost[0]}, where no token_ce supervises text",
                    "Set it to 0, or list the channel in token_ce",
                    f"objective[{index}].config.text_gate_weight",
                )


def _listed_twice(modules: Sequence[ObjectiveModule | CoordDiagModule]) -> Iterator[Refusal]:
    names = [module.name for module in modules]
    for index, name in enumerate(names):
        if name in names[:index]:
            found = f"'{name}' is listed already"
            yield Refusal(found, "List every module once", f"[{index}].name")
