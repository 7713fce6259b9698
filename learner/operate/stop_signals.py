"""What a person or a supervisor asks of a program that has started others: to stop them.

A signal is noted and seen at the next look, so that nothing is interrupted half way: not a
process that is just being started, nor another that is being stopped.
"""

import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_S = 0.1


class StopAsked(Exception):
    """A signal came. number: which one."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopSignals:
    """Notes SIGINT, SIGTERM and SIGHUP while entered, in the main thread.

    A SIGHUP that the process was started to ignore, as by nohup, stays ignored.
    """

    def __init__(self) -> None:
        self._came: list[int] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def urgent(self) -> bool:
        """A second signal came: there is no time for a grace."""
        return len(self._came) > 1

    def check(self) -> None:
        """Raises StopAsked once a signal came."""
        if self._came:
            raise StopAsked(self._came[0])

    def pause(self, seconds: float) -> None:
        """Sleep; raises StopAsked as soon as a signal came."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, _LOOK_S))
        self.check()

    def _note(self, number: int, _: FrameType | None) -> None:
        self._came.append(number)
