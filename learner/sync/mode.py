"""What a push sends: the adapter, until that fails; or full weights (SYNC-01)."""

import logging
import threading
from typing import Literal

from peft import PeftModel
from torch import nn

from learner.sync.adapter_source import AdapterWeights
from learner.sync.source import MergedWeights, WeightSource
from shared_contracts.errors import ContractError

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
        """For a model under training; raises ContractError for `adapter` without one."""
        if mode == "full":
            return cls(MergedWeights(model), None, fallback_to_full)
        if not isinstance(model, PeftModel):
            raise ContractError(
                MODE,
                "adapter, and the model is trained without one",
                "Use full, or train with tuner.train_type: lora",
            )
        return cls(MergedWeights(model), AdapterWeights(model), fallback_to_full)

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
                f"a push of the adapter failed, and {FALLBACK} is false: {self._failure}",
                f"Remove the cause, set {MODE} to full, or {FALLBACK} to true",
            ) from error
        if first:
            logger.warning("the adapter cannot be pushed, full weights are: %s", self._failure)
        return True
