"""`tuner`: which weights are trained."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from shared_contracts.strict_model import StrictModel


class FullTuner(StrictModel):
    train_type: Literal["full"] = Field(default="full", description="all weights are trained")


class LoraTuner(StrictModel):
    train_type: Literal["lora"] = Field(description="adapters are trained")
    lora_rank: int = Field(ge=1, description="of the adapters")
    lora_alpha: int = Field(ge=1, description="adapters are scaled by `lora_alpha / lora_rank`")
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="before the adapters")
    use_dora: bool = Field(default=False, description="DoRA")
    target_modules: Literal["all-linear"] | list[str] = Field(
        default="all-linear", description="module names in peft's sense, or `all-linear`"
    )


def _full_by_default(value: Any) -> Any:
    if isinstance(value, dict) and "train_type" not in value:
        return {"train_type": "full", **value}
    return value


TunerConfig = Annotated[
    Annotated[FullTuner | LoraTuner, Field(discriminator="train_type")],
    BeforeValidator(_full_by_default),
]
