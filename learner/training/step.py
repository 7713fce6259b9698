"""One optimizer step, readable from top to bottom.

    StepRunner.run()
        ranks agree on the channel
        A: samples -> segments -> packs      B: the packs of a RolloutSource
        ranks agree on the number of forwards (DDP-02), and with rewards on the number of answer
        tokens (GROUP-03)
        a forward and a backward per pack -> loss, gradients, report
        B, with log-probabilities: the mismatch of engine and trainer is checked (LOGP-01)

A step takes all of its raw samples at once, in both channels. It runs as many packed forwards as
they need. Then the caller makes one optimizer update (STEP-02).
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from learner.config.rollout_matching import DecodeMode
from learner.config.schema import Config
from learner.distributed.peers import SINGLE_PROCESS, Peers, broadcast_from_rank0
from learner.models.flops import DeviceUse
from learner.models.packs import Pack, make_pack
from learner.objectives.mismatch import ALL, TOKEN_KINDS, Mismatch
from learner.rollout.policy import Policy
from learner.runs.metrics import PhaseClock, StepReport, mismatch_payload, over_processes
from learner.stages.packing import Chunk, forwards_due
from learner.training.channels import Recipe
from learner.training.synchronous_rollouts import (
    LogRollouts,
    PackFeed,
    RolloutSource,
    begin_packs,
)
from learner.types import Channel, Sample
from shared_contracts.errors import RunError

_LOG = logging.getLogger(__name__)
_NO_MORE: Chunk[Pack] = Chunk((), True)


@dataclass
class _Step:
    """One step of this rank, while it runs. samples: its part of the batch.

    use: of the device. tokens, flops: sums over the packs so far. mismatches: of the packs with
    kept tokens.
    """

    model: nn.Module
    samples: Sequence[Sample]
    accelerator: Accelerator
    report: StepReport
    clock: PhaseClock
    use: DeviceUse
    tokens: int = 0
    flops: float = 0.0
    mismatches: list[Mismatch] = field(default_factory=list)


class StepRunner:
    """Runs the forwards and backwards of one optimizer step.

    log_calls: takes one record of each channel-B step (SEED-02).
    source: makes the packs of channel B; None: they are made in this step.
    log_rollouts: logs the answers of a step that makes its packs itself (MET-03).
    bad_samples: returns how many samples were replaced since its last call.
    """

    def __init__(
        self,
        config: Config,
        recipe: Recipe,
        policy: Policy | None,
        log_calls: Callable[[dict[str, Any]], None] | None = None,
        peers: Peers = SINGLE_PROCESS,
        source: RolloutSource | None = None,
        log_rollouts: LogRollouts | None = None,
        bad_samples: Callable[[], int] | None = None,
    ) -> None:
        self._config = config
        self._recipe = recipe
        self._policy = policy
        self._log_calls = log_calls
        self._peers = peers
        self._bad_samples = bad_samples
        self._repush = None if policy is None else policy.repush_restarted
        self._warned = False
        self.source = source or RolloutSource(
            config, policy, recipe.channel_b, peers.rank, log_rollouts
        )

    def run(
        self, model: nn.Module, samples: Sequence[Sample], step: int, accelerator: Accelerator
    ) -> tuple[Tensor, StepReport]:
        """Accumulate the gradients of step `step` over `samples`, this rank's part.

        Returns this rank's loss (scalar, detached) and the report of all ranks. The loss of the
        step is the mean over the ranks.

        Raises RunError, in all ranks, if the mismatch of engine and trainer is above its bound.
        """
        clock, use = PhaseClock(), DeviceUse(next(model.parameters()).device)
        use.begin()
        with clock.phase("step"):
            report = self._begin(step, clock)
            this = _Step(model, samples, accelerator, report, clock, use)
            loss = (
                self._channel_a_step(this) if report.channel == "A" else self._channel_b_step(this)
            )
        if self._policy is not None:
            self._policy.mark_updated()
        report.payload.merge(self.source.payload())
        if self._bad_samples is not None:
            report.payload.add({"data/bad_samples": self._bad_samples()})
        report.payload.note({"step/channel_b": report.channel == "B", **clock.metrics()})
        self._note_use(this)
        report.metrics = over_processes(report.payload, loss.device).metrics()
        self._warn_if_underfilled(report)
        most = self._config.rollout_matching.max_logprob_mismatch
        if most is not None and report.channel == "B":
            self._peers.all_gather(partial(_check_mismatch, report, most))
        return loss, report

    def _warn_if_underfilled(self, report: StepReport) -> None:
        training, fill = self._config.training, report.metrics.get("packing/post_rollout_fill", 0.0)
        least = training.packing_min_fill_ratio
        if training.packing and 0 < fill < least and not self._warned:
            self._warned = True
            _LOG.warning(
                "packs are filled to %.0f %%, under training.packing_min_fill_ratio %.0f %%: "
                "a smaller global_max_length or a larger effective_batch_size fills them better "
                "(said once; see packing/post_rollout_fill)",
                100 * fill,
                100 * least,
            )

    def _note_use(self, this: _Step) -> None:
        seconds, payload = this.clock.seconds("learn"), this.report.payload
        payload.note({"perf/peak_memory_gib": this.use.peak_gib()})
        payload.rate({"perf/tokens_per_s": (this.tokens, seconds)})
        if this.use.gpu is not None:
            payload.rate({"perf/mfu": (this.flops, seconds * this.use.gpu.flops)})

    def _begin(self, step: int, clock: PhaseClock) -> StepReport:
        """Choose the channel by rank 0's schedule; A if a rank has no batch for B."""
        self.source.begin(step, clock)
        wanted: Channel = broadcast_from_rank0(self._peers, lambda: self._recipe.channel(step))
        report = StepReport(step, wanted)
        if wanted == "B" and not all(self._peers.all_gather(partial(self.source.ready, step))):
            report.channel = "A"
            report.payload.note({"stage2_ab/async/b_step_skipped_due_to_queue": 1})
        return report

    def _channel_a_step(self, this: _Step) -> Tensor:
        this.samples = self.source.samples(this.report.step, this.samples)
        packs = begin_packs(self._config)

        def chunks() -> Iterator[Chunk[Pack]]:
            with this.clock.phase("target"):
                segments = self._recipe.channel_a.segments(this.samples)
            with this.clock.phase("pack"):
                made = packs.chunk(segments, last=True)
            yield Chunk(made, last=True)

        loss = self._learn(this, chunks())
        this.report.payload.merge(packs.payload())
        if self.source.asynchronous:
            self._note_calls(this.report)
        return loss

    def _channel_b_step(self, this: _Step) -> Tensor:
        """Channel B: a push of the newest weights, answers, segments of the corrected answers."""
        assert self._policy is not None, "a run with channel B has a policy"
        feed: PackFeed | None = None
        try:
            with self.source.feed(this.report.step, this.samples, this.clock) as feed:
                loss = self._learn(this, feed.chunks)
        finally:
            self._note_calls(this.report, feed)
        this.report.payload.merge(feed.payload())
        if self._config.rollout_matching.logprobs:
            this.report.payload.merge(mismatch_payload(Mismatch.joined(this.mismatches)))
        chosen = self._config.rollout_matching.decode_mode
        modes = {f"rollout/decode_{mode}": mode == chosen for mode in get_args(DecodeMode)}
        active = self._policy.backend.repeat_terminate_active
        this.report.payload.note({"rollout/repeat_terminate_active": active, **modes})
        return loss

    def _note_calls(self, report: StepReport, feed: PackFeed | None = None) -> None:
        """Log the calls for rollouts, also after a failure.

        feed: of the answers that the step trains on. With async rollouts the logged calls belong
        to later steps, so their seeds start from other bases (RES-23).
        """
        assert self._policy is not None
        record, payload = self._policy.take_notes()
        report.payload.merge(payload)
        base = {}
        if feed is not None:
            base = {"rollout_seed_base": feed.seed_base}
            report.payload.note({"rollout/seed_base": feed.seed_base})
        if self._log_calls is not None:
            self._log_calls({"step": report.step + 1, **base, **record})

    def _learn(self, this: _Step, chunks: Iterator[Chunk[Pack]]) -> Tensor:
        """Run a forward and a backward per pack, weighted by its fraction of the samples (LOSS-05).

        Gradients are averaged over ranks with equally many samples, so the fractions of each
        rank's own samples give the loss of the whole step. FSDP2 averages in every backward, so no
        rank holds a whole gradient (RES-18); DDP averages in the last one.
        """
        model, accelerator, payload = this.model, this.accelerator, this.report.payload
        device, channel = next(model.parameters()).device, this.report.channel
        total = torch.zeros((), device=device)
        latest: Pack | None = None
        replays = 0
        segments, tokens = len(this.samples), None
        sharded = self._config.training.data_parallel == "fsdp2"
        if channel == "B" and self._config.group_relative is not None:
            segments *= self._config.answers_per_sample
            chunks, tokens = self._counted(chunks, this.clock)
        for pack, last in self._in_lockstep(chunks, this.clock):
            if pack is not None:
                latest, fraction = pack, len(pack.sample_ids) / segments
            else:
                if latest is None:  # a prompt of this rank and an answer without objects
                    empty = [replace(sample, objects=()) for sample in this.samples[:1]]
                    latest = make_pack(self._recipe.channel_a.segments(empty))
                fraction = 0.0
                replays += 1
            own = tokens if tokens is None or pack is None else fraction * tokens
            synced = nullcontext() if last or sharded else accelerator.no_sync(model)
            with this.clock.phase("learn"), synced:
                found = self._recipe.loss(model, latest.to(device), channel, own)
                loss = fraction * found.total
                accelerator.backward(loss)
                if last and device.type == "cuda":  # else the clock stops before the backward
                    torch.cuda.synchronize(device)
            total += loss.detach()
            if pack is not None:
                this.tokens += len(pack)
                if this.use.gpu is not None:
                    this.flops += self._recipe.flops(model, pack, channel)
                of_step = fraction / self._peers.count
                payload.add({key: of_step * value for key, value in found.atoms.items()})
                payload.rate(found.tokens)
                if found.mismatch is not None:
                    this.mismatches.append(found.mismatch)
                if found.slots:
                    diagnostics = found.diagnostics.items()
                    payload.rate({key: (value, found.slots) for key, value in diagnostics})
        payload.add({"step/replays": replays})
        return total

    def _counted(
        self, chunks: Iterator[Chunk[Pack]], clock: PhaseClock
    ) -> tuple[Iterator[Chunk[Pack]], float]:
        """Return all packs of the step as one chunk, and the mean number of kept tokens of a rank.

        A pack with the fraction f of its rank's samples then has the denominator `f * tokens`:
        weighted by f, and averaged over the ranks, the losses are the mean over all tokens.
        """
        packs: list[Pack] = []

        def collect() -> int:
            packs.extend(pack for chunk in chunks for pack in chunk.packs)
            return sum(len(pack.supervision.kept_positions) for pack in packs)

        with clock.phase("wait"):
            tokens = self._peers.all_gather(collect, self._repush)
        return iter([Chunk(packs, last=True)]), sum(tokens) / len(tokens)

    def _in_lockstep(
        self, chunks: Iterator[Chunk[Pack]], clock: PhaseClock
    ) -> Iterator[tuple[Pack | None, bool]]:
        """Yield (pack, whether it is the last one); None: replay a pack with weight zero.

        After each chunk every rank runs as many packs as the rank with the fewest has ready. At
        the end it runs as many as the rank with the most. So no rank waits for a forward that
        never runs. The last backward synchronizes gradients; if no pack is left, all replay one.
        """
        ready: deque[Pack] = deque()

        def take() -> tuple[int, bool]:
            packs, last = next(chunks, _NO_MORE)
            ready.extend(packs)
            return len(ready), last

        over = unsynced = False
        while not over:
            with clock.phase("wait"):
                counts, ended = zip(*self._peers.all_gather(take, self._repush), strict=True)
            over = all(ended)
            for left in reversed(range(forwards_due(counts, ended, unsynced=unsynced))):
                unsynced = not (over and left == 0)
                yield (ready.popleft() if ready else None), not unsynced


def _check_mismatch(report: StepReport, most: float) -> None:
    """Raise RunError if the mean mismatch of all ranks is above `most` nats (LOGP-01)."""
    means = {
        kind: report.metrics[f"mismatch/{kind}_mean"]
        for kind in TOKEN_KINDS
        if f"mismatch/{kind}_mean" in report.metrics
    }
    mean = means.pop(ALL, 0.0)
    if mean <= most:
        return
    by_kind = ", ".join(f"{kind} {nats:.3g}" for kind, nats in means.items())
    raise RunError(
        f"step {report.step + 1}: the log-probabilities of engine and trainer differ by "
        f"{mean:.3g} nats in the mean of {report.metrics['mismatch/tokens']:.0f} tokens "
        f"({by_kind}), more than rollout_matching.max_logprob_mismatch, {most:g}. Compare "
        "the engine's dtype with model.torch_dtype. Verify the pushes, by "
        "rollout_matching.vllm.sync.verify: full. Look for stale weights in sync/weights_version "
        "and stage2_ab/async/version_lag"
    )
