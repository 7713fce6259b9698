"""The parts of a step's numbers, kept apart until they are final (MET-01)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from learner.metrics.declared import METRICS, Reduction

Array = npt.NDArray[np.float64]

_PLACES = {metric.key: place for place, metric in enumerate(METRICS)}


def _no_sums() -> Array:
    return np.zeros((2, len(METRICS)))


def _no_peaks() -> Array:
    return np.full(len(METRICS), -np.inf)


@dataclass(frozen=True, eq=False)
class Payload:
    """What one process knows of a step, as two vectors in the order of the declaration.

    A rate is a quotient of sums: it is neither averaged nor divided before all parts are there.
    A key that was never given is in no log; one that only another process has is.

    sums: (2, M) what is added up, and in the second row the denominators of rates.
    peaks: (M,) the highest value noted; 0 where a sum or a rate was given, -inf where nothing
        was.
    """

    sums: Array = field(default_factory=_no_sums)
    peaks: Array = field(default_factory=_no_peaks)

    def add(self, values: Mapping[str, float]) -> None:
        """Counts, and parts of losses."""
        for key, value in values.items():
            self._put(key, "sum", (value, 0.0), 0.0)

    def note(self, values: Mapping[str, float]) -> None:
        """Seconds, flags and peaks, of which the highest counts."""
        for key, value in values.items():
            self._put(key, "max", (0.0, 0.0), value)

    def rate(self, values: Mapping[str, tuple[float, float]]) -> None:
        """Numerators and denominators."""
        for key, parts in values.items():
            self._put(key, "rate", parts, 0.0)

    def merge(self, other: "Payload") -> None:
        """Take over what another part of the step has counted."""
        self.sums[:] += other.sums
        self.peaks[:] = np.maximum(self.peaks, other.peaks)

    def reduced(
        self, all_sum: Callable[[Array], Array], all_max: Callable[[Array], Array]
    ) -> "Payload":
        """The payload of all processes; each of them calls it once."""
        return Payload(all_sum(self.sums), all_max(self.peaks))

    def metrics(self) -> dict[str, float]:
        """Numbers by key, in the order of the declaration. A rate of nothing is 0."""
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
