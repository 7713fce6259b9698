"""The cost of a run's step on one learner GPU, in closed form, from its longest pack (FULL-05).

The factors below were fitted to steps on fake tensors (`tests/unit/fake_step.py`); tests compare
both. FLOPs come from `learner.models.flops`, as in `perf/mfu`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Any, NamedTuple

import torch

from learner.config.schema import Config, LoraTuner
from learner.models.flops import Arithmetic
from learner.models.load import LoadedModel, on_meta, read_processor, tuned
from learner.models.packs import Pack, Segment, make_pack
from learner.models.self_context import SelfContext
from learner.objectives.logit_stats import HEAD_ELEMENTS
from learner.stages.packing import StepPacker
from learner.training.channels import Recipe, recipe_of
from learner.types import Channel, Sample
from shared_contracts.checkpoints import GIB

# Share of GPU memory beside driver, kernels and allocator fragmentation.
USABLE = 0.92

SMALLER = (
    "Use model.gradient_checkpointing, a lower global_max_length with packing, "
    "tuner.train_type: lora, for all weights training.data_parallel: fsdp2 on more GPUs, or a "
    "device with more memory"
)

# Elements of a token or patch in a layer: residual stream, MLP, heads (queries and keys).
Widths = tuple[float, float, float]


class Factors(NamedTuple):
    """Bytes of a layer for each element of its `Widths`, in bfloat16.

    kept: saved by the forward for the backward. peak: of the backward, `kept` included. moved:
    memory traffic of a forward's memory-bound operations; a backward has twice as much.
    """

    kept: Widths
    peak: Widths
    moved: Widths


_ALL = Factors((27, 8, 10), (29, 12, 10), (125, 14, 90))
_LORA = Factors((18, 8, 10), (29, 14, 10), (168, 38, 80))
_VISION = Factors((10, 4, 6), (10, 4, 6), (58, 4, 30))
# Factors: of float32 on bfloat16; of `moved` with FSDP2, which casts no weights.
_WIDE, _SHARDED_MOVED = 1.6, 0.82
# Kept bytes: for a patch element in each merger, a token element in the final norm, a logit.
_MERGER, _NORM, _LOGIT = 6.7, 12, 4
# Kept bytes for a value element of linear attention in transformers' own code; kernels keep less.
_LINEAR = 100
# Moved bytes: for a logit; for a weight of the trained or the frozen head, in a chunk of logits.
_LOGIT_MOVED, _HEAD_MOVED, _FROZEN_HEAD_MOVED = 220, 34, 4


@dataclass(frozen=True)
class StepCost:
    """Cost for one learner process, in bytes and FLOPs.

    tokens: of the longest pack. packs: number in a step. weights: of the trained model.
    start: copy of the starting model (GROUP-04). working: peak beside weights, start, gradients
    and moments.
    flops: of a pack, recomputation included. useful: without recomputation, as in `perf/mfu`.
    moved: memory traffic of a pack's memory-bound operations. sent: of a pack, to other processes.
    """

    tokens: int
    packs: int
    weights: int
    start: int
    gradients: int
    moments: int
    working: int
    flops: float
    useful: float
    moved: float
    sent: float

    @property
    def total(self) -> int:
        return self.weights + self.start + self.gradients + self.moments + self.working

    def __str__(self) -> str:
        return (
            f"{gib(self.total)} for each process: {gib(self.total - self.working)} of weights, "
            f"gradients and optimizer, {gib(self.working)} beside them for a pack of "
            f"{self.tokens} tokens"
        )


def _dot(widths: Widths, factors: Widths) -> float:
    return float(sum(map(mul, widths, factors)))


def gib(count: float) -> str:
    return f"{count / GIB:.3g} GiB"


def ring_bytes(whole: float, processes: int) -> float:
    """Return the bytes that each process sends in an all-gather or reduce-scatter of `whole` bytes.

    An all-reduce is one of each. Source: NVIDIA's nccl-tests, doc/PERFORMANCE.md.
    """
    return whole * (processes - 1) / processes


def meta_model(config: Config) -> LoadedModel:
    """Return the model of a run on the meta device, with real processor and tokenizer.

    Coordinate rows count as trained under LoRA unless `train_coordinate_rows` is false.

    Raises as `on_meta` and `tuned` do.
    """
    model, tuner = on_meta(config), config.tuner
    loaded, rows = LoadedModel(model, read_processor(config.model.model)), list[int]()
    if isinstance(tuner, LoraTuner) and not tuner.adapts_rows:
        rows = [] if tuner.train_coordinate_rows is False else loaded.vocab.ids
    with torch.device("meta"):
        return replace(loaded, model=tuned(model, tuner, rows))


def longest_pack(config: Config, segments: Sequence[Segment]) -> tuple[Pack, int]:
    packer = StepPacker(config.training, config.global_max_length, make_pack)
    packs = packer.chunk(segments, last=True)
    return max(packs, key=len), len(packs)


def step_costs(
    config: Config, loaded: LoadedModel, samples: Sequence[Sample], processes: int = 1
) -> dict[Channel, StepCost]:
    """Return the cost of a step of each channel of the run, for one of `processes`.

    Channel B's corrected answers are assumed to be as long as the ground truth.

    loaded: of `meta_model`. samples: of this process's step.
    """
    recipe = recipe_of(config, loaded)
    segments = recipe.channel_a.segments(samples)
    costs: dict[Channel, StepCost] = {}
    for channel in sorted({recipe.channel(step) for step in range(1000)}):
        answers = config.answers_per_sample if channel == "B" else 1
        pack, packs = longest_pack(config, segments * answers)
        step = _CountedStep(config, loaded, recipe, channel, pack)
        parts = processes if step.sharded else 1
        trained = sum(w.numel() for w in step.parameters.values() if w.requires_grad) // parts
        weights = sum(w.nbytes for w in step.parameters.values()) // parts
        costs[channel] = StepCost(
            tokens=len(pack),
            packs=packs,
            weights=weights,
            start=weights if config.needs_start and not step.lora else 0,
            gradients=4 * trained * (2 if processes > parts else 1),  # DDP copies them to buckets
            moments=8 * trained,
            working=int(step.working()),
            flops=step.flops(),
            useful=recipe.flops(loaded.model, pack, channel),
            moved=step.moved(),
            sent=ring_bytes(step.gathered(), parts),
        )
    return costs


class _CountedStep:
    """The longest pack of a step, and the model.

    recorded, others: forwards with and without a backward. rows: supervised rows of the head.
    """

    def __init__(
        self, config: Config, loaded: LoadedModel, recipe: Recipe, channel: Channel, pack: Pack
    ) -> None:
        self.loaded, self.pack = loaded, pack
        context = recipe.channel_a.context if channel == "A" else SelfContext()
        reads_start = config.needs_start and channel == "B"
        self.recorded = context.recorded
        self.others = context.iterations - context.recorded + reads_start
        self.rows = recipe.objective.select(pack.supervision, channel).head_rows
        model: Any = loaded.inner.config
        text, vision = model.get_text_config(), model.vision_config
        self.text, self.vision = text, vision
        self.lora = config.tuner.train_type == "lora"
        self.again = config.model.gradient_checkpointing
        self.wide = config.model.torch_dtype == "float32"
        self.sharded = config.training.data_parallel == "fsdp2"
        self.parameters = dict(loaded.model.named_parameters())
        self.sees = any(w.requires_grad for n, w in self.parameters.items() if "visual" in n)
        self.tied = not any("lm_head." in name for name in self.parameters)
        grids = [] if pack.image_grid_thw is None else pack.image_grid_thw.prod(1).tolist()
        self.patches = float(sum(grids))
        self.stream: int = len(pack) * text.hidden_size
        self.head = text.vocab_size * text.hidden_size
        self.linear_layers = self.v_width = 0
        if loaded.family.linear_attention is not None:
            self.linear_layers = text.layer_types.count("linear_attention")
            self.v_width = text.linear_num_value_heads * text.linear_value_head_dim
        self.block: Widths = (vision.hidden_size, vision.intermediate_size, 2 * vision.hidden_size)
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        heads = (text.num_attention_heads + text.num_key_value_heads) * head
        self.layer: Widths = (text.hidden_size, text.intermediate_size, heads)
        if experts := getattr(text, "num_experts_per_tok", 0):  # they copy the stream of a token
            copies = experts / (10 if self.lora else 2)
            widened = text.hidden_size * (1 + copies)
            self.layer = (widened, experts * text.moe_intermediate_size, heads)

    def count(self, *parts: str) -> int:
        named = self.parameters.items()
        return sum(w.numel() for name, w in named if any(part in name for part in parts))

    def working(self) -> float:
        """Return the peak bytes: in the backward of the head, of the last layer, or at the end."""
        factors, widen = _ALL if self.wide or not self.lora else _LORA, _WIDE if self.wide else 1.0
        copies = 0 if self.lora or self.wide else 2  # bytes of a trained weight's 16-bit copy
        layers, of_layer = self.text.num_hidden_layers, self.count(".language_model.layers.0.")
        linear = _LINEAR * len(self.pack) * self.v_width
        layer = len(self.pack) * _dot(self.layer, factors.peak) * widen + linear
        if self.again:
            narrow = (self.lora or self.sharded) and not self.wide
            left = layers * self.stream * (2 if narrow else 4)
            layer += of_layer * (4 if self.sharded else 0.75 * copies)
        else:
            kept = len(self.pack) * _dot(self.layer, factors.kept) * widen
            left = layers * (kept + copies * of_layer) + self.linear_layers * linear
            layer += _NORM * self.stream - kept - linear
        if self.sees:
            mergers = 1 + len(getattr(self.vision, "deepstack_visual_indexes", ()))
            of_block = 2 * self.block[0] if self.again else _dot(self.block, _VISION.kept)
            of_patch = mergers * _MERGER * self.block[0] + self.vision.depth * of_block
            if self.pack.pixel_values is not None:
                of_patch += 2 * self.pack.pixel_values.shape[1]
            weights = ("merger",) if self.again else ("merger", "visual.blocks")
            left += self.patches * of_patch * widen + copies * self.count(*weights)
        left = self.recorded * left + 8 * (self.recorded - 1) * self.stream
        head = waiting = end = 0.0
        if not self.lora:
            sharded = 8 if self.tied else 9
            head = self.head * (sharded if self.sharded else 4 + copies)
            waiting = self.head * (4 if self.tied or self.sharded else 0)
            end = self.head * (12 if self.tied else 4)
        chunk = _LOGIT * min(self.rows * self.text.vocab_size, HEAD_ELEMENTS)
        return float(max(left + _NORM * self.stream + chunk + head, left + layer + waiting, end))

    def flops(self) -> float:
        whole = Arithmetic.of(self.loaded.model, self.loaded.inner.config)
        forward, both = whole.of_pack(self.pack, self.rows)
        seen = self.again and self.sees
        repeated = (self.again, True, seen, False, self.again, seen, seen)
        recomputed = replace(whole, forward=tuple(map(mul, whole.forward, repeated)))
        again, _ = recomputed.of_pack(self.pack, self.rows)
        if self.again and not self.lora:  # the last product of a layer is not recomputed
            again -= 2 * self.text.num_hidden_layers * self.stream * self.layer[1]
            again -= 2 * seen * self.vision.depth * self.patches * self.block[0] * self.block[1]
        return self.recorded * (both + again) + self.others * forward

    def moved(self) -> float:
        """Return the memory traffic of memory-bound operations, in bytes."""
        factors = _LORA if self.lora else _ALL
        passes = self.recorded * (4 if self.again else 3) + self.others
        text = self.text.num_hidden_layers * len(self.pack) * _dot(self.layer, factors.moved)
        vision = self.vision.depth * self.patches * _dot(self.block, _VISION.moved)
        logits = self.rows * self.text.vocab_size
        of_head = self.head * (_FROZEN_HEAD_MOVED if self.lora else _HEAD_MOVED)
        ends = logits * _LOGIT_MOVED + math.ceil(logits / HEAD_ELEMENTS) * of_head
        moved = passes * text + (passes if self.sees else self.recorded + self.others) * vision
        moved += min(self.recorded, 2) * ends  # other forwards read few logits
        return float(moved * (_SHARDED_MOVED if self.sharded else 1))

    def gathered(self) -> float:
        """Return the bytes that FSDP2 gathers for forwards and layer backwards, and reduces."""
        groups = [".layers.", ".blocks."] + ([] if self.tied else [".embed_tokens."])
        whole = self.count("")
        gathered = (self.recorded + self.others) * whole + self.recorded * self.count(*groups)
        return (4 if self.wide else 2) * gathered + 4 * self.recorded * whole
