"""One optimizer step, readable from top to bottom.

    run()   ranks agree on the channel
            A: samples -> segments -> packs        B: a source of packs, see `in_step`
            -> as many forwards and backwards on every rank -> loss, gradients, report

A step takes all of its raw samples at once, whichever channel it runs. How many packed
forwards they need is free; the caller makes one optimizer update of them (STEP-02).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

from torch import Tensor, nn

from learner.channels.a import ChannelA
from learner.channels.b import ChannelB
from learner.config.rollout_matching import DecodeMode
from learner.config.schema import Config
from learner.forwards import Engine, Forwards
from learner.in_step import InStep, LogRollouts, PackFeed, RolloutSource
from learner.losses.pipeline import Pipeline
from learner.metrics import PhaseClock, StepReport
from learner.metrics.processes import over_processes
from learner.model.packed_forward import Pack, make_pack
from learner.overlap import ahead
from learner.packer import Packer
from learner.packing import Chunk
from learner.peers import ALONE, Peers, first
from learner.rollout.policy import Policy
from learner.rollout.seeds import rollout_seed_base
from learner.schedule import channel_for_step
from learner.types import Channel, Sample


@dataclass(frozen=True)
class _Step:
    """One step of this rank, while it runs. samples: its share."""

    model: nn.Module
    samples: Sequence[Sample]
    engine: Engine
    report: StepReport
    clock: PhaseClock


class StepRunner:
    """Runs the forwards and backwards of one optimizer step.

    policy: who answers in channel B; None in a run without channel B.
    log_calls: takes one record of each channel-B step (SEED-02).
    source: of channel B's packs, where they are not made within the step.
    log_rollouts: takes the answers of each channel-B step made within it (MET-03).
    """

    def __init__(
        self,
        config: Config,
        channel_a: ChannelA,
        channel_b: ChannelB,
        pipeline: Pipeline,
        policy: Policy | None,
        log_calls: Callable[[dict[str, Any]], None] | None = None,
        peers: Peers = ALONE,
        source: RolloutSource | None = None,
        log_rollouts: LogRollouts | None = None,
    ) -> None:
        self._seed = config.training.seed
        self._b_ratio = config.b_ratio
        self._decode_mode = config.rollout_matching.decode_mode
        self._channel_a = channel_a
        self._channel_b = channel_b
        self._pipeline = pipeline
        self._policy = policy
        self._log_calls = log_calls
        self._peers = peers
        self._packer = Packer(config.training, config.global_max_length)
        self._source = source
        if source is None and policy is not None:
            self._source = InStep(
                policy, channel_b, self._packer, self._seed, self._peers.rank, log_rollouts
            )

    @property
    def source(self) -> RolloutSource | None:
        """None in a run that asks for no answers."""
        return self._source

    def run(
        self, model: nn.Module, samples: Sequence[Sample], step: int, engine: Engine
    ) -> tuple[Tensor, StepReport]:
        """Accumulate the gradients of step `step`.

        samples: this rank's share of the step.

        Returns this rank's loss (scalar, detached), whose mean over the ranks is that of the
        step, and the report of all ranks.
        """
        clock = PhaseClock()
        with clock.phase("step"):
            report = self._begin(step, len(samples), clock)
            this = _Step(model, samples, engine, report, clock)
            loss = (
                self._channel_a_step(this) if report.channel == "A" else self._channel_b_step(this)
            )
        if self._policy is not None:
            self._policy.mark_updated()
        if self._source is not None:
            report.payload.merge(self._source.payload())
        report.payload.note({"step/channel_b": report.channel == "B", **clock.metrics()})
        report.metrics = over_processes(report.payload, loss.device).metrics()
        return loss, report

    def _begin(self, step: int, samples: int, clock: PhaseClock) -> StepReport:
        """Rank 0 says which channel the schedule wants; it runs where every rank can."""
        if self._source is not None:
            self._source.begin(step, clock)
        wanted: Channel = first(self._peers, lambda: channel_for_step(step, self._b_ratio))
        report = StepReport(step, wanted, samples)
        if wanted == "B":
            assert self._source is not None, "a run with channel B has a source"
            if not all(self._peers.share(partial(self._source.ready, step))):
                report.channel = "A"
                report.payload.note({"stage2_ab/async/b_step_skipped_due_to_queue": 1})
        return report

    def _channel_a_step(self, this: _Step) -> Tensor:
        """Channel A: segments of the ground truth alone."""
        if self._source is not None:
            this = replace(this, samples=self._source.samples(this.report.step, this.samples))
        packs = self._packer.begin()

        def chunks() -> Iterator[Chunk[Pack]]:
            with this.clock.phase("target"):
                segments = self._channel_a.segments(this.samples)
            with this.clock.phase("pack"):
                made = packs.chunk(segments, last=True)
            yield Chunk(made, last=True)

        loss = self._learn(this, chunks())
        this.report.payload.merge(packs.payload())
        if self._source is not None and self._source.beside:
            self._note_calls(this.report)
        return loss

    def _channel_b_step(self, this: _Step) -> Tensor:
        """Channel B: newest weights out, answers in, segments of what they got wrong."""
        assert self._source is not None
        assert self._policy is not None, "a run with channel B has a policy"
        try:
            feed = self._source.feed(this.report.step, this.samples, this.clock)
            with _chunks_of(feed) as chunks:
                loss = self._learn(this, chunks)
        finally:
            self._note_calls(this.report)
        this.report.payload.merge(feed.payload())
        this.report.payload.note(
            {
                "rollout/repeat_terminate_active": self._policy.repeat_terminate_active,
                **self._decoding(),
            }
        )
        return loss

    def _decoding(self) -> dict[str, float]:
        modes = get_args(DecodeMode)
        return {f"rollout/decode_{mode}": mode == self._decode_mode for mode in modes}

    def _note_calls(self, report: StepReport) -> None:
        """What it took to get the rollouts, also when there are none in the end."""
        assert self._policy is not None
        assert self._source is not None
        record, payload = self._policy.take_notes()
        report.payload.merge(payload)
        base = {}
        if not self._source.beside:  # else the calls are of several coming steps
            base = {"rollout_seed_base": rollout_seed_base(self._seed, report.step)}
            report.payload.note({"rollout/seed_base": base["rollout_seed_base"]})
        if self._log_calls is not None:
            self._log_calls({"step": report.step + 1, **base, **record})

    def _learn(self, this: _Step, chunks: Iterator[Chunk[Pack]]) -> Tensor:
        """One forward and backward per pack, weighted by its share of the samples (LOSS-05)."""
        forwards = Forwards(
            this.model,
            this.engine,
            self._peers,
            partial(self._pack_loss, this.model, this.report),
            partial(self._spare, this.samples),
            len(this.samples),
            this.clock,
            None if self._policy is None else self._policy.tend,
        )
        loss = forwards.run(chunks)
        this.report.payload.add({"step/replays": forwards.replays})
        return loss

    def _spare(self, samples: Sequence[Sample]) -> Pack:
        """A pack to replay: a prompt of this rank and an answer without objects."""
        empty = [replace(sample, objects=()) for sample in samples[:1]]
        return make_pack(self._channel_a.segments(empty))

    def _pack_loss(self, model: nn.Module, report: StepReport, pack: Pack, share: float) -> Tensor:
        selection = self._pipeline.select(pack.supervision, report.channel)
        channel = self._channel_a if report.channel == "A" else self._channel_b
        readings = channel.readings(model, pack, self._pipeline.reader(selection))
        result = self._pipeline(readings, selection, report.channel)
        if share == 0:
            return 0.0 * result.total
        of_step = share / self._peers.count
        report.payload.add({key: of_step * value for key, value in result.atoms.items()})
        if result.slots:
            diagnostics = result.diagnostics.items()
            report.payload.rate({key: (value, result.slots) for key, value in diagnostics})
        return share * result.total


def _chunks_of(feed: PackFeed) -> AbstractContextManager[Iterator[Chunk[Pack]]]:
    return ahead(feed.chunks()) if feed.overlaps else nullcontext(feed.chunks())
