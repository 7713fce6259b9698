"""What a push sends, in the names of the Hugging Face checkpoint and the engines' type (SYNC-01).

    MergedWeights     full weights; LoRA and DoRA merged layer by layer, in a copy (SYNC-02)
    GatheredWeights   full weights of a sharded model
    AdapterWeights    the adapter alone
    SyncMode          the adapter, until a push of it fails; then full weights
    Outgoing          digests of what is sent (SYNC-06)

The model in training is never touched. Tied weights appear once, under their first name. Experts,
which transformers fuses, are sent one by one: engines load them so for every family.
"""

import copy
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shared_contracts.digests import countable_bits, matrix_shape, multipliers, sample, written
from shared_contracts.errors import ContractError, RunError
from shared_contracts.rollout_config import Verify
from shared_contracts.weights import AdapterMeta, DtypeName, ParameterDigest, ParameterMeta

# What transformers stacks in the weights of all experts.
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}

# What of peft a base weight is merged with.
Adapted = LoraLayer | TrainableTokensLayer


class Weights(Protocol):
    """Named tensors; the same order in `metadata` and in every pass of `tensors`."""

    def metadata(self, dtype: DtypeName) -> list[ParameterMeta]:
        """Name, type and shape of what `tensors` yields, without making any of it."""

    def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        """(name, detached tensor of `dtype`), one after another."""


class WeightSource(Weights, Protocol):
    """What one push sends.

    adapter: of a source that yields an adapter's tensors instead of full weights.
    base: the weights that the adapter is over.
    """

    @property
    def adapter(self) -> AdapterMeta | None: ...

    @property
    def base(self) -> Weights | None: ...


class SourceChoice(Protocol):
    """Which weights a push sends; one choice may serve pushes to several servers at once."""

    def current(self) -> WeightSource:
        """What to send now."""

    def failed(self, source: WeightSource, error: Exception) -> bool:
        """Told that a push of `source` failed; true: push what is `current` then instead."""


class OneSource:
    """Always the same weights; a push that failed is not tried with others."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def current(self) -> WeightSource:
        return self._source

    def failed(self, source: WeightSource, error: Exception) -> bool:
        return False


class BaseWeights:
    """All weights of a model but its adapters, as they were before those."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model.get_base_model() if isinstance(model, PeftModel) else model

    def metadata(self, dtype: DtypeName) -> list[ParameterMeta]:
        """Name, type and shape of what `tensors` yields, without making any of it."""
        return [
            ParameterMeta(name=name, dtype=dtype, shape=list(part.shape))
            for fused, weight, _ in self._entries()
            for name, part in _experts_apart(fused, torch.empty(weight.shape, device="meta"))
        ]

    def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, weight); a weight that needs no cast is the model's."""
        for name, weight, _ in self._entries():
            yield from _experts_apart(name, weight.detach().to(getattr(torch, dtype)))

    def _entries(self) -> Iterator[tuple[str, Tensor, Adapted | None]]:
        """(checkpoint name, parameter, its adapted layer when it has to be merged)."""
        for name, weight in self._model.named_parameters():
            owner, _, leaf = name.rpartition(".")
            if ".lora_" in f".{name}" or ".trainable_tokens_" in name:
                continue
            plain = name.replace(".token_adapter.", ".").replace(".base_layer.", ".")
            layer: Adapted | None = None
            if leaf == "weight" and owner.endswith(".base_layer"):
                found = self._model.get_submodule(owner.removesuffix(".base_layer"))
                assert isinstance(found, Adapted)
                layer = found
            yield plain, weight, layer


class MergedWeights(BaseWeights):
    """All weights of a model, LoRA and DoRA merged."""

    adapter = None
    base = None

    @torch.no_grad()
    def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, weight); a weight that needs neither merge nor cast is the model's."""
        for name, weight, layer in self._entries():
            merged = weight.detach() if layer is None else _merged_weight(layer)
            yield from _experts_apart(name, merged.to(getattr(torch, dtype)))


class GatheredWeights(BaseWeights):
    """All weights of a model of which every process holds shards (FSDP2).

    What is sent are the weights at the last `gather`, in memory of the host and in the type of
    the servers. They stay there until the next one and are not gathered while they are sent: a
    server that was lost is pushed to while the other processes generate or train, each server
    takes them at its own speed, and a push that breaks leaves no process in a collective.

    sends: this process keeps them, to send them; the others help to gather them.
    """

    adapter = None
    base = None

    def __init__(self, model: nn.Module, *, sends: bool) -> None:
        super().__init__(model)
        self._sends = sends
        self._whole: dict[str, Tensor] = {}

    @torch.no_grad()
    def gather(self, dtype: DtypeName) -> None:
        """Put every parameter together, one after another; all processes at the same time.

        Each shard is cast before it travels. On the device of the model one parameter is whole at
        a time. A host tensor of the last call is written to again.
        """
        for name, weight, _ in self._entries():
            self._keep(name, _gathered(weight.detach().to(getattr(torch, dtype))))

    def _keep(self, name: str, whole: Tensor) -> None:
        if not self._sends:
            return
        if (kept := self._whole.get(name)) is None or kept.dtype != whole.dtype:
            kept = self._whole[name] = torch.empty_like(whole, device="cpu")
        kept.copy_(whole)

    def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, weight); one that needs no cast is kept until the next `gather`."""
        assert self._whole, "`gather` comes before a push, which another process makes"
        for name, weight in self._whole.items():
            yield from _experts_apart(name, weight.to(getattr(torch, dtype)))


def _experts_apart(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split the fused weights of E experts into views, one for each matrix; others stay whole.

    transformers holds `experts.gate_up_proj` (E, 2 * I, H) and `experts.down_proj` (E, H, I), with
    the gate's rows first. Checkpoints of some families have them transposed.
    """
    owner, _, leaf = name.rpartition(".")
    if not owner.endswith(".experts") or leaf not in _FUSED or weight.ndim != 3:
        yield name, weight
        return
    for number, matrix in enumerate(weight):
        for part, rows in zip(_FUSED[leaf], matrix.chunk(len(_FUSED[leaf])), strict=True):
            yield f"{owner}.{number}.{part}.weight", rows


def _gathered(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _merged_weight(layer: Adapted) -> Tensor:
    if isinstance(layer, TrainableTokensLayer):
        return layer.get_merged_weights(layer.active_adapters).detach()
    merged = copy.deepcopy(layer)
    merged.merge()
    weight = merged.get_base_layer().weight
    assert isinstance(weight, Tensor)
    return weight.detach()


class AdapterWeights:
    """What is trained, for engines that have all other weights already.

    Every property and method raises RunError where the adapter says not all that training
    changed, or not how it is to be scaled.
    """

    def __init__(self, model: PeftModel) -> None:
        self._model = model

    @property
    def adapter(self) -> AdapterMeta:
        name, config = self._one()
        layers = [layer for layer in self._model.modules() if isinstance(layer, LoraLayer)]
        shapes = {(layer.r[name], layer.scaling[name]) for layer in layers}
        if len(shapes) > 1:
            raise RunError(f"the adapter's layers have several (rank, scaling): {sorted(shapes)}")
        return AdapterMeta(
            r=config.r,
            lora_alpha=config.lora_alpha,
            target_modules=sorted({name.split(".")[-3] for name in self._state()}),
            use_dora=config.use_dora,
            use_rslora=config.use_rslora,
        )

    @property
    def base(self) -> BaseWeights:
        """What the engines must have: the model's weights without the adapter."""
        return BaseWeights(self._model)

    def metadata(self, dtype: DtypeName) -> list[ParameterMeta]:
        """Name, type and shape of each tensor of the adapter."""
        return [
            ParameterMeta(name=name, dtype=dtype, shape=list(tensor.shape))
            for name, tensor in self._state().items()
        ]

    def tensors(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        """(name as in peft's files, tensor); one that needs no cast is the model's."""
        for name, tensor in self._state().items():
            yield name, tensor.detach().to(getattr(torch, dtype))

    def check(self) -> None:
        """Raise RunError where the adapter is not all that is trained."""
        self._one()

    def _state(self) -> dict[str, Tensor]:
        name, _ = self._one()
        state: dict[str, Tensor] = get_peft_model_state_dict(
            self._model, adapter_name=name, save_embedding_layers=False
        )
        return state

    def _one(self) -> tuple[str, LoraConfig]:
        """The adapter that is trained, which must be all that is."""
        active = self._model.active_adapters
        if len(active) != 1:
            raise RunError(f"adapters {active} are active, and only one can be pushed")
        config = self._model.peft_config[active[0]]
        if not isinstance(config, LoraConfig):
            raise RunError(f"the adapter is of peft type {config.peft_type}, not LoRA")
        for name, parameter in self._model.named_parameters():
            if ".trainable_tokens_" in name:
                raise RunError(
                    "rows of coordinate tokens are trained, too (tuner.train_coordinate_rows), "
                    "and engines accept them only with full weights"
                )
            if parameter.requires_grad and ".lora_" not in name:
                raise RunError(f"{name} is trained in addition to the adapter")
        return active[0], config


logger = logging.getLogger(__name__)

MODE = "rollout_matching.vllm.sync.mode"
FALLBACK = "rollout_matching.vllm.sync.fallback_to_full"


class SyncMode:
    """Which weights the pushes to all servers of a run send (a `SourceChoice`).

    Begins with `adapter`, where there is one. The first push of it that fails, in whatever
    way, ends that for the rest of the run; pushes that were under way go the same way.
    Methods may be called from several threads.

    fallback_to_full: false has `failed` raise instead.
    """

    def __init__(
        self, full: WeightSource, adapter: WeightSource | None, fallback_to_full: bool
    ) -> None:
        self._full = full
        self._adapter = adapter
        self._fallback_to_full = fallback_to_full
        self._lock = threading.Lock()
        self._failure: str | None = None

    @classmethod
    def of(
        cls, model: nn.Module, mode: Literal["full", "adapter"], fallback_to_full: bool
    ) -> "SyncMode":
        """For a model under training.

        An adapter that is not all that is trained counts as a failed push from the start.
        Raises ContractError for `adapter` without one.
        """
        if mode == "full":
            return cls(MergedWeights(model), None, fallback_to_full)
        if not isinstance(model, PeftModel):
            raise ContractError(
                MODE,
                "is adapter, and the model is trained without an adapter",
                "Use full, or train with tuner.train_type: lora",
            )
        adapter = AdapterWeights(model)
        chosen = cls(MergedWeights(model), adapter, fallback_to_full)
        try:
            adapter.check()
        except RunError as error:
            chosen.failed(adapter, error)
        return chosen

    @property
    def mode(self) -> Literal["full", "adapter"]:
        """What is sent now."""
        return "adapter" if self.current() is self._adapter else "full"

    @property
    def fallback(self) -> str | None:
        """The failure, with its type, since which full weights are sent; None without one."""
        return self._failure if self._fallback_to_full else None

    def current(self) -> WeightSource:
        return self._full if self._adapter is None or self.fallback else self._adapter

    def failed(self, source: WeightSource, error: Exception) -> bool:
        """Raises ContractError where the adapter failed and full weights are not wanted."""
        if source is not self._adapter:
            return False
        with self._lock:
            first = self._failure is None
            if first:
                self._failure = f"{type(error).__name__}: {error}"
        if not self._fallback_to_full:
            raise ContractError(
                MODE,
                f"the adapter cannot be pushed, and {FALLBACK} is false: {self._failure}",
                f"Remove the cause, set {MODE} to full, or {FALLBACK} to true",
            ) from error
        if first:
            logger.warning(
                "the adapter cannot be pushed, so full weights are pushed: %s", self._failure
            )
        return True


# Elements digested at once: on a processor their 64-bit products stay in its cache.
_CPU_CHUNK, _GPU_CHUNK = 2**15, 2**24

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Columns of a parameter that are digested; None for all.
Columns = list[int] | None


def verified_columns(
    verify: Verify, parameters: Sequence[ParameterMeta], version: int
) -> dict[str, Columns]:
    """Which parameters a push of `version` has digests of, by name."""
    match verify:
        case "off":
            return {}
        case "sample":
            return dict(sample(parameters, version))
        case "full":
            return {parameter.name: None for parameter in parameters}


class Outgoing:
    """One pass of weights: as it goes by, the parameters in `columns` are digested.

    newest: name of the last one that was taken; None before the first.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]], columns: dict[str, Columns]) -> None:
        self._weights = weights
        self._columns = columns
        self._sums: dict[str, Tensor] = {}
        self.newest: str | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._weights:
            self.newest = name
            if name in self._columns:
                self._sums[name] = digest_sum(weight, self._columns[name])
            yield name, weight

    def digests(self) -> list[ParameterDigest]:
        """Of what went by so far, in that order."""
        return [
            ParameterDigest(name=name, columns=self._columns[name], digest=written(int(total)))
            for name, total in self._sums.items()
        ]


def digests_of(
    weights: Iterable[tuple[str, Tensor]], columns: dict[str, Columns]
) -> list[ParameterDigest]:
    """Of weights that go nowhere."""
    passed = Outgoing(weights, columns)
    for _ in passed:
        pass
    return passed.digests()


@torch.no_grad()
def digest_sum(weight: Tensor, columns: Columns) -> Tensor:
    """The digest of `shared_contracts.digests` as a 64-bit scalar on the weight's device."""
    height, width = matrix_shape(weight.shape)
    if columns is None:
        return _all(weight.reshape(-1))
    chosen = torch.tensor(columns, dtype=torch.int64, device=weight.device)
    rows = torch.arange(height, device=weight.device)[:, None]
    return _terms(weight.reshape(height, width)[:, chosen], rows * width + chosen).sum()


def _all(flat: Tensor) -> Tensor:
    chunk = _CPU_CHUNK if flat.device.type == "cpu" else _GPU_CHUNK
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), chunk):
        part = flat[start : start + chunk]
        total += _terms(part, torch.arange(start, start + part.numel(), device=flat.device)).sum()
    return total


def _terms(weight: Tensor, positions: Tensor) -> Tensor:
    bits = weight.contiguous().view(_SIGNED[weight.element_size()]).to(torch.int64)
    dtype = cast(DtypeName, str(weight.dtype).removeprefix("torch."))
    terms: Tensor = countable_bits(bits, dtype) * multipliers(positions)
    return terms
