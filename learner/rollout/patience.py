"""How long a learner waits when it has no server left."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_result, wait_exponential

from shared_contracts.errors import RunError

T = TypeVar("T")

# Longer than any engine takes to be built again.
LONGEST_WAIT_S = 1800.0


class Patience:
    """Ends when there was no sign of life for `silence_s`, and after LONGEST_WAIT_S in all."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._began = self._heard = time.monotonic()

    def heard(self) -> None:
        """There was a sign of life now."""
        self._heard = time.monotonic()

    def end(self) -> str | None:
        """Why it is over, in words; None: it is not."""
        now = time.monotonic()
        if now - self._began > LONGEST_WAIT_S:
            return f"waited {LONGEST_WAIT_S:.0f} s for one to come back, whatever it says"
        if now - self._heard > self._silence_s:
            return (
                f"waited {self._silence_s:.0f} s (rollout_matching.vllm.server.timeout_s) for one "
                "to come back or to be starting"
            )
        return None


class Awaited(Protocol):
    """url: names it. lost: why it may not be asked now.

    starting, wants_push: it is there, and soon may be asked; or once it was pushed to.
    """

    url: str
    lost: str | None
    starting: bool
    wants_push: bool


def wait_for_one(
    look: Callable[[], list[T]],
    awaited: Sequence[Awaited],
    silence_s: float,
    sleep: Callable[[float], None],
) -> list[T]:
    """Look until there is someone.

    Raises:
        RunError: nobody while there was `Patience`.
    """
    patience = Patience(silence_s)

    def is_over(_: RetryCallState) -> bool:
        if any(one.starting or one.wants_push for one in awaited):
            patience.heard()
        return patience.end() is not None

    def nobody(_: RetryCallState) -> list[T]:
        reasons = "; ".join(f"{one.url}: {one.lost}" for one in awaited)
        raise RunError(f"no rollout server can be pushed to and asked; {patience.end()}. {reasons}")

    retry = Retrying(
        retry=retry_if_result(lambda found: not found),
        stop=is_over,
        wait=wait_exponential(multiplier=0.1, max=2.0),
        sleep=sleep,
        retry_error_callback=nobody,
    )
    return retry(look)
