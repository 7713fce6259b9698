"""The cost of a run's own step on one learner GPU: its packs, its recipe, its model, on fakes.

    config, samples -> segments -> packs -> the longest one -> of each channel: forward, backward,
    optimizer

Gradients and the optimizer's moments exist from the second pack and the second step on, so they
are there before the forward that is measured.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from learner.config.rollout_matching import OffloadConfig
from learner.config.schema import Config, LoraTuner
from learner.models.families import family_of
from learner.models.load import LoadedModel, on_meta, read_processor, tuned
from learner.models.packs import IMAGE, Pack, make_pack
from learner.models.patch_embedding import use_product
from learner.models.precision import compute_in, sharded_policy
from learner.models.prompts import PromptEncoder
from learner.operate.estimate.fake import (
    Costs,
    Work,
    fake_processes,
    faked,
    put_on_fakes,
    ring_bytes,
)
from learner.operate.estimate.sizes import gib
from learner.stages.formats import answer_format
from learner.stages.packing import StepPacker
from learner.stages.tokens import CoordVocab
from learner.training.channels import Encoding
from learner.training.input_checks import generates
from learner.training.recipes import Recipe, recipe_class
from learner.training.trainer import build_optimizer
from learner.types import Channel, Sample

Tensors = list[tuple[tuple[int, ...], str, int]]

# Where a learner and its colocated server do not fit on a GPU while the server works.
OFFLOAD_REMEDY = (
    "Set rollout_matching.offload.enabled with offload_optimizer or offload_model, or lower "
    "rollout_matching.vllm.gpu_memory_utilization"
)


@dataclass(frozen=True)
class StepCost:
    """One learner process, in bytes.

    tokens: of the pack that was measured. packs: of a step's samples of this process.
    weights, gradients, moments: of the model as it is trained.
    working: the most beside those three: activations, and what operations need for themselves.
    largest: the tensors that were alive then, without weights, gradients and moments.
    pack: the forward and backward of the pack, over all iterations. update: the optimizer, and
    what is sent once in a step.
    shapes: of every tensor that was made.
    """

    channel: Channel
    tokens: int
    packs: int
    weights: int
    gradients: int
    moments: int
    working: int
    largest: Tensors
    pack: Work
    update: Work
    shapes: frozenset[tuple[int, ...]]

    @property
    def flops(self) -> float:
        """Of the pack."""
        return self.pack.flops

    @property
    def states(self) -> int:
        return self.weights + self.gradients + self.moments

    @property
    def total(self) -> int:
        return self.states + self.working

    def kept(self, offload: OffloadConfig) -> int:
        """Bytes beside a colocated server that works: there are no gradients between steps."""
        moved = (offload.offload_model, self.weights), (offload.offload_optimizer, self.moments)
        return sum(size for away, size in moved if not (offload.enabled and away))

    def remedy(self, config: Config, room: float) -> str:
        """What makes it smaller, where `room` bytes are too few and the config has left a choice.

        FSDP2 is refused beside LoRA and beside a learner that generates in its own process. Beside
        a colocated server there is one process.
        """
        model, lora = config.model, config.tuner.train_type == "lora"
        backend = config.rollout_matching.backend if generates(config) else "server"
        choices = []
        if self.states <= room:
            if model.attn_implementation in ("eager", "sdpa"):
                choices.append("set model.attn_implementation: auto")
            if not model.gradient_checkpointing:
                choices.append("set model.gradient_checkpointing: true")
            if config.training.packing:
                choices.append("lower global_max_length")
        if backend == "colocate":
            choices.append("use rollout_matching.vllm.mode: server with GPUs of its own")
        if not lora and backend == "server":
            choices.append("use training.data_parallel: fsdp2 over more processes")
        if not lora:
            choices.append("use tuner.train_type: lora")
        elif self.states > room >= self.weights:
            choices.append("lower tuner.lora_rank")
        *others, last = [*choices, "use a device with more memory"]
        found = f"{', '.join(others)}, or {last}" if others else last
        return found[0].upper() + found[1:]

    def __str__(self) -> str:
        return (
            f"{gib(self.total)} for each process: {gib(self.states)} of weights, gradients and "
            f"optimizer, {gib(self.working)} beside them for a pack of {self.tokens} tokens"
        )


def meta_model(config: Config, model: PreTrainedModel | None = None) -> LoadedModel:
    """The model that a run trains, on the meta device; its processor and tokenizer are real.

    Under LoRA the rows of the coordinate tokens count as trained unless the config says no.

    model: of `on_meta`, which gets the run's tuner; by default a new one.

    Raises as `on_meta` and `tuned` do.
    """
    model = on_meta(config) if model is None else model
    processor = read_processor(config.model.model)
    vocab = CoordVocab.from_tokenizer(processor.tokenizer, answer_format(config).end_marker)
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    family = family_of(model)
    use_product(model, family.patch_embedding)
    inner, rows = family.inner(model), list[int]()
    tuner = config.tuner
    if isinstance(tuner, LoraTuner) and not tuner.adapts_rows:
        rows = [] if tuner.train_coordinate_rows is False else vocab.ids
    with torch.device("meta"):
        trained = tuned(model, tuner, rows)
    trained.train()
    return LoadedModel(trained, inner, processor, processor.tokenizer, vocab, (), family)


def recipe_of(config: Config, loaded: LoadedModel) -> Recipe:
    prompt = PromptEncoder(loaded.processor, config.template.prompt, config.template.system)
    fields, answers = config.custom.object_field_order, answer_format(config)
    encoding = Encoding(loaded.inner, prompt, loaded.tokenizer, fields, answers)
    return recipe_class(config).of_run(config, encoding, loaded.vocab.ids)


def longest_pack(config: Config, recipe: Recipe, samples: Sequence[Sample]) -> tuple[Pack, int]:
    """The longest pack of a step that trains on the ground truth of `samples`, and how many.

    A corrected answer of channel B is as long as the ground truth where the model finds all
    there is.
    """
    segments = recipe.channel_a.segments(samples)
    packer = StepPacker(config.training, config.global_max_length, make_pack, lambda fill: None)
    packs = packer.chunk(segments, last=True)
    return max(packs, key=len), len(packs)


def step_cost(
    config: Config,
    samples: Sequence[Sample],
    channel: Channel,
    processes: int = 1,
    device: str = "cuda",
) -> StepCost:
    """The cost of a step of one channel, by a model of its own; arguments as of `step_costs`."""
    loaded = meta_model(config)
    recipe = recipe_of(config, loaded)
    return step_costs(config, loaded, recipe, samples, [channel], processes, device)[channel]


def step_costs(
    config: Config,
    loaded: LoadedModel,
    recipe: Recipe,
    samples: Sequence[Sample],
    channels: Iterable[Channel],
    processes: int = 1,
    device: str = "cuda",
) -> dict[Channel, StepCost]:
    """Run a step of each channel on fake tensors, in one of several processes.

    loaded: of `meta_model`; it cannot be used afterwards. recipe: of it.
    samples: of this process's step. device: `cpu` takes the way that a CPU takes.
    """
    pack, packs = longest_pack(config, recipe, samples)
    return pack_costs(config, loaded, recipe, pack, packs, channels, processes, device)


def pack_costs(
    config: Config,
    loaded: LoadedModel,
    recipe: Recipe,
    pack: Pack,
    packs: int,
    channels: Iterable[Channel],
    processes: int = 1,
    device: str = "cuda",
) -> dict[Channel, StepCost]:
    """`step_costs` of a step whose longest pack is `pack`, one of `packs`."""
    costs, found = Costs(), dict[Channel, StepCost]()
    sharded = config.training.data_parallel == "fsdp2"
    images = pack.mm_token_types == IMAGE
    several = fake_processes(processes) if sharded else nullcontext()
    with several, faked(costs, images, device) as mode:
        model = loaded.model
        put_on_fakes(model)
        if sharded:
            _shard(config, model, processes)
        fakes = replace(pack, pixel_values=_on_fake(mode, pack.pixel_values))
        optimizer = build_optimizer(model, config.training, loaded.family)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        for weight in trained:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()  # makes the moments
        weights = sum(_bytes(weight) for weight in model.parameters())
        gradients = sum(_bytes(weight) for weight in trained)
        reduced = 0.0
        if processes > 1 and not sharded:
            reduced = 2 * ring_bytes(gradients, processes)  # DDP's all-reduce, once in a step
            gradients *= 2  # DDP has them once more, in its buckets
        moments = sum(
            _bytes(value)
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.ndim
        )
        compute_in(model, config.model.torch_dtype)
        for channel in channels:
            costs.begin()
            recipe.loss(model, fakes, channel).total.backward()
            of_pack, working, largest = costs.work(), costs.peak - costs.base, costs.largest
            costs.begin()
            optimizer.step()
            of_update = costs.work()
            found[channel] = StepCost(
                channel=channel,
                tokens=len(pack),
                packs=packs,
                weights=weights,
                gradients=gradients,
                moments=moments,
                working=max(working, costs.peak - costs.base),
                largest=largest,
                pack=of_pack,
                update=replace(of_update, sent=of_update.sent + reduced),
                shapes=frozenset(costs.shapes),
            )
    return found


def _shard(config: Config, model: Any, processes: int) -> None:
    """Shard as accelerate does: layers, embedding and head are groups, and the rest is one.

    Tied, embedding and head are one group. The head's stays whole from its forward to its backward.
    """
    policy = sharded_policy(config.model.torch_dtype)
    mesh = init_device_mesh("cpu", (processes,))
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy)
    for module in list(model.modules()):
        if type(module).__name__ in model._no_split_modules:
            shard(module)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding.weight is head.weight
    if not tied:
        shard(embedding)
    shard([embedding, head] if tied else head, reshard_after_forward=False)
    shard(model)


def _bytes(tensor: torch.Tensor) -> int:
    """Of a tensor, or of this process's part of it."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.numel() * own.element_size()


def _on_fake(mode: Any, tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else cast("torch.Tensor", mode.from_tensor(tensor))
