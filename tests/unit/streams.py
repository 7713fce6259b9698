"""A scripted backend in the place of servers that generate while the learner trains."""

from collections.abc import Generator, Sequence

from learner.rollout.backend import RolloutBackend
from learner.rollout.distribution import cut
from learner.types import RolloutOutput
from shared_contracts.infer import RequestConfig, RolloutInferRequest


class InChunks(RolloutBackend):
    """The answers of another backend, requested in chunks of `size`, lazily."""

    streams = True

    def __init__(self, backend: RolloutBackend, size: int) -> None:
        super().__init__(backend.journal)
        self._backend = backend
        self._size = size

    @property
    def round_size(self) -> int:
        return self._size

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        return self._backend.rollout(requests, request_config)

    def push_weights(self, version: int) -> None:
        self._backend.push_weights(version)

    def close(self) -> None:
        self._backend.close()

    def stream(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> Generator[list[RolloutOutput], None, None]:
        for part in cut(len(requests), self._size):
            assert request_config.seed is not None
            seeded = request_config.model_copy(update={"seed": request_config.seed + part.start})
            yield self.rollout(requests[part.start : part.stop], seeded)
