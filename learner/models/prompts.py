"""Prompts, encoded by the model's processor, as the server encodes them, too (ROLL-01)."""

import base64
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from PIL import Image
from torch import Tensor
from transformers import ProcessorMixin

from learner.data.images import UnreadableImage, open_upright
from learner.data.jsonl import build_request
from learner.types import Sample
from shared_contracts.errors import ContractError
from shared_contracts.infer import RolloutInferRequest

# Threads of each process that encode prompts. Pillow, torch and the tokenizer release the GIL.
ENCODING_THREADS = min(4, os.cpu_count() or 1)

# Encoded prompts in the cache: 85 with an image of one megapixel (6 floats a pixel), so that a
# chunk of 64 can be encoded while servers answer it.
CACHE_BYTES = 2 * 2**30


@dataclass(frozen=True)
class EncodedPrompt:
    """An encoded prompt with expanded image placeholders.

    ids: (P,); mm_token_types: (P,), 0 for text, `IMAGE` for image tokens; pixel_values:
    (patches, dim) or None; image_grid_thw: (images, 3) or None.
    """

    ids: Tensor
    mm_token_types: Tensor
    pixel_values: Tensor | None
    image_grid_thw: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors, without the small grids."""
        tensors = (self.ids, self.mm_token_types, self.pixel_values)
        return sum(t.nbytes for t in tensors if t is not None)


class PromptEncoder:
    """Encodes prompts in `ENCODING_THREADS` threads, with a cache of `cache_bytes`.

    Several threads may call it. A sample in the cache is not encoded again. Callers of a sample get
    its error, which is not cached: the next caller encodes the sample again.
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
        # Running and finished ones, the least recently used first, and the bytes of the finished.
        self._encodings: OrderedDict[str, Future[EncodedPrompt]] = OrderedDict()
        self._sizes: dict[str, int] = {}
        # Samples of `ahead` without a caller yet.
        self._ahead: dict[str, Sample] = {}
        self._largest = 0  # bytes of any encoding so far

    def __call__(self, sample: Sample) -> EncodedPrompt:
        with self._lock:
            self._ahead.pop(sample.sample_id, None)
            encoding = self._encodings.get(sample.sample_id) or self._start(sample)
            self._encodings.move_to_end(sample.sample_id)
            self._start_ahead()
        return encoding.result()

    @contextmanager
    def ahead(self, samples: Sequence[Sample]) -> Iterator[None]:
        """Encode `samples` in order while the block runs, as far as the cache has room.

        The cache keeps each until its first caller, or until the block ends.
        """
        by_id = {sample.sample_id: sample for sample in samples}
        with self._lock:
            self._ahead |= by_id
            self._start_ahead()
        try:
            yield
        finally:
            with self._lock:
                for sample_id in by_id:
                    self._ahead.pop(sample_id, None)
                self._start_ahead()

    # Callers of these methods hold the lock, except of `_encode`, which runs in a thread.

    def _start(self, sample: Sample) -> Future[EncodedPrompt]:
        future = self._threads.submit(self._encode, sample)
        self._encodings[sample.sample_id] = future
        return future

    def _start_ahead(self) -> None:
        """Start samples of `ahead`, as long as encodings of the largest size so far fit."""
        waiting = sum(self._sizes.get(sample_id, 0) for sample_id in self._ahead)
        for sample_id, sample in self._ahead.items():
            running = len(self._encodings) - len(self._sizes)
            if running >= ENCODING_THREADS:
                return
            if sample_id in self._encodings:
                continue
            expected = waiting + (running + 1) * self._largest
            if expected > self._cache_bytes and (running or waiting):
                return
            with suppress(RuntimeError):  # the program ends
                self._start(sample)

    def _encode(self, sample: Sample) -> EncodedPrompt:
        size = None
        try:
            request = build_request(sample, self._prompt, self._system)
            encoded = encode_request(self._processor, request)
            size = encoded.num_bytes
            return encoded
        finally:
            with self._lock:
                self._finish(sample.sample_id, size)
                self._start_ahead()

    def _finish(self, sample_id: str, size: int | None) -> None:
        """Keep an encoding of `size` bytes, in the place of older ones; None: it has failed."""
        if size is None:
            del self._encodings[sample_id]
            self._ahead.pop(sample_id, None)
            return
        self._sizes[sample_id] = size
        self._largest = max(self._largest, size)
        used = [each for each in self._encodings if each in self._sizes and each not in self._ahead]
        while sum(self._sizes.values()) > self._cache_bytes and used:
            oldest = used.pop(0)
            del self._encodings[oldest], self._sizes[oldest]


def encode_request(processor: ProcessorMixin, request: RolloutInferRequest) -> EncodedPrompt:
    """Encode a request whose images are paths or data URLs, one for each image part.

    Raises ContractError, about the request's uuid, if an image cannot be decoded, or if the
    processor refuses it.
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
            "Replace its images, or remove the line; `learner data check --config` lists all",
        ) from error
    return EncodedPrompt(
        ids=batch["input_ids"][0],
        mm_token_types=batch["mm_token_type_ids"][0],
        pixel_values=batch.get("pixel_values"),
        image_grid_thw=batch.get("image_grid_thw"),
    )


def _opened(source: str, uuid: str | None) -> Image.Image:
    """Open an RGB image, turned upright by its EXIF orientation, as the server does."""
    is_data = source.startswith("data:")
    try:
        if is_data:
            return open_upright(BytesIO(base64.b64decode(source.partition(",")[2])))
        return open_upright(Path(source))
    except UnreadableImage as error:
        name = "in a data URL" if is_data else source
        raise ContractError(
            str(uuid),
            f"image {name} {error}",
            "Replace it; `learner data check` lists all such images",
        ) from error
