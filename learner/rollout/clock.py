"""The clock of everything that waits for servers."""

import time


class Clock:
    """`clock()` is the time in seconds, and `clock.sleep` a pause. Tests give another one."""

    def __call__(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


CLOCK = Clock()
