"""The `server` backend: rollouts from servers reached by URL."""

from collections.abc import Sequence
from functools import partial
from uuid import uuid4

from learner.rollout.backend import WeightChannel
from learner.rollout.client import RolloutClient
from learner.rollout.distribution import plan_chunks, rank_chunk_size
from learner.rollout.parallel import in_parallel
from learner.types import RolloutOutput
from shared_contracts.infer import InferCall, RequestConfig, RolloutEnvelope, RolloutInferRequest


class ServerBackend:
    """Spreads rollouts over servers in contiguous chunks and keeps their order and seeds.

    Once weights were pushed, the servers are asked for answers of these weights and no others.

    clients, weights: one per server, in the order of `servers[]`.
    decode_batch_size: most sequences decoded at once per rollout GPU (DIST-04).
    """

    def __init__(
        self,
        clients: Sequence[RolloutClient],
        weights: Sequence[WeightChannel],
        decode_batch_size: int,
    ) -> None:
        self._clients = clients
        self._weights = weights
        self._pushed: int | None = None
        self._world_sizes = [client.world_size() for client in clients]
        self._round = rank_chunk_size(decode_batch_size, self._world_sizes, learner_world_size=1)

    def connect(self) -> int:
        """Form the weight group with every server; returns their newest weights version."""
        return max(channel.connect().weights_version for channel in self._weights)

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        """Generate in rounds of at most `decode_batch_size` sequences per GPU."""
        outputs: list[RolloutOutput] = []
        for start in range(0, len(requests), self._round):
            outputs += self._round_of(requests[start : start + self._round], request_config, start)
        return outputs

    def push_weights(self, version: int) -> None:
        """Push to all servers at the same time."""
        in_parallel([partial(channel.push, version) for channel in self._weights])
        self._pushed = version

    def close(self) -> None:
        for channel in self._weights:
            channel.close()
        for client in self._clients:
            client.close()

    def _round_of(
        self, requests: Sequence[RolloutInferRequest], config: RequestConfig, first: int
    ) -> list[RolloutOutput]:
        calls = []
        for client, chunk in zip(
            self._clients, plan_chunks(len(requests), self._world_sizes), strict=True
        ):
            if chunk:
                body = InferCall(
                    infer_requests=list(requests[chunk.start : chunk.stop]),
                    request_config=_seeded(config, first + chunk.start),
                    request_id=uuid4().hex,
                    expected_weights_version=self._pushed,
                )
                calls.append(partial(client.infer, body))
        return [_output(envelope) for answer in in_parallel(calls) for envelope in answer]


def _seeded(config: RequestConfig, offset: int) -> RequestConfig:
    """The config of a chunk: its seed is that of its first request (SEED-01)."""
    if config.seed is None:
        return config
    return config.model_copy(update={"seed": config.seed + offset})


def _output(envelope: RolloutEnvelope) -> RolloutOutput:
    choice = envelope.response.choices[0]
    stamp = envelope.coordexp
    assert envelope.response.prompt_token_ids is not None
    assert choice.token_ids is not None
    return RolloutOutput(
        prompt_token_ids=envelope.response.prompt_token_ids,
        response_token_ids=choice.token_ids,
        text=choice.message.content,
        finish_reason=choice.finish_reason,
        repeat_terminated=choice.index in stamp.repeat_terminated_choices,
        weights_version=stamp.weights_version,
        seed=stamp.seed,
    )
