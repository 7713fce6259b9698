"""The seam between the trainer and whatever generates answers (ARCH-03)."""

from collections.abc import Sequence
from typing import Protocol

from learner.types import RolloutOutput
from shared_contracts.errors import RunError
from shared_contracts.infer import RequestConfig, RolloutInferRequest
from shared_contracts.weights import CommunicatorReady, SyncReport


class PushNeeded(RunError):
    """Nobody can answer before weights are pushed again; whoever may push is told."""


class WeightChannel(Protocol):
    """Puts the training weights into one server."""

    def connect(self) -> CommunicatorReady:
        """Form the weight group, once, with what the server says of itself then.

        Raises ContractError where one is formed anew and another learner has the server by now.
        """

    def push(self, version: int) -> SyncReport:
        """Make `version` the server's weights, in a group formed anew if there is none.

        The report has the learner's seconds too: `send` (until the server has everything)
        and `total`.

        Raises:
            RunError: the push broke. Another one may succeed, unless the cause is a
                ProblemError with status 422: the server will never take what is pushed.
            ContractError: as `connect` does.
        """

    def abandon(self) -> None:
        """Let go of the group of a server that was lost; the next push forms it anew."""

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
