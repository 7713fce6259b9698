"""A scripted backend in the place of servers that generate while the learner trains."""

from collections.abc import Generator

from learner.rollout.backend import RolloutBackend
from learner.rollout.distribution import cut
from learner.rollout.policy import Requests, Stream
from learner.types import RolloutOutput
from shared_contracts.infer import RequestConfig


def in_chunks(backend: RolloutBackend, size: int) -> Stream:
    """The answers of `backend`, requested in chunks of `size`, lazily."""

    def answers(
        requests: Requests, config: RequestConfig
    ) -> Generator[list[RolloutOutput], None, None]:
        for part in cut(len(requests), size):
            assert config.seed is not None
            seeded = config.model_copy(update={"seed": config.seed + part.start})
            yield backend.rollout(requests[part.start : part.stop], seeded)

    return answers
