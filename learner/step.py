"""One optimizer step, readable from top to bottom.

    run()   samples -> [rollouts] -> segments -> packs -> losses -> gradients

A step takes all of its raw samples at once, whichever channel it runs. How many packed
forwards they need is free; the caller makes one optimizer update of them (STEP-02).
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from learner.channels.a import ChannelA
from learner.channels.b import ChannelB
from learner.config.rollout_matching import DecodeMode
from learner.config.schema import Config
from learner.losses.pipeline import Pipeline
from learner.metrics import PhaseClock, StepReport
from learner.metrics.processes import over_processes
from learner.model.packed_forward import Pack, Segment, make_pack
from learner.packing import SegmentBuffer
from learner.rollout.policy import Policy
from learner.rollout.seeds import request_seed, rollout_seed_base
from learner.schedule import channel_for_step
from learner.types import Sample

_LOG = logging.getLogger(__name__)


class StepRunner:
    """Runs the forwards and backwards of one optimizer step.

    policy: who answers in channel B; None in a run without channel B.
    log_calls: takes one record of each channel-B step (SEED-02).
    """

    def __init__(
        self,
        config: Config,
        channel_a: ChannelA,
        channel_b: ChannelB,
        pipeline: Pipeline,
        policy: Policy | None,
        log_calls: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._training = config.training
        self._capacity = config.global_max_length
        self._b_ratio = config.b_ratio
        self._decode_mode = config.rollout_matching.decode_mode
        self._channel_a = channel_a
        self._channel_b = channel_b
        self._pipeline = pipeline
        self._policy = policy
        self._log_calls = log_calls
        self._warned = False

    def run(
        self,
        model: nn.Module,
        samples: Sequence[Sample],
        step: int,
        backward: Callable[[Tensor], None],
    ) -> tuple[Tensor, StepReport]:
        """Accumulate the gradients of step `step`; returns its loss (scalar, detached)."""
        report = StepReport(step, channel_for_step(step, self._b_ratio), len(samples))
        clock = PhaseClock()
        if report.channel == "B":
            segments = self._rollout_segments(samples, report, clock)
        else:
            with clock.phase("target"):
                segments = self._channel_a.segments(samples)
        with clock.phase("pack"):
            packs = self._packs(segments, report)
        with clock.phase("learn"):
            loss = self._learn(model, packs, report, backward)
        if self._policy is not None:
            self._policy.mark_updated()
        report.payload.note({"step/channel_b": report.channel == "B", **clock.metrics()})
        report.metrics = over_processes(report.payload, loss.device).metrics()
        return loss, report

    def _rollout_segments(
        self, samples: Sequence[Sample], report: StepReport, clock: PhaseClock
    ) -> list[Segment]:
        """Channel B: newest weights out, answers in, segments of what they got wrong."""
        assert self._policy is not None, "a run with channel B has a policy"
        seed_base = rollout_seed_base(self._training.seed, report.step)
        try:
            with clock.phase("push"):
                self._policy.push_if_stale()
            with clock.phase("rollout"):
                rollouts = self._policy.answer(samples, request_seed(seed_base, 0, 0))
        finally:
            self._note_calls(self._policy, seed_base, report)
        with clock.phase("target"):
            segments, stats = self._channel_b.segments(samples, rollouts)
        report.payload.merge(stats.payload())
        report.payload.rate({"rollout/per_second": (len(samples), clock.seconds("rollout"))})
        report.payload.note(
            {
                "rollout/seed_base": seed_base,
                "rollout/repeat_terminate_active": self._policy.repeat_terminate_active,
                "sync/weights_version": self._policy.version,
                **self._decoding(),
            }
        )
        return segments

    def _decoding(self) -> dict[str, float]:
        modes = get_args(DecodeMode)
        return {f"rollout/decode_{mode}": mode == self._decode_mode for mode in modes}

    def _note_calls(self, policy: Policy, seed_base: int, report: StepReport) -> None:
        """What it took to get the rollouts, also when there are none in the end."""
        record, payload = policy.take_notes()
        report.payload.merge(payload)
        if self._log_calls is not None:
            self._log_calls({"step": report.step, "rollout_seed_base": seed_base, **record})

    def _packs(self, segments: list[Segment], report: StepReport) -> list[Pack]:
        """Packs of the step's segments; without packing one each, however long."""
        lengths = [len(segment) for segment in segments]
        packs = self._pooled(segments) if self._training.packing else [[s] for s in segments]
        room = len(packs) * self._capacity
        self._warn_if_underfilled(sum(lengths) / max(room, 1))
        report.payload.rate({"packing/post_rollout_fill": (sum(lengths), room)})
        report.payload.add(
            {
                "packing/post_rollout_segments": len(segments),
                "packing/post_rollout_packs": len(packs),
                "packing/post_rollout_selected_total_len": sum(lengths),
                "packing/post_rollout_buffer": 0,
            }
        )
        return [make_pack(pack) for pack in packs]

    def _pooled(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        """The step's pool in the fewest packs; nothing is carried over to the next step."""
        buffer = SegmentBuffer[Segment](self._capacity, self._training.packing_buffer)
        for segment in segments:
            buffer.add(segment, len(segment), segment.sample_id)
        return buffer.take_pool(self._training.packing_min_fill_ratio)

    def _warn_if_underfilled(self, fill: float) -> None:
        least = self._training.packing_min_fill_ratio
        if self._training.packing and 0 < fill < least and not self._warned:
            self._warned = True
            _LOG.warning(
                "packs are filled to %.0f %%, under training.packing_min_fill_ratio %.0f %%: "
                "a smaller global_max_length or a larger effective_batch_size fills them better "
                "(said once; see packing/post_rollout_fill)",
                100 * fill,
                100 * least,
            )

    def _learn(
        self,
        model: nn.Module,
        packs: Sequence[Pack],
        report: StepReport,
        backward: Callable[[Tensor], None],
    ) -> Tensor:
        """One forward and backward per pack, weighted by its share of the samples (LOSS-05)."""
        device = next(model.parameters()).device
        step_loss = torch.zeros((), device=device)
        for pack in packs:
            share = len(pack.sample_ids) / report.samples
            loss = share * self._pack_loss(model, pack.to(device), share, report)
            backward(loss)
            step_loss += loss.detach()
        if device.type == "cuda":  # else the clock of the phase stops before the last backward
            torch.cuda.synchronize(device)
        return step_loss

    def _pack_loss(self, model: nn.Module, pack: Pack, share: float, report: StepReport) -> Tensor:
        selection = self._pipeline.select(pack.supervision, report.channel)
        channel = self._channel_a if report.channel == "A" else self._channel_b
        readings = channel.readings(model, pack, self._pipeline.reader(selection))
        result = self._pipeline(readings, selection, report.channel)
        report.payload.add({key: share * value for key, value in result.atoms.items()})
        if result.slots:
            diagnostics = result.diagnostics.items()
            report.payload.rate({key: (value, result.slots) for key, value in diagnostics})
        return result.total
