"""The processor of a model, of which a test sees when it encodes."""

import threading
import weakref
from typing import Any

from torch import Tensor
from transformers import BatchFeature, ProcessorMixin

WAIT_S = 60.0


class WatchedProcessor(ProcessorMixin):
    """Encodes with `processor`.

    at_once: no prompt is encoded before so many are being encoded at the same time.
    begun, ended: how many prompts. tensors: the pixels that were made, as long as they are kept.
    """

    def __init__(self, processor: ProcessorMixin, at_once: int = 1) -> None:
        self._processor = processor
        self._changed = threading.Condition()
        self._together = threading.Barrier(at_once)
        self.begun = self.ended = 0
        self.tensors = weakref.WeakSet[Tensor]()

    def __call__(self, *given: Any, **named: Any) -> BatchFeature:
        self._note("begun")
        self._together.wait(WAIT_S)
        batch: BatchFeature = self._processor(*given, **named)
        self.tensors.add(batch["pixel_values"])
        self._note("ended")
        return batch

    def apply_chat_template(self, *given: Any, **named: Any) -> Any:
        return self._processor.apply_chat_template(*given, **named)

    def wait_for(self, ended: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.ended >= ended, WAIT_S)

    def _note(self, what: str) -> None:
        with self._changed:
            setattr(self, what, getattr(self, what) + 1)
            self._changed.notify_all()
