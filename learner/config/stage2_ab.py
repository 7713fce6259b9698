"""`stage2_ab`: the schedule of the two channels and the declared objective (CFG-08).

Every module states every key of its config: there are no defaults to drift, but the
drop-invalid multiplier's.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from learner.config.values import Weight, WrittenDecimal
from learner.types import Channel
from shared_contracts.strict_model import Refusal, StrictModel


class ScheduleConfig(StrictModel):
    b_ratio: Annotated[WrittenDecimal, Field(ge=0, le=1)] = Field(
        description="share of the optimizer steps that are channel B, as the decimal written"
    )


class TokenCEConfig(StrictModel):
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


class BboxGeoConfig(StrictModel):
    smoothl1_weight: Weight = Field(description="of SmoothL1 on the decoded coordinates")
    ciou_weight: Weight = Field(description="of CIoU on the decoded boxes")


class CoordRegConfig(StrictModel):
    coord_ce_weight: Weight = Field(description="of hard CE on the bin")
    soft_ce_weight: Weight = Field(description="of CE against a Gaussian around the bin")
    w1_weight: Weight = Field(description="of the W1 distance to that Gaussian")
    coord_gate_weight: Weight = Field(description="of the non-coordinate mass at coordinate slots")
    text_gate_weight: Weight = Field(description="of the coordinate mass at text positions")
    temperature: float = Field(gt=0, description="divides the coordinate logits first")
    target_sigma: float = Field(gt=0, description="width of the Gaussian in bins")
    target_truncate: int | None = Field(
        ge=1, description="bins beyond which the Gaussian is zero; null: never"
    )


class _Module(StrictModel):
    """What every entry of the pipeline states besides its name and config."""

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


class TokenCEModule(_Module):
    name: Literal["token_ce"] = Field(description="cross-entropy of text tokens")
    config: TokenCEConfig = Field(description="all its keys")


class BboxGeoModule(_Module):
    name: Literal["bbox_geo"] = Field(description="geometry of boxes decoded by expectation")
    config: BboxGeoConfig = Field(description="all its keys")


class CoordRegModule(_Module):
    name: Literal["coord_reg"] = Field(description="distributions at coordinate slots")
    config: CoordRegConfig = Field(description="all its keys")


ObjectiveModule = Annotated[
    TokenCEModule | BboxGeoModule | CoordRegModule, Field(discriminator="name")
]


class PipelineConfig(StrictModel):
    objective: Annotated[tuple[ObjectiveModule, ...], Field(strict=False)] = Field(
        description="loss modules; each has exactly `name, enabled, weight, channels, config`"
    )
    diagnostics: tuple[()] = Field(description="monitoring modules; none is served yet: `[]`")

    @field_validator("objective")
    @classmethod
    def _each_once(cls, modules: tuple[ObjectiveModule, ...]) -> tuple[ObjectiveModule, ...]:
        if not modules:
            raise Refusal("the list is empty", "Declare at least one module")
        names = [module.name for module in modules]
        for index, name in enumerate(names):
            if name in names[:index]:
                found = f"'{name}' is listed already"
                raise Refusal(found, "List every module once", f"[{index}].name")
        return modules

    @field_validator("diagnostics", mode="before")
    @classmethod
    def _none_is_served(cls, entries: Any) -> Any:
        if isinstance(entries, list) and not entries:
            return ()
        if entries != ():
            raise Refusal("no diagnostics module is served yet", "Write `diagnostics: []`")
        return entries


class Stage2ABConfig(StrictModel):
    schedule: ScheduleConfig = Field(description="which steps are channel B")
    n_softctx_iter: int = Field(
        default=1, ge=1, description="forwards of channel A; 1 is teacher forcing"
    )
    pipeline: PipelineConfig = Field(description="the objective and diagnostics modules")

    @field_validator("n_softctx_iter")
    @classmethod
    def _one_is_served(cls, iterations: int) -> int:
        if iterations > 1:
            raise Refusal(f"{iterations} iterations are not served yet", "Set it to 1")
        return iterations

    @model_validator(mode="after")
    def _text_gate_has_text(self) -> "Stage2ABConfig":
        """`text_gate` runs on the text that `token_ce` supervises."""
        modules = [module for module in self.pipeline.objective if module.enabled]
        text = {c for module in modules if module.name == "token_ce" for c in module.channels}
        for module in modules:
            if module.name != "coord_reg" or module.config.text_gate_weight == 0:
                continue
            if lost := sorted(set(module.channels) - text):
                raise Refusal(
                    f"text_gate_weight of coord_reg is {module.config.text_gate_weight} in channel "
                    f"{lost[0]}, where no token_ce supervises text",
                    "Set it to 0, or list the channel in token_ce",
                    "pipeline.objective",
                )
        return self

    @model_validator(mode="after")
    def _every_channel_learns(self) -> "Stage2ABConfig":
        running: list[Channel] = []
        if self.schedule.b_ratio < 1:
            running.append("A")
        if self.schedule.b_ratio > 0:
            running.append("B")
        for channel in running:
            if not any(
                module.enabled and module.weight > 0 and channel in module.channels
                for module in self.pipeline.objective
            ):
                raise Refusal(
                    f"channel {channel} runs at b_ratio {self.schedule.b_ratio}, but no enabled "
                    "module of positive weight lists it",
                    f"Add {channel} to the channels of a module",
                    "pipeline.objective",
                )
        return self
