"""Prompts, segments and packs, and the one forward that serves both channels (PACK-04).

The server encodes prompts with the same processor, so the ids agree by construction; ROLL-01
proves it on every rollout.

A packed row holds several segments. Its bounds and the family's position ids, which restart per
segment, keep them apart where the forward gets no attention mask and no cache. A mistake there
would leak in silence, so `check_packing` proves the property on the loaded model before training
starts.
"""

import base64
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, ProcessorMixin

from learner.data.images import UnreadableImage, open_upright, upright
from learner.data.jsonl import build_request
from learner.models.attention import image_bounds, packed_bounds, without_search
from learner.models.families import Family, Multimodal, family_of, vision_inputs
from learner.models.families.qwen_vl import QWEN_VL
from learner.models.head import chunked, output_head
from learner.models.patches import PackedPatches, Patches, SmallestImage, pack_patches
from learner.objectives.logit_stats import HeadInput, Supervision
from learner.types import Role, Sample, Target
from shared_contracts.errors import ContractError
from shared_contracts.infer import RolloutInferRequest

T = TypeVar("T")

# A placeholder of an image among `mm_token_types`.
IMAGE = 1
# Threads of each process that encode prompts. Pillow, torch and the tokenizer release the GIL, so
# they run at the same time. More threads than cores only slow each other down.
ENCODING_THREADS = min(4, os.cpu_count() or 1)
# Of encoded prompts that a process keeps: 85 with an image of one megapixel (6 floats a pixel), so
# that a chunk of 64 can be encoded while servers answer it.
CACHE_BYTES = 2 * 2**30


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model's own processor encodes it, image placeholders expanded.

    ids: (P,); mm_token_types: (P,) 0 text, `IMAGE`; pixel_values: (patches, dim) or None;
    image_grid_thw: (images, 3) or None.
    """

    ids: Tensor
    mm_token_types: Tensor
    pixel_values: Tensor | None
    image_grid_thw: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors that grow with the prompt and its images."""
        tensors = (self.ids, self.mm_token_types, self.pixel_values)
        return sum(t.nbytes for t in tensors if t is not None)


@dataclass(frozen=True)
class Segment:
    """One sample, teacher-forced: prompt (P ids) + target (T ids), L = P + T.

    has_dropped: the rollout lost an invalid object (LOSS-01's multiplier).
    patches: of `Family.patches`.
    kept_logprobs: those that the engine gave the first target ids, which are the rollout's own, in
        nats; none where they were not requested (LOGP-01).
    """

    sample_id: str
    prompt: EncodedPrompt
    target: Target
    input_ids: Tensor
    position_ids: Tensor
    has_dropped: bool
    family: Family = QWEN_VL
    patches: Patches | None = None
    kept_logprobs: Sequence[float] = ()

    def __len__(self) -> int:
        return int(self.input_ids.numel())


@dataclass(frozen=True)
class Pack:
    """Segments in one row of L tokens: input_ids (1, L), position_ids as the family has them.

    bounds: (segments + 1,) int32, where each segment starts, and L. longest: tokens of the longest.
    patches: None where the vision tower computes it itself; else the grids stay on the host.
    """

    sample_ids: list[str]
    input_ids: Tensor
    position_ids: Tensor
    mm_token_types: Tensor
    pixel_values: Tensor | None
    image_grid_thw: Tensor | None
    supervision: Supervision
    bounds: Tensor
    longest: int
    family: Family = QWEN_VL
    patches: PackedPatches | None = None

    def __len__(self) -> int:
        return int(self.input_ids.numel())

    def to(self, device: torch.device) -> "Pack":
        moved = (Tensor, Supervision, PackedPatches)
        stays = () if self.patches is None else ("image_grid_thw",)
        parts: dict[str, Any] = {
            name: part.to(device) if isinstance(part, moved) and name not in stays else part
            for name, part in vars(self).items()
        }
        return Pack(**parts)


def make_segment(
    model: Multimodal,
    sample_id: str,
    prompt: EncodedPrompt,
    target: Target,
    has_dropped: bool,
    kept_logprobs: Sequence[float] = (),
) -> Segment:
    """Join a prompt and its target. `model` is the inner multimodal model."""
    tail = torch.tensor(target.token_ids, dtype=torch.long)
    ids = torch.cat([prompt.ids, tail])
    types = torch.cat([prompt.mm_token_types, torch.zeros_like(tail)])
    family = family_of(model)
    positions = family.positions(model, ids, types, prompt.image_grid_thw)
    patches = family.patches(model, prompt.image_grid_thw)
    segment = Segment(
        sample_id, prompt, target, ids, positions, has_dropped, family, patches, kept_logprobs
    )
    _check_supervised_span(segment)
    return segment


def _check_supervised_span(segment: Segment) -> None:
    """Every supervised index lies in the assistant span (APPEND-03)."""
    length = len(segment.target.token_ids)
    for group in segment.target.coord_groups:
        for position in group.positions:
            if not 0 <= position < length:
                raise ContractError(
                    segment.sample_id,
                    f"supervised index {position} lies outside the {length} assistant tokens",
                    "This is a defect of the target construction; please report the sample",
                )


def _supervision(segments: Sequence[Segment]) -> Supervision:
    roles: list[Tensor] = []
    dropped: list[Tensor] = []
    positions: list[int] = []
    bins: list[float] = []
    boxes: list[list[int]] = []
    departures: list[list[int]] = []
    kept: list[int] = []
    logprobs: list[float] = []
    offset = 0
    for segment in segments:
        prompt_len = segment.prompt.ids.numel()
        prompt_roles = torch.full((prompt_len,), int(Role.PROMPT), dtype=torch.int8)
        roles += [prompt_roles, torch.from_numpy(segment.target.role)]
        dropped.append(torch.full((len(segment),), segment.has_dropped))
        for group in segment.target.coord_groups:
            if group.is_box:
                boxes.append(list(range(len(positions), len(positions) + 4)))
            positions += [offset + prompt_len + p for p in group.positions]
            bins += group.bins
        for position, token_id in segment.target.departures:
            departures.append([offset + prompt_len + position, token_id])
        kept += [offset + prompt_len + p for p in range(len(segment.kept_logprobs))]
        logprobs += segment.kept_logprobs
        offset += len(segment)
    return Supervision(
        input_ids=torch.cat([s.input_ids for s in segments]),
        roles=torch.cat(roles),
        has_dropped=torch.cat(dropped),
        coord_positions=torch.tensor(positions, dtype=torch.long),
        coord_bins=torch.tensor(bins, dtype=torch.float32),
        boxes=torch.tensor(boxes, dtype=torch.long).view(-1, 4),
        departures=torch.tensor(departures, dtype=torch.long).view(-1, 2),
        kept_positions=torch.tensor(kept, dtype=torch.long),
        kept_logprobs=torch.tensor(logprobs, dtype=torch.float32),
    )


def make_pack(segments: Sequence[Segment]) -> Pack:
    """Concatenate segments; labels and slots move by each segment's offset."""
    pixels = [s.prompt.pixel_values for s in segments if s.prompt.pixel_values is not None]
    grids = [s.prompt.image_grid_thw for s in segments if s.prompt.image_grid_thw is not None]
    types = [
        torch.cat([s.prompt.mm_token_types, torch.zeros(len(s.target.token_ids), dtype=torch.long)])
        for s in segments
    ]
    family = segments[0].family
    patches = [s.patches for s in segments if s.patches is not None]
    lengths = [len(segment) for segment in segments]
    return Pack(
        sample_ids=[s.sample_id for s in segments],
        input_ids=torch.cat([s.input_ids for s in segments])[None],
        position_ids=family.position_ids(torch.cat([s.position_ids for s in segments], dim=1)),
        mm_token_types=torch.cat(types)[None],
        pixel_values=torch.cat(pixels) if pixels else None,
        image_grid_thw=torch.cat(grids) if grids else None,
        supervision=_supervision(segments),
        bounds=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        longest=max(lengths),
        family=family,
        patches=pack_patches(patches) if patches else None,
    )


def packed_forward(
    model: nn.Module,
    pack: Pack,
    read: Callable[[HeadInput], T],
    embeddings: Tensor | None = None,
) -> T:
    """One forward of the pack, without a cache; what `read` makes of the input of the head.

    `read` runs in the place of the head, within the model's forward: there FSDP2 has the head's
    weights, and what it returns is the output of whatever wraps the model.

    embeddings: (1, L, hidden) in the place of the token ids; the model looks for its image
        placeholders in them and puts what it sees there.
    """
    head = output_head(model)
    given: list[Tensor] = []

    def before(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        given.append(args[0])
        return (args[0][:, :0],)

    def instead(_: nn.Module, __: tuple[Tensor], nothing: Tensor) -> T:
        return read(HeadInput(given.pop().squeeze(0), chunked(head), nothing.shape[-1]))

    # `instead` runs before FSDP2's own hook. So FSDP2 gathers the head again before the backward of
    # what `read` returns, for each of several forwards.
    hooks = [
        head.register_forward_pre_hook(before),
        head.register_forward_hook(instead, prepend=True),
    ]
    try:
        with _known_on_host(model, pack.family, pack.bounds, pack.patches, pack.image_grid_thw):
            output = model(
                input_ids=pack.input_ids if embeddings is None else None,
                inputs_embeds=embeddings,
                position_ids=pack.position_ids,
                **vision_inputs(pack.family, pack, pack.mm_token_types),
                **packed_bounds(pack.bounds, pack.longest),
                attention_mask=None,
                use_cache=False,
            )
    finally:
        for hook in hooks:
            hook.remove()
    found: T = output.logits
    return found


@contextmanager
def _known_on_host(
    model: nn.Module,
    family: Family,
    bounds: Tensor,
    patches: PackedPatches | None = None,
    grids: Tensor | None = None,
) -> Iterator[None]:
    """Within the block, forwards of `model` get what the host knows of a pack.

    So the host waits for nothing that it knows. Hooks hand it to the modules inside of `model`: DDP
    and FSDP2 move every tensor that they are called with to the device, and FSDP2 rounds it.
    """
    inner: Any = _inner_of(model, family)
    if inner is None:
        yield
        return
    of_inner = without_search(inner.config.get_text_config(), bounds)
    hooks = []
    if patches is not None:
        of_inner["image_grid_thw"] = grids
        of_tower = {
            **patches.rows,
            **image_bounds(inner.config.vision_config, patches, family.windowed(inner)),
        }
        hooks.append(_adding(family.vision_tower(inner), of_tower))
    hooks.append(_adding(inner, of_inner))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _inner_of(model: nn.Module, family: Family) -> Multimodal | None:
    """The multimodal module, whatever the model is wrapped in.

    None for a model that is not one of transformers.
    """
    whole = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    return None if whole is None else family.inner(whole)


def _adding(module: nn.Module, arguments: dict[str, Any]) -> RemovableHandle:
    """A hook that calls `module` with these in addition to its arguments, or in their place."""

    def add(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, **arguments}

    return module.register_forward_pre_hook(add, with_kwargs=True)


@torch.no_grad()
def check_packing(model: nn.Module, family: Family = QWEN_VL) -> None:
    """Prove that segments of a packed row cannot see each other (PACK-04).

    Changes the text and the image of the first of two segments and asks whether the second one's
    logits move.

    Raises:
        ContractError: they do; the attention implementation does not separate segments.
    """
    was_training = model.training
    model.eval()
    moved = (_second_of_two(model, family, 1) - _second_of_two(model, family, 2)).abs().max().item()
    model.train(was_training)
    if not moved <= 1e-3:  # also where it is no number
        raise ContractError(
            "training.packing",
            f"packed segments see each other with this model and attention (logits move by "
            f"{moved:.3g})",
            "Set model.attn_implementation to auto or sdpa, or training.packing to false",
        )


def _second_of_two(model: nn.Module, family: Family, first: int) -> Tensor:
    """Logits (L, V) of the second of two segments in a row, whose first one follows `first`."""
    device = next(model.parameters()).device
    ids = [torch.full((8,), first), torch.arange(1, 9)]
    types = torch.zeros(8, dtype=torch.long)
    positions = family.text_positions(8)
    bounds = torch.tensor([0, 8, 16], dtype=torch.int32, device=device)
    arguments: dict[str, Any] = packed_bounds(bounds, 8)
    patches, grids = None, None
    inner = _inner_of(model, family)
    if inner is not None and (image := family.smallest_image(inner)) is not None:
        types[0] = IMAGE
        for own in ids:
            own[0] = image.token
        grid = image.image_grid_thw
        positions = family.positions(inner, ids[0], types, grid)
        if (known := family.patches(inner, grid)) is not None:
            patches = pack_patches([known, known]).to(device)
        grids = grid.repeat(2, 1) if patches is not None else grid.repeat(2, 1).to(device)
        pixels = torch.cat([first * image.pixel_values, image.pixel_values]).to(device)
        images = SmallestImage(image.token, pixels, grids)
        arguments |= vision_inputs(family, images, types.repeat(2)[None].to(device))
    with _known_on_host(model, family, bounds, patches, grids):
        output = model(
            input_ids=torch.cat(ids)[None].to(device),
            position_ids=family.position_ids(positions.repeat(1, 2)).to(device),
            **arguments,
            attention_mask=None,
            use_cache=False,
        )
    logits: Tensor = output.logits[0, 8:]
    return logits


class PromptEncoder:
    """Encodes prompts in `ENCODING_THREADS` threads, and keeps at most `cache_bytes` of tensors.

    Several threads may call it; each sample is encoded once while there is room for it. An error
    is raised to the callers of its sample and not kept: the next caller encodes it again.
    """

    def __init__(
        self,
        processor: ProcessorMixin,
        prompt: str,
        system: str | None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._processor = processor
        self._prompt = prompt
        self._system = system
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(ENCODING_THREADS, "encoder")
        self._running: dict[str, Future[EncodedPrompt]] = {}
        self._kept: OrderedDict[str, EncodedPrompt] = OrderedDict()  # the least recently used first
        self._kept_bytes = 0
        # Samples of `ahead` that nobody has asked for yet, and the bytes of those that are kept.
        self._ahead: dict[str, Sample] = {}
        self._ahead_bytes = 0
        self._largest = 0  # bytes of any encoding so far

    def __call__(self, sample: Sample) -> EncodedPrompt:
        with self._lock:
            self._release([sample.sample_id])
            if (known := self._kept.get(sample.sample_id)) is not None:
                self._kept.move_to_end(sample.sample_id)
                self._start_ahead()
                return known
            encoding = self._running.get(sample.sample_id) or self._start(sample)
        return encoding.result()

    @contextmanager
    def ahead(self, samples: Sequence[Sample]) -> Iterator[None]:
        """Encode `samples` in order while the block runs, as far as the cache has room.

        Their encodings are kept until a caller asks for them or the block ends.
        """
        wanted = {sample.sample_id: sample for sample in samples}
        with self._lock:
            known = self._kept.keys() & (wanted.keys() - self._ahead.keys())
            self._ahead_bytes += sum(self._kept[each].num_bytes for each in known)
            self._ahead |= wanted
            self._start_ahead()
        try:
            yield
        finally:
            with self._lock:
                self._release(wanted)
                self._start_ahead()

    # All of these need the lock, except `_encode`, which runs in a thread of its own.

    def _start(self, sample: Sample) -> Future[EncodedPrompt]:
        future = self._threads.submit(self._encode, sample)
        self._running[sample.sample_id] = future
        return future

    def _start_ahead(self) -> None:
        """Start what is wanted ahead, as long as encodings of the largest size fit."""
        for sample_id, sample in self._ahead.items():
            if len(self._running) >= ENCODING_THREADS:
                return
            if sample_id in self._kept or sample_id in self._running:
                continue
            expected = self._ahead_bytes + (len(self._running) + 1) * self._largest
            if expected > self._cache_bytes and (self._running or self._ahead_bytes):
                return
            with suppress(RuntimeError):  # the program ends
                self._start(sample)

    def _encode(self, sample: Sample) -> EncodedPrompt:
        encoded = None
        try:
            request = build_request(sample, self._prompt, self._system)
            encoded = encode_request(self._processor, request)
            return encoded
        finally:
            with self._lock:
                del self._running[sample.sample_id]
                if encoded is None or not self._keep(sample.sample_id, encoded):
                    self._ahead.pop(sample.sample_id, None)  # its caller starts it again
                self._start_ahead()

    def _keep(self, sample_id: str, encoded: EncodedPrompt) -> bool:
        """Return whether there is room beside the encodings that are kept for their callers."""
        size = encoded.num_bytes
        self._largest = max(self._largest, size)
        while self._kept_bytes + size > self._cache_bytes:
            oldest = next((each for each in self._kept if each not in self._ahead), None)
            if oldest is None:
                return False
            self._kept_bytes -= self._kept.pop(oldest).num_bytes
        self._kept[sample_id] = encoded
        self._kept_bytes += size
        self._ahead_bytes += size if sample_id in self._ahead else 0
        return True

    def _release(self, sample_ids: Iterable[str]) -> None:
        for each in sample_ids:
            if self._ahead.pop(each, None) is not None and each in self._kept:
                self._ahead_bytes -= self._kept[each].num_bytes


def encode_request(processor: ProcessorMixin, request: RolloutInferRequest) -> EncodedPrompt:
    """The prompt of a request whose images are paths or data URLs, one for each image part.

    Raises ContractError, with the request's uuid, for an image that cannot be decoded or that the
    processor refuses.
    """
    messages = [message.model_dump(exclude_none=True) for message in request.messages]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    images = [_opened(source, request.uuid) for source in request.images] or None
    try:
        batch = processor(text=[text], images=images, return_tensors="pt")
    except ValueError as error:
        raise ContractError(
            str(request.uuid),
            f"the model's processor refuses it ({error})",
            "Replace its images, or remove the line; `learner data check --config` finds every one",
        ) from error
    ids: torch.Tensor = batch["input_ids"][0]
    types = batch.get("mm_token_type_ids")
    if types is None:
        types = (batch["input_ids"] == getattr(processor, "image_token_id", None)).long()
    return EncodedPrompt(
        ids=ids,
        mm_token_types=types[0],
        pixel_values=batch.get("pixel_values"),
        image_grid_thw=batch.get("image_grid_thw"),
    )


def _opened(source: str, uuid: str | None) -> Image.Image:
    """An RGB image, upright as its camera says, as the server opens it."""
    is_data = source.startswith("data:")
    try:
        if is_data:
            return upright(base64.b64decode(source.partition(",")[2]))
        return open_upright(Path(source))
    except UnreadableImage as error:
        name = "in a data URL" if is_data else source
        raise ContractError(
            str(uuid),
            f"image {name} {error}",
            "Replace it; `learner data check` tells all there are",
        ) from error
