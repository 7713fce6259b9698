"""What a person should know of a run, from several logs, in the order in which it was seen."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

# Of each log: more than the highest terminal shows.
_KEPT = 600


@dataclass(frozen=True)
class Event:
    """at: the optimizer step, None for an evaluation. number: from 1 on, as events were seen."""

    at: int | None
    what: str
    number: int = 0


@dataclass
class Found:
    """By one look at one log: events, each with the step that it has its place after.

    anew: the log was read from its beginning.
    """

    events: list[tuple[float, Event]] = field(default_factory=list)
    anew: bool = False


class Events:
    """Keeps the last ones of each log, and numbers them.

    What one look finds is put in the order of steps. An event that is found again in a log that
    was cut back keeps its number.
    """

    def __init__(self) -> None:
        self._kept: dict[Path, deque[Event]] = {}
        self._last = 0

    def __iter__(self) -> Iterator[Event]:
        """From the oldest one on."""
        every = (event for kept in self._kept.values() for event in kept)
        return iter(sorted(every, key=lambda event: event.number))

    def take(self, looks: Mapping[Path, Found]) -> None:
        """looks: at all logs that are there."""
        former = {source: list(self._kept.get(source, ())) for source in looks}
        self._kept = {
            source: deque(() if look.anew else former[source], maxlen=_KEPT)
            for source, look in looks.items()
        }
        found = [(after, source, e) for source, look in looks.items() for after, e in look.events]
        for _, source, event in sorted(found, key=lambda each: each[0]):
            known = former[source] if looks[source].anew else []
            self._kept[source].append(replace(event, number=self._number(event, known)))

    def _number(self, event: Event, known: list[Event]) -> int:
        for place, other in enumerate(known):
            if (other.at, other.what) == (event.at, event.what):
                return known.pop(place).number
        self._last += 1
        return self._last
