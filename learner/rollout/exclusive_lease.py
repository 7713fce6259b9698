"""One learner at a time pushes to a server (SYNC-07).

The learner that has the weight group of a server sends it heartbeats. A group without heartbeats
belongs to a learner that was killed, or to a probe, and another learner takes it over. A server
breaks the phase of a push if its learner sends no heartbeat for GONE_AFTER_S.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from learner.rollout.client import SERVER_ERRORS, RolloutClient
from learner.rollout.parallel_calls import in_parallel
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.weights import GONE_AFTER_S, KEEP_EVERY_S

_LOOK_S = 0.5


def require_exclusive_lease(
    clients: Sequence[RolloutClient], sleep: Callable[[float], None] = time.sleep
) -> None:
    """Raise if another learner pushes to a server. Takes seconds if one was killed lately.

    Raises:
        ContractErrors: one for each server that has another learner.
        RunError: a server does not say.
    """
    found = in_parallel([partial(_other_learner, client, sleep) for client in clients])
    if errors := [error for error in found if error is not None]:
        raise ContractErrors(errors)


def _other_learner(client: RolloutClient, sleep: Callable[[float], None]) -> ContractError | None:
    """Wait until another heartbeat arrives, or none has arrived for long enough.

    One that comes late, of a learner that was held up, is waited for a last time.
    """
    info = client.info()
    while (heard_s := info.weight_group_heard_s) is not None:
        sleep(_LOOK_S)
        info = client.info()
        if info.weight_group_heard_s is not None and info.weight_group_heard_s < heard_s:
            return ContractError(
                f"GET {client.base_url}/info/ weight_group",
                f"another learner pushes to this server; its group is at {info.weight_group}",
                "Wait until that learner has ended, or stop it; or name other servers in "
                "rollout_matching.vllm.server.servers",
            )
        if heard_s >= GONE_AFTER_S:
            break
    return None


class Heartbeat:
    """A thread that sends a heartbeat every few seconds, until `stop`.

    give: one sign; what a server makes of it does not matter here.
    """

    def __init__(self, give: Callable[[], object], every_s: float = KEEP_EVERY_S) -> None:
        self._give = give
        self._every_s = every_s
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Send no more heartbeats; does not wait for one that is being sent."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            with suppress(RuntimeError, ContractError, *SERVER_ERRORS):  # the first: it was closed
                self._give()
