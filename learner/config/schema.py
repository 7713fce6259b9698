"""The whole of a training YAML, as types (CFG-02). Imports no torch.

These models alone own the shape: a key that is not a field here is refused. Sections of
their own are in `tuner.py`, `training.py`, `stage2_ab.py` and `rollout_matching.py`; what the
rollout server shares is in `shared_contracts.rollout_config`.

The trainer's variant decides which section declares the objective (RES-02, CFG-08):

    stage2_two_channel         stage2_ab.pipeline           channels A and B by b_ratio
    stage2_rollout_aligned     rollout_matching.pipeline    channel B alone, polygons too

Who trains asks `Config` for `pipeline`, `b_ratio` and `allow_poly`, not for the variant.
"""

from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from learner.config.pipeline import ObjectiveModule, PipelineConfig
from learner.config.rollout_matching import RolloutMatchingConfig
from learner.config.stage2_ab import Stage2ABConfig
from learner.config.training import TrainingConfig
from learner.config.tuner import FullTuner, LoraTuner, TunerConfig
from learner.config.values import AbsolutePath, EmptySection, refuse_all
from learner.types import Channel, FieldOrder
from shared_contracts.strict_model import Refusal, StrictModel

__all__ = ["Config", "LoraTuner", "TunerConfig", "Variant"]


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


def _null_is_empty(value: Any) -> Any:
    return {} if value is None else value


Variant = Literal["stage2_two_channel", "stage2_rollout_aligned"]


class CustomConfig(StrictModel):
    trainer_variant: Variant = Field(
        description="`stage2_two_channel`: channels A and B, boxes; `stage2_rollout_aligned`: "
        "channel B alone, boxes and polygons"
    )
    object_field_order: FieldOrder = Field(
        default="desc_first", description="order of the fields inside every written object"
    )
    extra: Annotated[dict[str, Any], BeforeValidator(_null_is_empty)] = Field(
        default={}, description="free: nothing here reads it, tools of yours may"
    )


Empty = Annotated[EmptySection, BeforeValidator(_null_is_empty)]


class Config(StrictModel):
    """A training YAML: every key with its default, and what must hold between sections."""

    model: ModelConfig = Field(description="the checkpoint and how it is loaded")
    quantization: Empty = Field(default=EmptySection(), description="no keys yet")
    template: TemplateConfig = Field(description="the prompt")
    data: DataConfig = Field(description="the samples")
    tuner: TunerConfig = Field(default=FullTuner(), description="which weights are trained")
    training: TrainingConfig = Field(description="optimizer, steps, packing, saving, logging")
    rlhf: Empty = Field(default=EmptySection(), description="no keys yet")
    custom: CustomConfig = Field(description="the trainer's variant")
    debug: Empty = Field(default=EmptySection(), description="no keys yet")
    experiment: Empty = Field(default=EmptySection(), description="no keys yet")
    stage2_ab: Stage2ABConfig | None = Field(
        default=None,
        validate_default=True,
        description="schedule and objective of stage2_two_channel, which needs it; no other "
        "variant takes it",
    )
    rollout_matching: RolloutMatchingConfig = Field(
        description="how answers are generated and matched"
    )
    deepspeed: Empty = Field(default=EmptySection(), description="no keys yet")
    global_max_length: int = Field(ge=2, description="tokens of one pack: the packing capacity")

    @property
    def pipeline(self) -> PipelineConfig:
        """The declared objective and diagnostics."""
        if self.stage2_ab is not None:
            return self.stage2_ab.pipeline
        assert self.rollout_matching.pipeline is not None, "it comes with the variant"
        return self.rollout_matching.pipeline

    @property
    def pipeline_path(self) -> str:
        return "rollout_matching.pipeline" if self.stage2_ab is None else "stage2_ab.pipeline"

    @property
    def b_ratio(self) -> Decimal:
        """Share of the optimizer steps that are channel B."""
        return Decimal(1) if self.stage2_ab is None else self.stage2_ab.schedule.b_ratio

    @property
    def allow_poly(self) -> bool:
        """True where polygons are trained and predicted beside boxes (RES-02)."""
        return self.custom.trainer_variant == "stage2_rollout_aligned"

    @field_validator("stage2_ab")
    @classmethod
    def _two_channels_have_a_schedule(
        cls, section: Stage2ABConfig | None, info: ValidationInfo
    ) -> Stage2ABConfig | None:
        variant = _variant(info)
        if variant == "stage2_two_channel" and section is None:
            raise Refusal(
                f"this key is required and missing with custom.trainer_variant: {variant}",
                "State stage2_ab.schedule.b_ratio and stage2_ab.pipeline",
            )
        if variant == "stage2_rollout_aligned" and section is not None:
            raise Refusal(
                f"is given, and custom.trainer_variant is {variant}, which runs channel B alone",
                "Remove it, and declare the objective in rollout_matching.pipeline",
            )
        return section

    @field_validator("rollout_matching")
    @classmethod
    def _the_objective_is_in_its_section(
        cls, section: RolloutMatchingConfig, info: ValidationInfo
    ) -> RolloutMatchingConfig:
        variant = _variant(info)
        if variant == "stage2_rollout_aligned" and section.pipeline is None:
            raise Refusal(
                f"this key is required and missing with custom.trainer_variant: {variant}",
                "Declare the objective and the diagnostics modules",
                "pipeline",
            )
        if variant == "stage2_two_channel" and section.pipeline is not None:
            raise Refusal(
                f"is given, and custom.trainer_variant is {variant}",
                "Remove it, and declare the objective in stage2_ab.pipeline",
                "pipeline",
            )
        return section

    @model_validator(mode="after")
    def _sections_agree(self) -> "Config":
        refuse_all(self._disagreements())
        return self

    def _disagreements(self) -> Iterator[Refusal]:
        yield from self._of_sections()
        yield from self._of_adapters()
        yield from self._of_channels()
        yield from self._of_self_context()
        yield from self._of_async()
        if self.stage2_ab is None:
            yield from self._of_channel_b_alone()

    def _of_sections(self) -> Iterator[Refusal]:
        if self.training.eval_strategy == "steps" and self.data.val_jsonl is None:
            yield Refusal(
                "is missing with training.eval_strategy: steps",
                "Give a file to evaluate on, or set training.eval_strategy to no",
                "data.val_jsonl",
            )
        if self.rollout_matching.eval_detection.enabled and self.training.eval_strategy == "no":
            yield Refusal(
                "is true, and training.eval_strategy is no: the run evaluates nothing",
                "Set it to false, or training.eval_strategy to steps",
                "rollout_matching.eval_detection.enabled",
            )
        if self.rollout_matching.max_new_tokens >= self.global_max_length:
            yield Refusal(
                f"{self.rollout_matching.max_new_tokens} leaves no room for a prompt in "
                f"global_max_length {self.global_max_length}",
                "Lower it, or raise global_max_length",
                "rollout_matching.max_new_tokens",
            )

    def _of_adapters(self) -> Iterator[Refusal]:
        rollout = self.rollout_matching
        adapters = rollout.backend != "hf" and rollout.vllm.sync.mode == "adapter"
        if adapters and self.tuner.train_type != "lora":
            yield Refusal(
                f"adapter, and tuner.train_type is {self.tuner.train_type}",
                "Use full, or train with tuner.train_type: lora",
                "rollout_matching.vllm.sync.mode",
            )

    def _of_channels(self) -> Iterator[Refusal]:
        """Every channel that may run has something to learn from."""
        for channel in self._channels():
            if not self._teaching(channel):
                yield Refusal(
                    f"channel {channel} runs, but no enabled module of positive weight lists it",
                    f"Add {channel} to the channels of a module",
                    f"{self.pipeline_path}.objective",
                )
        for index, module in enumerate(self.pipeline.objective):
            if module.enabled and not module.channels:
                yield Refusal(
                    "[]: the module would run in no channel",
                    "List A, B or both, or set its enabled to false",
                    f"{self.pipeline_path}.objective[{index}].channels",
                )

    def _of_self_context(self) -> Iterator[Refusal]:
        """More than one forward of channel A, and something that learns from the last."""
        own = self.stage2_ab
        if own is None or own.n_softctx_iter == 1 or "A" not in self._channels():
            return
        modules = self._teaching("A")
        context = [m.config.self_context_struct_ce_weight for m in modules if m.name == "token_ce"]
        if not any(context) and all(module.name == "token_ce" for module in modules):
            yield Refusal(
                f"{own.n_softctx_iter}, and no module learns from the last of the forwards",
                "Set it to 1, or add bbox_geo or coord_reg to channel A",
                "stage2_ab.n_softctx_iter",
            )

    def _teaching(self, channel: Channel) -> list[ObjectiveModule]:
        """Modules that move weights in a channel."""
        return [m for m in self.pipeline.objective if m.counts_in(channel) and m.config.teaches]

    def _channels(self) -> Iterator[Channel]:
        """A also runs in place of a step whose asynchronous rollouts are late (ASYNC-01)."""
        late = self.rollout_matching.async_rollout.enabled
        if self.stage2_ab is not None and (self.b_ratio < 1 or late):
            yield "A"
        if self.b_ratio > 0:
            yield "B"

    def _of_async(self) -> Iterator[Refusal]:
        if self.rollout_matching.async_rollout.enabled and self.b_ratio == 0:
            yield Refusal(
                "is true, and stage2_ab.schedule.b_ratio is 0: nothing is ever asked for",
                "Set it to false, or raise stage2_ab.schedule.b_ratio",
                "rollout_matching.async_rollout.enabled",
            )

    def _of_channel_b_alone(self) -> Iterator[Refusal]:
        if self.rollout_matching.async_rollout.enabled:
            yield Refusal(
                "is true, and without channel A there is nothing to run while rollouts are late",
                "Set it to false, or use custom.trainer_variant: stage2_two_channel",
                "rollout_matching.async_rollout.enabled",
            )
        for index, module in enumerate(self.pipeline.objective):
            if module.enabled and module.channels and "B" not in module.channels:
                yield Refusal(
                    f"{list(module.channels)}, and channel B alone runs: the module never would",
                    "List B, or set its enabled to false",
                    f"{self.pipeline_path}.objective[{index}].channels",
                )


def _variant(info: ValidationInfo) -> Variant | None:
    """The trainer's variant; None where `custom` has faults of its own."""
    custom = info.data.get("custom")
    return None if custom is None else custom.trainer_variant
