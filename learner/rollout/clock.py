"""The clock of everything that waits for servers."""

import time
from collections.abc import Iterator

_FIRST_PAUSE_S = 0.1


class Clock:
    """`clock()` is the time in seconds, and `clock.sleep` a pause. Tests give another one."""

    def __call__(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def attempts(self, longest_pause_s: float = 2.0) -> Iterator[float]:
        """Yield, again and again, the seconds since the first time; pauses between grow."""
        began, pause_s = self(), _FIRST_PAUSE_S
        while True:
            yield self() - began
            self.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_pause_s)


CLOCK = Clock()
