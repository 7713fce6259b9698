"""How long a learner waits when it has no server left."""

import time

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
