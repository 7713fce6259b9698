"""Engines of a fixed latency on both sides: rollout servers, and a learner whose forwards wait."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.processes import Peer
from learner.models.packs import Pack, Segment
from learner.models.prompts import EncodedPrompt
from learner.objectives.logit_stats import ForwardStats, Reader, Selection, Supervision
from learner.objectives.pipeline import PackLoss, Pipeline
from learner.rollout.client import RolloutClient
from learner.rollout.server_pool import ServerPool
from learner.rollout.sync.push import WeightPusher
from learner.training.channels import ChannelA, ChannelB
from learner.types import AssessedRollout, Channel, RolloutOutput, Sample, Target
from shared_contracts.weights import CommunicatorReady, SyncReport, WeightStatus

PROMPT_TOKENS = 1_200
ANSWER_TOKENS = 300
TIMEOUT_S = 60.0


class FixedPushes(WeightPusher):
    """A pusher whose pushes cost nothing; every server takes every version."""

    def __init__(self, client: RolloutClient) -> None:
        self._epoch = client.info().server_epoch
        self._version = 0

    def connect(self) -> CommunicatorReady:
        return CommunicatorReady(
            weights_version=self._version,
            world_size=2,
            transport="gloo",
            server_epoch=self._epoch,
            dtype="float32",
        )

    def push(self, version: int) -> SyncReport:
        self._version = version
        status = WeightStatus(state="READY", weights_version=version, server_epoch=self._epoch)
        return SyncReport(status=status, seconds={"transfer": 0.0, "total": 0.0}, bytes=0)

    def abandon(self) -> None:
        """There is no group."""

    def close(self) -> None:
        """There is no group."""


@contextmanager
def fixed_servers(
    count: int, seconds: float, sequences: int, folder: Path, sigma: float = 0.0
) -> Iterator[ServerPool]:
    """A backend over `count` servers that decode `sequences` at once, each in `answer_s`."""
    args = list(map(str, [count, seconds, sigma, sequences, PROMPT_TOKENS, ANSWER_TOKENS]))
    log = folder / "servers.log"
    with Peer("benchmarks.peers.fixed_servers", args, log, {}, piped=True) as peer:
        clients = [RolloutClient(url, TIMEOUT_S) for url in json.loads(peer.read_line())]
        backend = ServerPool(clients, [FixedPushes(c) for c in clients], sequences)
        backend.connect()
        backend.push_weights(1)
        yield backend
        backend.close()


class Weights(nn.Module):
    """A model of one number: there is something to have gradients of."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(()))


class FixedA(ChannelA):
    """Segments of a few tokens, and forwards that take `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def segments(self, samples: Sequence[Sample]) -> list[Segment]:
        return [tiny_segment(sample.sample_id) for sample in samples]

    def forward_stats(self, model: nn.Module, pack: Pack, reader: Reader) -> ForwardStats:
        return waited(model, self._seconds)


class FixedB(ChannelB):
    """`FixedA` for channel B: no answer is assessed and no prompt encoded."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def ahead(self, samples: Sequence[Sample]) -> AbstractContextManager[None]:
        return nullcontext()

    def segments(
        self, samples: Sequence[Sample], rollouts: Sequence[RolloutOutput]
    ) -> tuple[list[Segment], list[AssessedRollout]]:
        return [tiny_segment(sample.sample_id) for sample in samples], []

    def forward_stats(self, model: nn.Module, pack: Pack, reader: Reader) -> ForwardStats:
        return waited(model, self._seconds)


def waited(model: nn.Module, seconds: float) -> ForwardStats:
    """In the place of stats, after a while: the loss itself."""
    time.sleep(seconds)
    assert isinstance(model, Weights)
    return cast(ForwardStats, model.number * 1.0)


class FixedPipeline(Pipeline):
    """An objective whose loss is there already."""

    def __init__(self) -> None:
        """There is nothing to declare."""

    def select(self, row: Supervision, channel: Channel) -> Selection:
        return cast(Selection, row)

    def reader(self, selection: Selection) -> Reader:
        return cast(Reader, selection)

    def __call__(self, stats: ForwardStats, selection: Selection, channel: Channel) -> PackLoss:
        return PackLoss(cast(Tensor, stats), {}, {}, 0)


def tiny_segment(sample_id: str) -> Segment:
    """One token of prompt and one of an answer, of which nothing is supervised."""
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type="qwen3_vl"))
    one, both = (torch.zeros(count, dtype=torch.long) for count in (1, 2))
    prompt = EncodedPrompt(one, one, None, None)
    target = Target([0], 0, [], np.zeros(1, dtype=np.int8), [])
    return Segment(model, sample_id, prompt, target, both, both.expand(4, 2), has_dropped=False)


def samples(count: int) -> list[Sample]:
    return [Sample(f"fixed:{number}", (), 64, 64, ()) for number in range(count)]
