"""The metrics of a step, and how processes combine them (MET-01, MET-02).

`learner.runs.declared` has every key. Every step has a payload of its own. Only `over_processes`
imports torch.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

import numpy as np
import numpy.typing as npt

from learner.objectives.mismatch import Mismatch
from learner.runs.declared import METRICS, Reduction
from learner.types import AnswerFault, AssessedRollout, Channel, DropReason, Reward

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[np.float64]

_PLACES = {metric.key: place for place, metric in enumerate(METRICS)}


@dataclass(frozen=True, eq=False)
class Payload:
    """The metrics of a step in one process, as arrays in the order of `METRICS`.

    A rate is divided after the sums of all processes are there. A key that no process has set is
    not logged.

    sums: (2, M); row 0: sums and numerators of rates, row 1: denominators of rates.
    peaks: (M,) maxima; 0 for a sum or rate that was set, -inf for a key that was not.
    """

    sums: Array = field(default_factory=lambda: np.zeros((2, len(METRICS))))
    peaks: Array = field(default_factory=lambda: np.full(len(METRICS), -np.inf))

    def add(self, values: Mapping[str, float]) -> None:
        """Add to counters and losses."""
        for key, value in values.items():
            self._put(key, "sum", (value, 0.0), 0.0)

    def note(self, values: Mapping[str, float]) -> None:
        """Raise seconds, flags and peaks to at least these values."""
        for key, value in values.items():
            self._put(key, "max", (0.0, 0.0), value)

    def rate(self, values: Mapping[str, tuple[float, float]]) -> None:
        """Add numerators and denominators of rates."""
        for key, parts in values.items():
            self._put(key, "rate", parts, 0.0)

    def merge(self, other: "Payload") -> None:
        self.sums[:] += other.sums
        self.peaks[:] = np.maximum(self.peaks, other.peaks)

    def metrics(self) -> dict[str, float]:
        """Return the values by key, in the order of `METRICS`; a rate over 0 is 0."""
        return {
            metric.key: self._value(place, metric.reduction)
            for place, metric in enumerate(METRICS)
            if not np.isneginf(self.peaks[place])
        }

    def _put(self, key: str, reduction: Reduction, parts: tuple[float, float], peak: float) -> None:
        place = _PLACES[key]
        metric = METRICS[place]
        assert metric.reduction == reduction, f"{key} is declared as a {metric.kind}"
        self.sums[:, place] += parts
        self.peaks[place] = np.maximum(self.peaks[place], peak)

    def _value(self, place: int, reduction: Reduction) -> float:
        part, whole = self.sums[:, place]
        if reduction == "max":
            return float(self.peaks[place])
        if reduction == "sum":
            return float(part)
        return float(part / whole) if whole else 0.0


class PhaseClock:
    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - started

    def seconds(self, name: str) -> float:
        return self._seconds[name]

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}


@dataclass
class StepReport:
    """One optimizer step.

    payload: of this process, while the step runs.
    metrics: of all processes by key, after the step.
    """

    step: int
    channel: Channel
    payload: Payload = field(default_factory=Payload)
    metrics: dict[str, float] = field(default_factory=dict)


_B = "stage2_ab/channel_b"


def rollout_payload(answers: Sequence[AssessedRollout]) -> Payload:
    dropped = Counter(reason for each in answers for _, reason in each.parsed.dropped)
    matched = sum(len(each.match.pairs) for each in answers)
    missed = sum(len(each.match.false_negatives) for each in answers)
    lengths = [len(each.rollout.response_token_ids) for each in answers]
    targets = [each.target for each in answers if each.target is not None]
    payload = Payload()
    payload.add(
        {
            "rollout/parse_dropped_invalid": dropped.total(),
            "rollout/repeat_terminate_triggered_sequences": sum(
                each.rollout.repeat_terminated for each in answers
            ),
            f"{_B}/invalid_rollout": sum(each.parsed.invalid_rollout for each in answers),
            f"{_B}/N_valid_pred": sum(len(each.parsed.objects) for each in answers),
            f"{_B}/N_drop_invalid": dropped.total(),
            f"{_B}/coord_unaligned": sum(each.parsed.unaligned for each in answers),
            f"{_B}/matched": matched,
            f"{_B}/false_positives": sum(len(each.match.false_positives) for each in answers),
            f"{_B}/gated": sum(each.match.gated for each in answers),
            f"{_B}/fn_appended": sum(len(target.fn_keys) for target in targets),
            f"{_B}/closure_supervision/N_drop": len(answers) - len(targets),
        }
    )
    removed = [len(each.duplicates) for each in answers if each.duplicates is not None]
    if removed:
        payload.add(
            {
                "dup/removed": sum(removed),
                "dup/answers": sum(map(bool, removed)),
                "dup/departures": sum(len(target.departures) for target in targets),
            }
        )
    if rewards := [each.reward for each in answers if each.reward is not None]:
        payload.merge(_reward_payload(rewards))
    payload.add({f"{_B}/strict_drop/{why}": dropped[why] for why in get_args(DropReason)})
    faults = Counter(each.parsed.fault for each in answers)
    payload.add({f"{_B}/{fault}": faults[fault] for fault in get_args(AnswerFault)})
    payload.rate(
        {
            "rollout/parse_truncated_rate": (sum(each.truncated for each in answers), len(answers)),
            "rollout/gen_new_tokens_mean": (sum(lengths), len(answers)),
            f"{_B}/match_rate": (matched, matched + missed),
        }
    )
    payload.note({"rollout/gen_new_tokens_p99": float(np.percentile(lengths or [0], 99))})
    return payload


def _reward_payload(rewards: Sequence[Reward]) -> Payload:
    """Return means over answers. All groups have one size, so they are also means over groups."""
    payload, count = Payload(), len(rewards)
    parts = ("f1", "duplicates", "oversized", "invalid")
    sums = {part: sum(getattr(reward, part) for reward in rewards) for part in parts}
    sums["mean"] = sum(reward.total for reward in rewards)
    sums["spread"] = sum(reward.spread for reward in rewards)
    sums["no_spread"] = sum(reward.spread == 0 for reward in rewards)
    payload.rate({f"reward/{name}": (total, count) for name, total in sums.items()})
    return payload


def mismatch_payload(mismatch: Mismatch) -> Payload:
    payload = Payload()
    payload.add({"mismatch/tokens": len(mismatch.nats)})
    for kind, nats in mismatch.by_kind():
        payload.rate({f"mismatch/{kind}_mean": (float(nats.sum()), len(nats))})
        payload.note({f"mismatch/{kind}_p99": float(np.percentile(nats, 99))})
    return payload


def over_processes(payload: Payload, device: "torch.device") -> Payload:
    """Combine the payloads of all processes; the result is equal in each of them (MET-01).

    Every process calls it once a step. With one process it returns `payload`.

    device: that of the model, on which the process group combines tensors.
    """
    import torch  # takes seconds
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return payload

    def all_reduce(values: Array, op: dist.ReduceOp.RedOpType) -> Array:
        tensor = torch.tensor(values, device=device)
        dist.all_reduce(tensor, op)
        combined: Array = tensor.cpu().numpy()
        return combined

    sums = all_reduce(payload.sums, dist.ReduceOp.SUM)
    return Payload(sums, all_reduce(payload.peaks, dist.ReduceOp.MAX))
