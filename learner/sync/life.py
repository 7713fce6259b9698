"""Signs of life: a server knows by them whether the learner that pushes to it is there (SYNC-07).

A weight group outlives a learner that was killed, so that it alone says nothing.
"""

import threading
from collections.abc import Callable
from contextlib import suppress

from learner.rollout.client import SERVER_ERRORS
from shared_contracts.errors import ContractError
from shared_contracts.weights import KEEP_EVERY_S


class SignsOfLife:
    """Gives a sign at once and then every few seconds, in a thread, until `stop`.

    give: one sign; what a server makes of it does not matter here.
    """

    def __init__(self, give: Callable[[], object], every_s: float = KEEP_EVERY_S) -> None:
        self._give = give
        self._every_s = every_s
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="signs-of-life", daemon=True).start()

    def stop(self) -> None:
        """Give no more; one that is under way is not waited for."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            with suppress(RuntimeError, ContractError, *SERVER_ERRORS):  # the first: it was closed
                self._give()
            self._stopped.wait(self._every_s)
