"""The whole of a training YAML, as types (CFG-02). Imports no torch.

A key that is not a field of these models is refused. `training.py` and
`rollout_matching.py` have sections, `learner.objectives` the modules of the objective, and
`shared_contracts.rollout_config` the keys that the rollout server has, too.

The trainer's variant decides which section declares the objective (RES-02, CFG-08):

    stage2_two_channel         stage2_ab.pipeline           channels A and B by b_ratio
    stage2_rollout_aligned     rollout_matching.pipeline    channel B alone, polygons too
    stage2_group_relative      stage2_ab.pipeline           channels A and B, groups of answers

Training code reads `Config.pipeline`, `b_ratio` and `allow_poly`, not the variant.
"""

from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
)

from learner.config.rollout_matching import GroupRelativeConfig, RolloutMatchingConfig
from learner.config.training import AbsolutePath, TrainingConfig
from learner.objectives import VARIANTS
from learner.objectives.config import ObjectiveModule, PipelineConfig
from learner.types import Channel, FieldOrder
from shared_contracts.errors import ContractError
from shared_contracts.repeat_guard import AnswerFormatName
from shared_contracts.strict_model import (
    EmptySection,
    FreeOnResume,
    Refusal,
    StrictModel,
)

AttentionChoice = Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"]


class ModelConfig(StrictModel):
    model: AbsolutePath = Field(description="folder of the checkpoint to start from")
    torch_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """data type of the forward; trained weights are float32"""
    attn_implementation: FreeOnResume[AttentionChoice] = "auto"
    """attention within packed rows; `auto`: torch's `varlen_attn` on CUDA, segment by segment
    elsewhere; the others by transformers' name"""
    gradient_checkpointing: FreeOnResume[bool] = False
    """recompute activations to save memory"""


# Image marks of other formats, which the model would read as text, and special tokens of the chat
# template, which would change the structure of the prompt.
_MARKS = (
    *("<image>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
    *("<video>", "<|video_pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"),
)


class TemplateConfig(StrictModel):
    system: str | None = Field(default=None, description="system message; null: none")
    prompt: str = Field(min_length=1)
    """instruction of the user, placed after the image; without an image mark"""

    @field_validator("system", "prompt")
    @classmethod
    def _plain_text(cls, text: str | None) -> str | None:
        for mark in _MARKS:
            if text is not None and mark in text:
                do = "Remove it: images and chat tokens are added; videos are not read"
                raise Refusal(f"it has {mark}", do)
        return text


class DataConfig(StrictModel):
    """The files of samples, and what happens to samples with bad images."""

    train_jsonl: AbsolutePath = Field(description="samples to train on")
    val_jsonl: FreeOnResume[AbsolutePath | None] = None
    """samples to evaluate on"""
    shuffle: bool = True
    """draw a new order in every epoch, from the seed"""
    on_bad_sample: FreeOnResume[Literal["stop", "skip"]] = "stop"
    """what to do with samples whose images are missing, unreadable, of another size than their line
    says, or refused by the model's processor: `stop` refuses the run, `skip` lists them in
    `bad_samples.jsonl` and trains on other samples in their place"""


class FullTuner(StrictModel):
    train_type: Literal["full"] = Field(default="full", description="all weights are trained")


class LoraTuner(StrictModel):
    """Adapters, and with them the rows of the coordinate tokens."""

    train_type: Literal["lora"] = Field(description="adapters are trained")
    lora_rank: int = Field(ge=1, description="rank of the adapters")
    lora_alpha: int = Field(ge=1, description="adapters are scaled by `lora_alpha / lora_rank`")
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout before the adapters")
    use_dora: bool = Field(default=False, description="train DoRA instead of LoRA")
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """modules that get adapters: names as in peft, or `all-linear`"""
    train_coordinate_rows: Literal["auto"] | bool = "auto"
    """also train the rows of the coordinate tokens in embedding and head; `auto`: if they look
    untrained"""

    def disagreements(self) -> Iterator[Refusal]:
        if self.train_coordinate_rows is True and self.adapts_rows:
            found = "true, and target_modules names the embedding or the head, which has these rows"
            do = "Take embed_tokens and lm_head out of tuner.target_modules, or set it to false"
            yield Refusal(found, do, "train_coordinate_rows")

    @property
    def adapts_rows(self) -> bool:
        targets = [] if self.target_modules == "all-linear" else self.target_modules
        return any(name.split(".")[-1] in ("embed_tokens", "lm_head") for name in targets)


def _full_by_default(value: Any) -> Any:
    if isinstance(value, dict) and "train_type" not in value:
        return {"train_type": "full", **value}
    return value


TunerConfig = Annotated[
    Annotated[FullTuner | LoraTuner, Field(discriminator="train_type")],
    BeforeValidator(_full_by_default),
]

SoftContextGradMode = Literal["unroll", "em_detach"]
CoordContextMode = Literal["st", "soft", "hard"]


def _plain(number: Decimal) -> float | str:
    """Return a float if it reads back as this decimal, else text."""
    return float(number) if Decimal(repr(float(number))) == number else str(number)


class ScheduleConfig(StrictModel):
    # 340: no float has more decimal places. Exact arithmetic needs memory for each of them.
    b_ratio: Annotated[Decimal, PlainSerializer(_plain)] = Field(
        strict=False, ge=0, le=1, decimal_places=340
    )
    """fraction of the optimizer steps that run channel B; the decimal is used exactly as written"""


class ChannelBConfig(StrictModel):
    """Which part of the model's own answers a target keeps (CLEAN-01)."""

    prefix: Literal["verbatim", "clean", "matched"] = "verbatim"
    """`verbatim`: an answer is continued as it is; `clean`: objects that repeat an earlier one are
    removed first; `matched`: objects that no annotation matches are removed first"""
    duplicate_iou: float = Field(default=0.9, gt=0, le=1)
    """with `prefix: clean`, the IoU from which an object repeats an earlier one of the same
    description"""


class Stage2ABConfig(StrictModel):
    """The schedule of the channels, their options, and the objective."""

    schedule: ScheduleConfig = Field(description="which steps are channel B")
    channel_b: ChannelBConfig = ChannelBConfig()
    """which part of the model's own answers a target keeps"""
    n_softctx_iter: int = Field(default=1, ge=1)
    """number of forwards of channel A; 1 is plain teacher forcing"""
    softctx_grad_mode: SoftContextGradMode = "unroll"
    """with several forwards: `unroll`, gradients flow through the embeddings that are fed back;
    `em_detach`, they stop there"""
    coord_ctx_embed_mode: CoordContextMode = "st"
    """with several forwards, what is fed back at coordinates: `soft`, the mean embedding; `hard`,
    the embedding of the most likely token; `st`, the value of `hard` with the gradient of `soft`"""
    pipeline: PipelineConfig = Field(description="the objective and diagnostics modules")


def _null_is_empty(value: Any) -> Any:
    return {} if value is None else value


Free = Annotated[
    dict[str, Any],
    BeforeValidator(_null_is_empty, json_schema_input_type=dict[str, Any] | None),
]

if TYPE_CHECKING:
    VariantName = str
else:
    VariantName = Literal[tuple(VARIANTS)]


class CustomConfig(StrictModel):
    trainer_variant: VariantName = Field(
        description="; ".join(f"`{name}`: {own.meaning}" for name, own in VARIANTS.items())
    )
    object_field_order: FieldOrder = "desc_first"
    """order of the fields inside every written object"""
    answer_format: AnswerFormatName = "object_keys"
    """how answers are written and read: `object_keys`, one JSON object of objects; `objects_array`,
    a JSON list of objects; `compact`, a line for each object"""
    extra: FreeOnResume[Free] = Field(default={})
    """free section for your own tools; Rollmatch does not read it"""


Empty = Annotated[
    EmptySection, BeforeValidator(_null_is_empty, json_schema_input_type=EmptySection | None)
]

# By section of a variant: what to write if it is missing; what to do beside removing it.
_OF_VARIANT = {
    "stage2_ab": (
        "State stage2_ab.schedule.b_ratio and stage2_ab.pipeline",
        "and declare the objective in rollout_matching.pipeline",
    ),
    "group_relative": (
        "State group_size, advantage and reward",
        "or use custom.trainer_variant: stage2_group_relative",
    ),
    "pipeline": (
        "Declare the objective and the diagnostics modules",
        "and declare the objective in stage2_ab.pipeline",
    ),
}


class Config(StrictModel):
    """A training YAML: every key with its default, and the rules between sections."""

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
    stage2_ab: Stage2ABConfig | None = Field(default=None, validate_default=True)
    """schedule and objective of stage2_two_channel and stage2_group_relative; required there,
    refused with other variants"""
    group_relative: GroupRelativeConfig | None = Field(default=None, validate_default=True)
    """groups of answers and their rewards, of stage2_group_relative; required there, refused with
    other variants"""
    rollout_matching: RolloutMatchingConfig
    """how answers are generated and matched"""
    deepspeed: Empty = Field(default=EmptySection(), description="no keys yet")
    global_max_length: int = Field(ge=2, description="most tokens of one pack")

    @property
    def pipeline(self) -> PipelineConfig:
        if self.stage2_ab is not None:
            return self.stage2_ab.pipeline
        assert self.rollout_matching.pipeline is not None, "it comes with the variant"
        return self.rollout_matching.pipeline

    @property
    def pipeline_path(self) -> str:
        return "rollout_matching.pipeline" if self.stage2_ab is None else "stage2_ab.pipeline"

    @property
    def b_ratio(self) -> Decimal:
        return Decimal(1) if self.stage2_ab is None else self.stage2_ab.schedule.b_ratio

    @property
    def duplicate_iou(self) -> float | None:
        """IoU from which repeated objects leave the prefix of an answer; None: they stay."""
        own = None if self.stage2_ab is None else self.stage2_ab.channel_b
        return own.duplicate_iou if own is not None and own.prefix == "clean" else None

    @property
    def matched_only(self) -> bool:
        """Whether false positives leave the prefix of an answer."""
        return self.stage2_ab is not None and self.stage2_ab.channel_b.prefix == "matched"

    @property
    def answers_per_sample(self) -> int:
        """How many answers channel B requests for each sample."""
        return 1 if self.group_relative is None else self.group_relative.group_size

    @property
    def whole_answers(self) -> bool:
        """Whether a target of channel B is the unchanged answer (GROUP-02).

        With groups it is, unless a module of channel B trains on corrected objects.
        """
        modules = [m for m in self._teaching("B") if not m.reads("answer")]
        return self.group_relative is not None and not modules

    @property
    def needs_start(self) -> bool:
        """Whether a module compares the model with the one that the run started from."""
        return any(m.reads_start and m.counts_in("B") for m in self.pipeline.objective)

    @property
    def allow_poly(self) -> bool:
        """Whether polygons are trained and predicted beside boxes (RES-02)."""
        return VARIANTS[self.custom.trainer_variant].polygons

    @field_validator("stage2_ab", "group_relative", "rollout_matching")
    @classmethod
    def _check_variant(cls, section: Any, info: ValidationInfo) -> Any:
        """Refuse a section that the variant requires and lacks, or does not have."""
        custom: CustomConfig | None = info.data.get("custom")
        if custom is None:  # it has errors itself
            return section
        key = "pipeline" if isinstance(section, RolloutMatchingConfig) else ""
        name, variant = key or str(info.field_name), custom.trainer_variant
        declared = (section.pipeline if key else section) is not None
        if declared == (name in VARIANTS[variant].sections):
            return section
        do, instead = _OF_VARIANT[name]
        if declared:
            found = f"is given, and custom.trainer_variant is {variant}"
            raise Refusal(found, f"Remove it, {instead}", key)
        found = f"this key is required and missing with custom.trainer_variant: {variant}"
        raise Refusal(found, do, key)

    @field_validator("rollout_matching")
    @classmethod
    def _share_answer_format(
        cls, section: RolloutMatchingConfig, info: ValidationInfo
    ) -> RolloutMatchingConfig:
        custom: CustomConfig | None = info.data.get("custom")
        if custom is None:
            return section
        guard, answer_format = section.repeat_terminate, custom.answer_format
        if "answer_format" in guard.model_fields_set and guard.answer_format != answer_format:
            found = f"{guard.answer_format}, and custom.answer_format is {answer_format}"
            do = "Remove it: the guard counts the entries of custom.answer_format"
            raise Refusal(found, do, "repeat_terminate.answer_format")
        guard = guard.model_copy(update={"answer_format": answer_format})
        return section.model_copy(update={"repeat_terminate": guard})

    def disagreements(self) -> Iterator[Refusal]:
        yield from self._of_sections()
        yield from self._of_adapters()
        yield from self._of_channels()
        yield from self._of_self_context()
        yield from self._of_modules()
        if self.rollout_matching.async_rollout.enabled:
            yield from self._of_async()
        if self.group_relative is not None:
            yield from self._of_groups()

    def _of_sections(self) -> Iterator[Refusal]:
        if self.training.eval_strategy == "steps" and self.data.val_jsonl is None:
            do = "Give a file to evaluate on, or set training.eval_strategy to no"
            yield Refusal("is missing with training.eval_strategy: steps", do, "data.val_jsonl")
        if self.rollout_matching.eval_detection.enabled and self.training.eval_strategy == "no":
            found = "is true, and training.eval_strategy is no: the run evaluates nothing"
            do = "Set it to false, or training.eval_strategy to steps"
            yield Refusal(found, do, "rollout_matching.eval_detection.enabled")
        if self.rollout_matching.max_new_tokens >= self.global_max_length:
            yield Refusal(
                f"{self.rollout_matching.max_new_tokens} leaves no room for a prompt in "
                f"global_max_length {self.global_max_length}",
                "Lower it, or raise global_max_length",
                "rollout_matching.max_new_tokens",
            )

    def _of_adapters(self) -> Iterator[Refusal]:
        rollout = self.rollout_matching
        served = rollout.backend != "hf" and rollout.vllm.enable_lora
        if served and self.tuner.train_type != "lora":
            found = f"is true, and tuner.train_type {self.tuner.train_type} has no adapter to serve"
            do = "Set it to false, or train with tuner.train_type: lora"
            yield Refusal(found, do, "rollout_matching.vllm.enable_lora")

    def _of_channels(self) -> Iterator[Refusal]:
        for channel in self._channels():
            if not self._teaching(channel):
                found = f"channel {channel} runs, but no enabled module of positive weight lists it"
                do = f"Add {channel} to the channels of a module"
                yield Refusal(found, do, f"{self.pipeline_path}.objective")

    def _of_self_context(self) -> Iterator[Refusal]:
        """Several forwards of channel A need a module that learns from the last one."""
        own = self.stage2_ab
        if own is None or own.n_softctx_iter == 1 or "A" not in self._channels():
            return
        if not any(module.learns_from_last for module in self._teaching("A")):
            found = f"{own.n_softctx_iter}, and no module learns from the last of the forwards"
            do = "Set it to 1, or add bbox_geo or coord_reg to channel A"
            yield Refusal(found, do, "stage2_ab.n_softctx_iter")

    def _of_modules(self) -> Iterator[Refusal]:
        for index, module in enumerate(self.pipeline.objective):
            if not module.enabled:
                continue
            key = f"{self.pipeline_path}.objective[{index}]"
            if not module.channels:
                found = "[]: the module would run in no channel"
                do = "List A, B or both, or set its enabled to false"
                yield Refusal(found, do, f"{key}.channels")
            elif self.stage2_ab is None and "B" not in module.channels:
                found = f"{list(module.channels)}, and only channel B runs: the module has no use"
                do = "List B, or set its enabled to false"
                yield Refusal(found, do, f"{key}.channels")
            if module.reads("departure") and self.duplicate_iou is None:
                found = f"{module.name} is enabled, and no duplicate is removed from the answers"
                do = "set stage2_ab.channel_b.prefix to clean, in stage2_two_channel"
                yield Refusal(found, f"Remove the module, or {do}", key)
            if module.reads("answer") and self.group_relative is None:
                variant = self.custom.trainer_variant
                found = f"{module.name} is enabled, and {variant} has no groups of answers"
                do = "Remove the module, or use custom.trainer_variant: stage2_group_relative"
                yield Refusal(found, do, key)

    def _of_groups(self) -> Iterator[Refusal]:
        """Groups need sampled answers with log-probabilities (GROUP-01)."""
        rollout, own = self.rollout_matching, self.stage2_ab
        assert own is not None, "it comes with the variant"
        grouped = f"custom.trainer_variant is {self.custom.trainer_variant}"
        if rollout.decode_mode != "sampling":
            found = f"{rollout.decode_mode}, and {grouped}: all answers of a group would be equal"
            do = "Set rollout_matching.decode_mode to sampling, with decoding.temperature 1"
            yield Refusal(found, do, "rollout_matching.decode_mode")
        if not rollout.logprobs:
            found = f"is false, and {grouped}, which needs the engine's log-probabilities"
            do = "Set it to true, with rollout_matching.rollout_backend: vllm"
            yield Refusal(found, do, "rollout_matching.logprobs")
        if own.channel_b.prefix != "verbatim":
            found = f"{own.channel_b.prefix}, and {grouped}, which rewards answers as they are"
            do = "Set it to verbatim, and the weights of group_relative.reward"
            yield Refusal(found, do, "stage2_ab.channel_b.prefix")
        if own.schedule.b_ratio == 0:
            found = f"0, and {grouped}: no answers are requested"
            do = "Raise it, or use custom.trainer_variant: stage2_two_channel"
            yield Refusal(found, do, "stage2_ab.schedule.b_ratio")
        if not any(m.counts_in("B") for m in self.pipeline.objective if m.reads("answer")):
            found = "no policy_gradient of positive weight runs in channel B: rewards have no use"
            do = "Add the module, or use custom.trainer_variant: stage2_two_channel"
            yield Refusal(found, do, f"{self.pipeline_path}.objective")
        if self.needs_start and self.training.data_parallel == "fsdp2":
            found = "fsdp2, and a kl_weight above 0 needs a whole copy of the starting model"
            do = "Set it to ddp, or the kl_weight of policy_gradient to 0"
            yield Refusal(found, do, "training.data_parallel")

    def _teaching(self, channel: Channel) -> list[ObjectiveModule]:
        return [m for m in self.pipeline.objective if m.counts_in(channel) and m.teaches]

    def _channels(self) -> Iterator[Channel]:
        """Yield the channels that may run. A also runs while async rollouts are late (ASYNC-01)."""
        late = self.rollout_matching.async_rollout.enabled
        if self.stage2_ab is not None and (self.b_ratio < 1 or late):
            yield "A"
        if self.b_ratio > 0:
            yield "B"

    def _of_async(self) -> Iterator[Refusal]:
        key = "rollout_matching.async_rollout.enabled"
        if self.b_ratio == 0:
            found = "is true, and stage2_ab.schedule.b_ratio is 0: no answers are requested"
            yield Refusal(found, "Set it to false, or raise stage2_ab.schedule.b_ratio", key)
        if self.stage2_ab is None:
            found = "is true, and without channel A there is nothing to run while rollouts are late"
            do = "Set it to false, or use custom.trainer_variant: stage2_two_channel"
            yield Refusal(found, do, key)


# What a push sends: the whole model, or the LoRA adapter alone (SYNC-01).
SyncMode = Literal["full", "adapter"]


def wanted_sync_mode(config: Config) -> SyncMode:
    """Return `sync.mode`, with `auto` resolved: `adapter` with `enable_lora`, else `full`."""
    vllm = config.rollout_matching.vllm
    if vllm.sync.mode == "auto":
        return "adapter" if vllm.enable_lora else "full"
    return vllm.sync.mode


def resolved_sync_mode(config: Config, learner_world_size: int) -> SyncMode:
    """Return `wanted_sync_mode`; raise ContractError for adapters of several processes (RES-04)."""
    wanted = wanted_sync_mode(config)
    if wanted == "adapter" and learner_world_size > 1:
        raise ContractError(
            "rollout_matching.vllm.sync.mode",
            f"{config.rollout_matching.vllm.sync.mode} resolves to adapter, and there are "
            f"{learner_world_size} learner processes",
            "Use full, or one learner process",
        )
    return wanted
