"""A step on fake tensors, which have shapes and no memory: what `learner estimate` is held to.

    HostValues   integers of the host stay real, so that lengths and indices are known
    Costs        live memory, FLOPs, bytes and messages of the operations
    fake_step    the step of a run: its packs, its recipe, its model, FSDP2 and the optimizer

HostValues and Costs are open over torch's `FakeTensorMode`.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from learner.config.schema import Config
from learner.models.gpus import Gpu
from learner.models.layers import separate_segments, use_product
from learner.models.load import LoadedModel, compute_in, sharded_policy
from learner.models.packs import IMAGE, Pack
from learner.operate.step_cost import longest_pack, meta_model, ring_bytes
from learner.training.channels import Recipe, recipe_of
from learner.training.trainer import build_optimizer
from learner.types import Channel, Sample
from tests.unit.tensor_shapes import as_on_cuda

_aten = torch.ops.aten
# Backward of attention computes the scores once more: 5 products instead of 2 (Dao,
# "FlashAttention-2", arXiv 2307.08691, section 3.1).
_BACKWARD = 2.5

# Operations between processes, and those around which FSDP2 changes the memory of tensors.
_MESSAGES = {"c10d", "_c10d_functional"}
_SHARDING = {"fsdp"} | _MESSAGES


class HostValues(TorchDispatchMode):
    """Operations on integers of the host run for real; a number asked of a fake tensor is 1.

    Positions, bounds and image grids are such integers. The one number that a step asks of its
    fake tensors is whether logits are within their limits; 1 stands for yes.

    images: (1, L) bool, where the pack has image placeholders. Where embeddings are fed back, the
    model finds them by comparing embeddings, and a comparison of fake tensors has no result.
    """

    def __init__(self, images: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._images = images

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented  # the same is asked of its local part
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        fake = any(isinstance(each, FakeTensor) for each in tensors)
        if func is _aten._local_scalar_dense.default and fake:
            return True if args[0].dtype == torch.bool else 1.0
        if func is _aten._grouped_mm.default and fake:
            return _grouped_product(*args, **kwargs)
        if fake:
            return func(*map(self._counted, args), **kwargs)
        floats = any(isinstance(each, float) for each in tree_leaves(args))
        dtype = kwargs.get("dtype")
        if tensors or not (floats if dtype is None else dtype.is_floating_point):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _counted(self, index: Any) -> Any:
        """Masks among indices, as the integers that they stand for."""
        if not isinstance(index, list | tuple):
            return index
        found: list[Any] = []
        for each in index:
            if isinstance(each, Tensor) and each.dtype == torch.bool:
                mask = self._images if isinstance(each, FakeTensor) else each
                assert mask.shape == each.shape
                with unset_fake_temporarily():
                    found += mask.nonzero().unbind(1)
            else:
                found.append(each)
        return found


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor, *_: Any) -> Tensor:
    """Rows in groups times a matrix for each: (S, K), (E, K, N) -> (S, N).

    Or the gradient of these matrices: (K, S), (S, N) -> (E, K, N). torch's own shapes are for
    bfloat16 alone, though the operation computes in other types, too.
    """
    shape = (len(a), b.shape[-1]) if b.ndim == 3 else (len(offs), len(a), b.shape[-1])
    return a.new_empty(shape)


@dataclass
class Costs(TorchDispatchMode):
    """Counts the cost of operations on fake tensors while it is open. A view costs nothing.

    operations, sent: of `FakeStep`, since `begin`. live: bytes of the fake tensors that exist;
    base: those that existed at `begin`. peak: the most since then. shapes: of all tensors.
    """

    operations: Counter[tuple[float, int]] = field(default_factory=Counter)
    sent: float = 0.0
    live: int = 0
    base: int = 0
    peak: int = 0
    shapes: set[tuple[int, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._begun = False

    def begin(self) -> None:
        gc.collect()
        gc.freeze()  # what is there now need not be looked at again
        self.operations, self.sent = Counter(), 0.0
        self.base = self.peak = self.live
        self._begun = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented
        found = func(*args, **(kwargs or {}))
        if func.namespace in _SHARDING:
            self._look_again()
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, FakeTensor)]
        made = [t for t in tree_leaves(found) if isinstance(t, FakeTensor)]
        if not given and not made:
            return found
        if func.namespace in _MESSAGES:
            whole = max(tensor.numel() * tensor.element_size() for tensor in (*given, *made))
            self.sent += _sent(func._schema.name, whole)
        old = {_key(tensor) for tensor in given}
        fresh = [tensor for tensor in made if _key(tensor) not in old]
        for tensor in fresh:
            self._add(tensor)
        if fresh or func._schema.is_mutable:
            moved = sum({_key(t): t.numel() * t.element_size() for t in (*given, *made)}.values())
            self.operations[_flops(func, args, kwargs or {}, found), moved] += 1
        return found

    def _add(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key in self._storages:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self._storages[key] = (size, weakref.ref(storage))
        weakref.finalize(storage, self._drop, key)
        self.shapes.add(tuple(tensor.shape))
        self.live += size
        if self._begun and self.live > self.peak:
            self._note()

    def _drop(self, key: int) -> None:
        self.live -= self._storages.pop(key)[0]

    def _look_again(self) -> None:
        """FSDP2 frees the memory of whole parameters and takes it again, without a new tensor."""
        for key, (size, storage) in list(self._storages.items()):
            if (there := storage()) is not None and there.nbytes() != size:
                self._storages[key] = (there.nbytes(), storage)
                self.live += there.nbytes() - size
        if self._begun and self.live > self.peak:
            self._note()

    def _note(self) -> None:
        """A new peak. Tensors that only a cycle of references keeps do not count."""
        if self.live > 1.01 * self.peak:
            gc.collect()
        self.peak = max(self.peak, self.live)


def _key(tensor: Tensor) -> int:
    """Return the key of its memory, which views share."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _sent(name: str, whole: int) -> float:
    """Bytes that this process sends. whole: of the tensor that all processes have parts of."""
    plain = name.replace("_", "")
    rounds = 2 if "allreduce" in plain else "allgather" in plain or "reducescatter" in plain
    return rounds * ring_bytes(whole, dist.get_world_size())


def _flops(func: Any, args: Any, kwargs: Mapping[str, Any], found: Any) -> float:
    """Count by torch's formulas, and packed attention by the lengths of its segments."""
    name = func._schema.name
    if name == "torch_attn::_varlen_attn":
        return _attention(args[0], args[3], causal=args[7])
    if name == "torch_attn::_varlen_attn_backward":
        return _BACKWARD * _attention(args[1], args[6], causal=args[10])
    if name == "aten::_grouped_mm":
        return float(2 * args[0].numel() * args[1].shape[-1])
    if name == "aten::convolution_backward" and args[9] > 1:  # torch's formula forgets the groups
        return float(4 * args[0].numel() * args[2][0].numel())
    formula = flop_registry.get(func._overloadpacket)
    return float(formula(*args, **kwargs, out_val=found)) if formula is not None else 0.0


def _attention(query: Tensor, bounds: Tensor, *, causal: bool) -> float:
    """Two products over each segment's square, or half of it.

    query: (L, heads, width). bounds: (segments + 1,).
    """
    with unset_fake_temporarily():
        squares = float(bounds.diff().double().square().sum())
    return (2 if causal else 4) * query.shape[1] * query.shape[2] * squares


@contextmanager
def faked(costs: Costs, images: Tensor, device: str = "cuda") -> Iterator[FakeTensorMode]:
    """Within the block floats are fake.

    images: of `HostValues`. device: whose way attention and the chunks of logits take.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, HostValues(images):
        try:
            with as_on_cuda() if device == "cuda" else nullcontext(), costs:
                yield mode
        finally:
            gc.unfreeze()


@contextmanager
def fake_processes(count: int) -> Iterator[None]:
    """Within the block this process is the first of so many, and what they exchange is nothing."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def put_on_fakes(model: nn.Module) -> None:
    """Fake tensors in the place of a model's on the meta device; those of the host stay real.

    What was tied stays tied. To be called within `faked`.
    """
    known: dict[int, Any] = {}

    def fake(tensor: Tensor) -> Any:
        if id(tensor) not in known:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            known[id(tensor)] = made
        return known[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.device.type == "meta":
                    tensors[name] = fake(tensor)


@dataclass(frozen=True)
class FakeStep:
    """Counts of what `StepCost` estimates. shapes: of every tensor.

    operations: of a pack, how many there are of each (FLOPs, bytes of memory). sent: its bytes to
    other processes.
    """

    tokens: int
    weights: int
    working: int
    operations: Mapping[tuple[float, int], int]
    sent: float
    shapes: frozenset[tuple[int, ...]]

    @property
    def flops(self) -> float:
        return sum(count * flops for (flops, _), count in self.operations.items())

    def seconds(self, gpu: Gpu) -> float:
        """Least seconds of a pack: each operation is bound by arithmetic or by memory."""
        return sum(
            count * max(flops / gpu.flops, moved / gpu.bandwidth)
            for (flops, moved), count in self.operations.items()
        )


def step_model(config: Config) -> LoadedModel:
    """`meta_model`, set up for a step as `prepared` does."""
    loaded = meta_model(config)
    model: Any = loaded.model
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    use_product(model, loaded.family.patch_embedding)
    if loaded.family.linear_attention is not None:
        separate_segments(model, loaded.family.linear_attention)
    model.train()
    return loaded


def fake_step(
    config: Config,
    samples: Sequence[Sample],
    channel: Channel,
    processes: int = 1,
    device: str = "cuda",
) -> FakeStep:
    loaded = step_model(config)
    recipe = recipe_of(config, loaded)
    pack, _ = longest_pack(config, recipe.channel_a.segments(samples))
    return fake_steps(config, loaded, recipe, pack, [channel], processes, device)[channel]


def fake_steps(
    config: Config,
    loaded: LoadedModel,
    recipe: Recipe,
    pack: Pack,
    channels: Iterable[Channel],
    processes: int = 1,
    device: str = "cuda",
) -> dict[Channel, FakeStep]:
    """Run a pack of each channel on fake tensors, in one of several processes.

    Gradients and the optimizer's moments exist before the forward, as from the second pack on.

    loaded: of `step_model`; it cannot be used afterwards. recipe: of it.
    """
    costs, found, tokens = Costs(), dict[Channel, FakeStep](), len(pack)
    sharded = config.training.data_parallel == "fsdp2"
    several = fake_processes(processes) if sharded else nullcontext()
    with several, faked(costs, pack.mm_token_types == IMAGE, device) as mode:
        model: Any = loaded.model
        put_on_fakes(model)
        if sharded:
            _shard(config, model, processes)
        fakes = pack
        if pack.pixel_values is not None:
            fakes = replace(pack, pixel_values=mode.from_tensor(pack.pixel_values))
        optimizer = build_optimizer(model, config.training, loaded.family)
        for weight in model.parameters():
            if weight.requires_grad:
                weight.grad = torch.zeros_like(weight)
        optimizer.step()  # makes the moments
        weights = sum(_bytes(weight) for weight in model.parameters())
        compute_in(model, config.model.torch_dtype)
        for channel in channels:
            costs.begin()
            recipe.loss(model, fakes, channel).total.backward()
            operations, sent, peak = costs.operations, costs.sent, costs.peak - costs.base
            costs.begin()
            optimizer.step()
            peak = max(peak, costs.peak - costs.base)
            shapes = frozenset(costs.shapes)
            found[channel] = FakeStep(tokens, weights, peak, operations, sent, shapes)
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


def _bytes(tensor: Tensor) -> int:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.numel() * own.element_size()
