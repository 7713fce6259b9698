"""The seam between the trainer and whatever generates answers (ARCH-03)."""

from collections.abc import Sequence
from typing import Protocol

from learner.types import RolloutOutput
from shared_contracts.infer import RequestConfig, RolloutInferRequest


class WeightChannel(Protocol):
    """Puts the training weights into one server."""

    def connect(self) -> int:
        """Form the weight group, once; the version of the server's weights."""

    def push(self, version: int) -> object:
        """Make `version` the server's weights."""

    def close(self) -> None:
        """Leave the group; idempotent."""


class RolloutBackend(Protocol):
    """Generates rollouts with the newest pushed weights."""

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        """Outputs in the order of the requests; request i is sampled with `seed + i`."""

    def push_weights(self, version: int) -> None:
        """Make `version` the weights of every later rollout."""

    def close(self) -> None:
        """Release connections; idempotent."""
