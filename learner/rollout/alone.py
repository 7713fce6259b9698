"""Servers that another learner pushes to are left to it (SYNC-07).

Who has the weight group of a server tells it again and again that it lives (`sync/life.py`). A
group without such signs is one of a learner that was killed, or of a guest, and is taken over.
"""

import time
from collections.abc import Sequence
from functools import partial

from learner.rollout.client import RolloutClient
from learner.rollout.parallel import in_parallel
from shared_contracts.errors import ContractError, ContractErrors
from shared_contracts.weights import GONE_AFTER_S

_LOOK_S = 0.5


def require_alone(clients: Sequence[RolloutClient]) -> None:
    """No other learner pushes to a server; where one was killed lately, this takes seconds.

    Raises:
        ContractErrors: one for each server that has another learner.
        RunError: a server does not say.
    """
    found = in_parallel([partial(_other_learner, client) for client in clients])
    if errors := [error for error in found if error is not None]:
        raise ContractErrors(errors)


def _other_learner(client: RolloutClient) -> ContractError | None:
    """Look until there is another sign of life, or has been none for long enough.

    One that comes late, of a learner that was held up, is waited for a last time.
    """
    info = client.info()
    while (heard_s := info.weight_group_heard_s) is not None:
        time.sleep(_LOOK_S)
        info = client.info()
        if info.weight_group_heard_s is not None and info.weight_group_heard_s < heard_s:
            return ContractError(
                f"GET {client.base_url}/info/ weight_group",
                f"another learner pushes to this server; its group met at {info.weight_group}",
                "Wait until that one has ended, or end it; or name other servers in "
                "rollout_matching.vllm.server.servers",
            )
        if heard_s >= GONE_AFTER_S:
            break
    return None
