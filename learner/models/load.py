"""Load the model to train with its processor, apply the tuner, and `Offload` the model.

Trained weights are float32, and the forward computes in `torch_dtype` (FULL-03). Accelerate's mixed
precision would keep 16-bit copies of all weights during a forward, and make a float32 copy of every
output. Losses, norms and sums are float32: autocast keeps those of the model, `learner.objectives`
has its own.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
)
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedModel,
    ProcessorMixin,
)

from learner.config.registry import model_family
from learner.config.schema import AttentionChoice, Config, LoraTuner, TunerConfig
from learner.data.checkpoint import Checkpoint
from learner.models.attention import attention_of
from learner.models.checkpoint_files import loading
from learner.models.coord_tokens import untrained, vocab_modules
from learner.models.families import Family, family_of
from learner.models.head import check_head, whole_model
from learner.models.layers import patch_embeddings, separate_segments, train_rows_alone, use_product
from learner.runs.console import counted
from learner.stages.tokens import CoordVocab, Tokenizer, token_table
from shared_contracts.errors import ContractError

_WHOLE = "Give the folder of a whole Qwen3-VL checkpoint, saved with its processor"

# Most names of parameters in an error, for each kind of fault.
_NAMED = 3
DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class LoadedModel:
    """A model with its processor.

    model: to train, possibly wrapped by peft. notes: messages for the terminal on what is trained.
    """

    model: nn.Module
    processor: ProcessorMixin
    notes: tuple[str, ...] = ()

    @property
    def family(self) -> Family:
        return family_of(whole_model(self.model))

    @property
    def inner(self) -> PreTrainedModel:
        """The multimodal module."""
        whole: Any = whole_model(self.model)
        inner: PreTrainedModel = whole.model
        return inner

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer: Tokenizer = self.processor.tokenizer
        return tokenizer

    @property
    def vocab(self) -> CoordVocab:
        return token_table(self.tokenizer).vocab


def on_meta(config: Config) -> PreTrainedModel:
    """Return the model that a run trains, without weights and tuner, on the meta device.

    Raises ContractError for a config of an unknown model, and as `check_head` and
    `patch_embeddings` do.
    """
    folder = Checkpoint(config.model.model).base
    try:
        described = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model_family(described.model_type)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForImageTextToText.from_config(
                described,
                dtype=weight_dtype(config),
                attn_implementation=attention_of(config.model.attn_implementation),
            )
    except (OSError, ValueError, KeyError, AttributeError) as error:
        do = "Give the folder of a Qwen3-VL checkpoint"
        raise ContractError(f"{folder}/config.json", f"describes no model ({error})", do) from error
    check_head(model)
    patch_embeddings(model, family_of(model).patch_embedding)
    return model


def load_model(config: Config) -> LoadedModel:
    """Load the checkpoint directory `model.model` onto the GPU, or the CPU."""
    return prepared(config, load_weights(config))


def load_weights(config: Config) -> PreTrainedModel:
    """Load the model of the checkpoint directory on the CPU.

    Raises ContractError as `on_meta`, before it reads weights, and as `read_model`.

    Trained weights are float32: rounding would lose most of a bfloat16 weight's update. Under LoRA
    the frozen weights have `torch_dtype`, and peft makes the adapters float32.
    """
    on_meta(config)
    with loading("model.model", str(config.model.model), _WHOLE):
        return read_model(
            config.model.model, weight_dtype(config), config.model.attn_implementation
        )


def check_parameters(checkpoint: Path, where: str = "model.model") -> None:
    """Raise ContractError if a checkpoint's files lack parameters of its config, or have others.

    Of an adapter, its base is checked, too. What transformers ties, renames, fuses or ignores is no
    fault. Of a base it reads names and shapes alone, on the meta device.

    The error, about `where`, has every kind of fault and the first names of each.
    """
    *adapters, folder = Checkpoint(checkpoint, where).chain
    with loading(where, str(folder), _WHOLE):
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            folder, device_map="meta", ignore_mismatched_sizes=True, output_loading_info=True
        )
    model, keys = loaded
    shapes = [f"{k} {list(held)}, not {list(own)}" for k, held, own in keys["mismatched_keys"]]
    kinds = {
        "in no file": keys["missing_keys"],
        "not of the model": keys["unexpected_keys"],
        "of another shape": shapes,
    }
    faults = [
        f"{len(names)} {kind}, first {', '.join(sorted(names)[:_NAMED])}"
        for kind, names in kinds.items()
        if names
    ]
    if faults:
        raise ContractError(
            where,
            f"parameters of {folder} do not fit its config.json: {'; '.join(faults)}",
            "Copy or save the whole checkpoint again, or correct config.json; its top-level key "
            "tie_word_embeddings says whether lm_head.weight is a separate parameter",
        )
    for adapter in adapters:
        with loading(where, str(adapter), _WHOLE):
            model = get_peft_model(model, PeftConfig.from_pretrained(str(adapter)))
            weights = load_peft_weights(str(adapter), device="cpu")
        own = get_peft_model_state_dict(model, save_embedding_layers=False)
        if lacking := sorted(own.keys() - weights.keys()):
            count = counted(len(lacking), "parameter")
            found = f"the adapter in {adapter} lacks {count}, first {lacking[0]}"
            raise ContractError(where, found, "Copy or save the whole adapter again")
        whole: Any = model.get_base_model()
        ends = whole.get_input_embeddings(), whole.get_output_embeddings()
        if whole.config.tie_word_embeddings and any(isinstance(end, LoraLayer) for end in ends):
            found = f"the adapter in {adapter} changes embedding or head, which share a weight"
            do = "Give an adapter without them: merged, it would change both"
            raise ContractError(where, found, do)
        model = model.unload()


def read_model(
    folder: Path, dtype: torch.dtype | Literal["auto"], attention: AttentionChoice = "auto"
) -> PreTrainedModel:
    """Load the model of a checkpoint, or of an adapter, which is merged into its base.

    Its `name_or_path` is the folder, which a new adapter on top of it will name as its base.

    Raises ContractError as `check_parameters` does, before weights are read.
    """
    check_parameters(folder)
    *adapters, base = Checkpoint(folder).chain
    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(
        base, dtype=dtype, attn_implementation=attention_of(attention)
    )
    for adapter in reversed(adapters):
        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    text = model.get_input_embeddings().weight
    if model.config.tie_word_embeddings and model.get_output_embeddings().weight is not text:
        raise ContractError(
            "model.model",
            f"{folder} has an lm_head.weight that differs from the embedding, and config.json says "
            "tie_word_embeddings: true, so that vLLM would not load it",
            "Set tie_word_embeddings to false, at the top level and in text_config",
        )
    model.name_or_path = model.config.name_or_path = str(folder)
    return model


def prepared(config: Config, model: PreTrainedModel) -> LoadedModel:
    """Move the model of `load_weights` to its device, and add its processor and tuner.

    Its forwards compute in `torch_dtype`.

    Raises ContractError for a directory without a processor, and as `use_product` and `tuned`.
    """
    with loading("model.model", str(config.model.model), _WHOLE):
        processor = read_processor(config.model.model)
    vocab = token_table(processor.tokenizer).vocab
    family = family_of(model)
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.nn.Module.to(model, "cuda" if torch.cuda.is_available() else "cpu")
    use_product(model, family.patch_embedding)
    if family.linear_attention is not None:
        separate_segments(model, family.linear_attention)
    rates = {"vision": config.training.vit_lr, "aligner": config.training.aligner_lr}
    for name, parameter in model.named_parameters():
        if rates.get(family.part_of(name)) == 0:  # saves its gradient and optimizer state
            parameter.requires_grad_(False)
    rows, notes = _rows_to_train(model, config.tuner, vocab)
    trained = tuned(model, config.tuner, rows)
    compute_in(trained, config.model.torch_dtype)
    return LoadedModel(trained, processor, notes)


def read_processor(folder: Path) -> ProcessorMixin:
    """Load the processor of a checkpoint, of an adapter, or of the adapter's base."""
    place = Checkpoint(folder).processor
    processor: ProcessorMixin = AutoProcessor.from_pretrained(place, trust_remote_code=False)
    if processor.chat_template is None:  # only tokenizer_config.json has it
        processor.chat_template = processor.tokenizer.chat_template
    return processor


def weight_dtype(config: Config) -> torch.dtype:
    if config.tuner.train_type == "lora" and config.model.torch_dtype == "bfloat16":
        return torch.bfloat16
    return torch.float32


def compute_in(model: nn.Module, dtype: DType) -> None:
    """Run forward and backward in `dtype`, without a conversion of outputs.

    Call it before DDP or FSDP2 wraps the model. A weight is used once in a forward, so autocast's
    cache of 16-bit copies would save no time and take 2 bytes per parameter.
    """
    if dtype == "bfloat16":
        device = next(model.parameters()).device.type
        in_bfloat16 = torch.autocast(device, torch.bfloat16, cache_enabled=False)
        model.forward = in_bfloat16(model.forward)


def sharded_policy(dtype: DType) -> MixedPrecisionPolicy:
    """FSDP2 gathers weights in `dtype` and sums gradients in float32."""
    if dtype == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _rows_to_train(
    model: PreTrainedModel, tuner: TunerConfig, vocab: CoordVocab
) -> tuple[list[int], tuple[str, ...]]:
    """Return the token ids whose rows are trained beside adapters, and a note."""
    if not isinstance(tuner, LoraTuner):
        return [], ()
    modules = vocab_modules(model)
    why = next(filter(None, (untrained(m.weight[vocab.ids].detach()) for m in modules)), None)
    key = "tuner.train_coordinate_rows"
    if tuner.train_coordinate_rows is True:
        return vocab.ids, ()
    if why is None:
        return [], ()
    rows = f"rows of the coordinate tokens look untrained ({why})"
    if tuner.adapts_rows or tuner.train_coordinate_rows is False:
        return [], (f"Warning: the {rows}, and {key} leaves them to the adapters",)
    return vocab.ids, (f"The {rows}: they are trained, too ({key})",)


def tuned(model: PreTrainedModel, tuner: TunerConfig, rows: Sequence[int] = ()) -> nn.Module:
    """Add the tuner's adapters to the model; without adapters return the model.

    rows: token ids whose rows of the embedding, and of an untied head, are trained as well.

    Raises ContractError for target modules that the model lacks or peft cannot adapt.
    """
    if not isinstance(tuner, LoraTuner):
        return model
    targets = tuner.target_modules
    if targets != "all-linear":
        _require_modules(model, targets)
    linear = family_of(model).language_linear
    own_rows = {"embed_tokens": list(rows)} if rows else None
    if own_rows and not model.config.tie_word_embeddings:
        own_rows["lm_head"] = list(rows)  # a tied head has the embedding's rows
    model.enable_input_require_grads()
    lora = LoraConfig(
        r=tuner.lora_rank,
        lora_alpha=tuner.lora_alpha,
        lora_dropout=tuner.lora_dropout,
        use_dora=tuner.use_dora,
        target_modules=linear if targets == "all-linear" else list(targets),
        trainable_token_indices=own_rows,
    )
    try:
        adapted = get_peft_model(model, lora)
    except ValueError as error:
        raise ContractError(
            "tuner.target_modules", f"peft cannot adapt them ({error})", "Name linear layers"
        ) from error
    train_rows_alone(adapted)
    return adapted


def _require_modules(model: nn.Module, targets: Sequence[str]) -> None:
    """peft checks only that one of the targets is found."""
    suffixes = [f".{name}" for name, _ in model.named_modules()]
    for target in targets:
        if not any(suffix.endswith(f".{target}") for suffix in suffixes):
            raise ContractError(
                "tuner.target_modules",
                f"the model has no module {target}",
                "Name modules as in peft, such as q_proj, or all-linear",
            )


def pinned_like(tensor: Tensor) -> Tensor | None:
    """Allocate page-locked host memory for a tensor of a GPU; None for a tensor of the host."""
    if tensor.is_cpu:
        return None
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError as error:
        raise ContractError(
            "rollout_matching.offload.enabled",
            f"no page-locked host memory for {tensor.nbytes} bytes ({str(error).splitlines()[0]})",
            "Set it to false, free host memory, or set rollout_matching.vllm.mode to server",
        ) from error


class Offload:
    """Moves the model and the optimizer's state to buffers in host memory, and back.

    A buffer is reused, and freed with its tensor. Those of the two moments that AdamW will make of
    each parameter are allocated at once, so that a lack of memory is found before the first step.

    model, optimizer: None is not moved.
    allocate: makes the buffer of a tensor; if it returns None, the tensor is not moved.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: Optimizer | None,
        allocate: Callable[[Tensor], Tensor | None] = pinned_like,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._allocate = allocate
        self._buffers = WeakTensorKeyDictionary()
        self._spare = defaultdict[Any, list[Tensor | None]](list)  # by shape and type
        for tensor in self._tensors():
            self._buffer(tensor)
        if optimizer is None:
            return
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        for weight in [*weights, *weights]:
            if weight not in optimizer.state:
                self._spare[weight.shape, weight.dtype].append(allocate(weight.data))

    @contextmanager
    def room(self) -> Iterator[None]:
        """Keep the tensors in host memory during the block."""
        moved: list[tuple[Tensor, torch.device]] = []
        try:
            for tensor in self._tensors():
                if (buffer := self._buffer(tensor)) is not None:
                    moved.append((tensor, tensor.device))
                    tensor.data = buffer.copy_(tensor.data, non_blocking=True)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # a push reads the buffers
                torch.cuda.empty_cache()  # for the engine
            yield
        finally:
            for tensor, device in moved:
                tensor.data = torch.empty_like(tensor.data, device=device).copy_(
                    tensor.data, non_blocking=True
                )

    def _buffer(self, tensor: Tensor) -> Tensor | None:
        held: Tensor | None = self._buffers.get(tensor)
        if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
            spare = self._spare[tensor.shape, tensor.dtype]
            held = self._buffers[tensor] = spare.pop() if spare else self._allocate(tensor.data)
        return held

    def _tensors(self) -> Iterator[Tensor]:
        """Yield each tensor once; gradients before their parameters."""
        if self.model is not None:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    yield parameter.grad
                yield parameter
            yield from self.model.buffers()
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))
