"""Makes shares ready beside the learner, in a thread of its own.

share -> Sample -> RolloutOutput -> Segment -> Pack, by one version of the weights
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from learner.async_rollout.gate import Gate, GateShut
from learner.async_rollout.parts import Parts
from learner.async_rollout.queue import ReadyShare
from learner.async_rollout.stock import Stock
from learner.channels.b import ChannelB
from learner.channels.rollout_stats import RolloutStats
from learner.metrics import Payload
from learner.model.packed_forward import Pack, Segment
from learner.packer import Packer
from learner.packing import Place
from learner.rollout.backend import PushNeeded
from learner.rollout.policy import Policy
from learner.rollout.seeds import rank_seed_base, request_seed, rollout_seed_base
from learner.rollout_log import Judged
from learner.types import RolloutOutput, Sample
from shared_contracts.errors import RunError


@dataclass(frozen=True)
class MadeShare(ReadyShare[Pack]):
    """payload: what was counted while it was made. judged: what became of each answer.

    places: where the segments of those with a target went.
    """

    payload: Payload
    judged: Sequence[Judged]
    places: Sequence[Place]


class ShareMaker:
    """Has a share answered and packs it.

    samples_of: a share's. seed: `training.seed`; the seeds of share k are those of step k.
    gate: is open while `policy` may be asked.
    """

    def __init__(
        self,
        policy: Policy,
        channel_b: ChannelB,
        packer: Packer,
        samples_of: Callable[[int], Sequence[Sample]],
        seed: int,
        rank: int,
        gate: Gate,
    ) -> None:
        self._policy = policy
        self._channel_b = channel_b
        self._packer = packer
        self._samples_of = samples_of
        self._seed = seed
        self._rank = rank
        self._gate = gate

    def make(self, share: int) -> MadeShare:
        """Ask for a share round by round; weights may be pushed between two rounds."""
        samples = self._samples_of(share)
        base = rank_seed_base(rollout_seed_base(self._seed, share), self._rank)
        size = self._policy.round_size or len(samples)
        packs, stats, seconds = self._packer.begin(), RolloutStats(), 0.0
        parts, judged = Parts[Segment, Pack](packs), list[Judged]()
        for number, start in enumerate(range(0, len(samples), size)):
            of_round = samples[start : start + size]
            started = time.perf_counter()
            version, rollouts = self._answered(of_round, request_seed(base, 0, start))
            seconds += time.perf_counter() - started
            noted: list[Judged] = []
            segments, counted = self._channel_b.segments(of_round, rollouts, noted.append)
            stats.merge(counted)
            judged += [each._replace(chunk=number) for each in noted]
            parts.add(version, segments)
        made = parts.finished()
        payload = stats.payload()
        payload.merge(packs.payload())
        payload.rate({"rollout/per_second": (len(samples), seconds)})
        return MadeShare(share, made, payload, judged, packs.places)

    def _answered(self, samples: Sequence[Sample], seed: int) -> tuple[int, list[RolloutOutput]]:
        """With the version that answered; asks again after a push where that was needed."""
        while True:
            with self._gate.asking():
                version = self._policy.version
                try:
                    rollouts = self._policy.answer_by_pushed(samples, seed)
                except PushNeeded:
                    self._gate.push_wanted = True
                    continue
            return version, _answered_by(version, rollouts)


class Prefetcher:
    """The thread that keeps a stock filled. error: what ended it."""

    def __init__(self, stock: Stock[MadeShare], make: Callable[[int], MadeShare]) -> None:
        self.error: BaseException | None = None
        self._stock = stock
        self._make = make
        self._thread = threading.Thread(target=self._run, name="prefetcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for its end, once the stock is closed."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while (share := self._stock.begin()) is not None:
                self._stock.put(self._make(share))
        except GateShut:
            return
        except BaseException as error:  # noqa: BLE001 - raised in the learner, whatever it is
            self.error = error


def _answered_by(version: int, rollouts: list[RolloutOutput]) -> list[RolloutOutput]:
    """Raises RunError for answers that other weights had a part in."""
    versions = {version for rollout in rollouts for version in rollout.weights_version}
    if versions - {version}:
        raise RunError(f"weights of version {version} were asked, and {sorted(versions)} answered")
    return rollouts
