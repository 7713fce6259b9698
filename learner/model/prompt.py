"""Prompts as the model's own processor and chat template encode them.

The server encodes with the same processor, so the ids agree by construction; ROLL-01
proves it on every rollout.
"""

import base64
import threading
from collections import OrderedDict
from pathlib import Path

import torch
from PIL import Image
from transformers import ProcessorMixin

from learner.data.images import UnreadableImage, open_upright, upright
from learner.model.packed_forward import EncodedPrompt
from learner.rollout.requests import build_request
from learner.types import Sample
from shared_contracts.errors import ContractError
from shared_contracts.infer import RolloutInferRequest


class PromptEncoder:
    """Encodes a sample's prompt; keeps the last encodings, `cache_bytes` of tensors at most.

    Several threads may call it.
    """

    def __init__(
        self,
        processor: ProcessorMixin,
        prompt: str,
        system: str | None,
        cache_bytes: int = 512 * 2**20,
    ) -> None:
        self._processor = processor
        self._prompt = prompt
        self._system = system
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._cache: OrderedDict[str, EncodedPrompt] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, sample: Sample) -> EncodedPrompt:
        with self._lock:
            return self._known_or_encoded(sample)

    def _known_or_encoded(self, sample: Sample) -> EncodedPrompt:
        if (known := self._cache.get(sample.sample_id)) is not None:
            self._cache.move_to_end(sample.sample_id)
            return known
        encoded = self._encode(sample)
        self._cache[sample.sample_id] = encoded
        self._cached_bytes += encoded.num_bytes
        while self._cached_bytes > self._cache_bytes:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= oldest.num_bytes
        return encoded

    def _encode(self, sample: Sample) -> EncodedPrompt:
        return encode_request(self._processor, build_request(sample, self._prompt, self._system))


def encode_request(processor: ProcessorMixin, request: RolloutInferRequest) -> EncodedPrompt:
    """The prompt of a request whose images are paths or data URLs, one for each image part.

    Raises ContractError, with the request's uuid, for an image that cannot be decoded.
    """
    messages = [message.model_dump(exclude_none=True) for message in request.messages]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    batch = processor(text=[text], images=_open_images(request) or None, return_tensors="pt")
    ids: torch.Tensor = batch["input_ids"][0]
    types = batch.get("mm_token_type_ids")
    return EncodedPrompt(
        ids=ids,
        mm_token_types=torch.zeros_like(ids) if types is None else types[0],
        pixel_values=batch.get("pixel_values"),
        image_grid_thw=batch.get("image_grid_thw"),
    )


def _open_images(request: RolloutInferRequest) -> list[Image.Image]:
    """RGB images, upright as their camera says, as the server opens them."""
    return [_opened(source, request.uuid) for source in request.images]


def _opened(source: str, uuid: str | None) -> Image.Image:
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
