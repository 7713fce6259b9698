"""The whole of a training YAML, as types (CFG-02). Imports no torch.

These models alone own the shape: a key that is not a field here is refused. Sections of
their own are in `training.py`, `stage2_ab.py` and `rollout_matching.py`; what the rollout
server shares is in `shared_contracts.rollout_config`.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from learner.config.rollout_matching import MatchingConfig, RolloutMatchingConfig
from learner.config.stage2_ab import (
    BboxGeoConfig,
    CoordRegConfig,
    ObjectiveModule,
    Stage2ABConfig,
    TokenCEConfig,
)
from learner.config.training import TrainingConfig
from learner.config.values import AbsolutePath
from learner.types import FieldOrder
from shared_contracts.strict_model import Refusal, StrictModel

__all__ = [
    "BboxGeoConfig",
    "Config",
    "CoordRegConfig",
    "CustomConfig",
    "DataConfig",
    "MatchingConfig",
    "ModelConfig",
    "ObjectiveModule",
    "RolloutMatchingConfig",
    "Stage2ABConfig",
    "TemplateConfig",
    "TokenCEConfig",
    "TrainingConfig",
    "TunerConfig",
]


class ModelConfig(StrictModel):
    model: AbsolutePath = Field(description="folder of the checkpoint to start from")
    torch_dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="what the forward computes in; trained weights are float32"
    )
    attn_implementation: Literal["sdpa", "eager"] = Field(
        default="sdpa", description="transformers' name"
    )
    gradient_checkpointing: bool = Field(
        default=False, description="recompute activations to save memory"
    )


class TemplateConfig(StrictModel):
    system: str | None = Field(default=None, description="system message; null: none")
    prompt: str = Field(min_length=1, description="the user's instruction, put after the image")


class DataConfig(StrictModel):
    train_jsonl: AbsolutePath = Field(description="samples to train on")
    val_jsonl: AbsolutePath | None = Field(default=None, description="samples to evaluate on")
    shuffle: bool = Field(default=True, description="new order in every epoch, by the seed")


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


TunerConfig = Annotated[FullTuner | LoraTuner, Field(discriminator="train_type")]


def _null_is_empty(value: Any) -> Any:
    return {} if value is None else value


class CustomConfig(StrictModel):
    trainer_variant: Literal["stage2_two_channel"] = Field(description="which trainer runs")
    object_field_order: FieldOrder = Field(
        default="desc_first", description="order of the fields inside every written object"
    )
    extra: Annotated[dict[str, Any], BeforeValidator(_null_is_empty)] = Field(
        default={}, description="free: nothing here reads it, tools of yours may"
    )


class EmptySection(StrictModel):
    """A section of the contract without keys yet."""


Empty = Annotated[EmptySection, BeforeValidator(_null_is_empty)]


class Config(StrictModel):
    model: ModelConfig = Field(description="the checkpoint and how it is loaded")
    quantization: Empty = Field(default=EmptySection(), description="no keys yet")
    template: TemplateConfig = Field(description="the prompt")
    data: DataConfig = Field(description="the samples")
    tuner: Annotated[TunerConfig, BeforeValidator(_full_by_default)] = Field(
        default=FullTuner(), description="which weights are trained"
    )
    training: TrainingConfig = Field(description="optimizer, steps, packing, saving, logging")
    rlhf: Empty = Field(default=EmptySection(), description="no keys yet")
    custom: CustomConfig = Field(description="the trainer's variant")
    debug: Empty = Field(default=EmptySection(), description="no keys yet")
    experiment: Empty = Field(default=EmptySection(), description="no keys yet")
    stage2_ab: Stage2ABConfig = Field(description="schedule and objective of the two channels")
    rollout_matching: RolloutMatchingConfig = Field(
        description="how answers are generated and matched; stage2_two_channel needs it"
    )
    deepspeed: Empty = Field(default=EmptySection(), description="no keys yet")
    global_max_length: int = Field(ge=2, description="tokens of one pack: the packing capacity")

    @model_validator(mode="after")
    def _sections_agree(self) -> "Config":
        if self.training.eval_strategy == "steps" and self.data.val_jsonl is None:
            raise Refusal(
                "is missing with training.eval_strategy: steps",
                "Give a file to evaluate on, or set training.eval_strategy to no",
                "data.val_jsonl",
            )
        if self.rollout_matching.max_new_tokens >= self.global_max_length:
            raise Refusal(
                f"{self.rollout_matching.max_new_tokens} leaves no room for a prompt in "
                f"global_max_length {self.global_max_length}",
                "Lower it, or raise global_max_length",
                "rollout_matching.max_new_tokens",
            )
        return self

    @model_validator(mode="after")
    def _adapters_are_trained(self) -> "Config":
        rollout = self.rollout_matching
        if rollout.rollout_backend == "hf" or rollout.vllm.sync.mode != "adapter":
            return self
        if self.tuner.train_type != "lora":
            raise Refusal(
                f"adapter, and tuner.train_type is {self.tuner.train_type}",
                "Use full, or train with tuner.train_type: lora",
                "rollout_matching.vllm.sync.mode",
            )
        return self
