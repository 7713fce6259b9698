"""Waiting for several servers at once that were just started."""

import time
from collections.abc import Callable, Sequence

from learner.operate.server_process import ServerProcess
from learner.operate.stop_signals import StopSignals
from learner.rollout.client import SERVER_ERRORS, RolloutClient
from shared_contracts.cli import BAD_INPUT
from shared_contracts.errors import ContractError, RunError

# So long one look at a server may take, and so often it is told of those that still start.
_LOOK_S = 2.0
_TELL_EVERY_S = 20.0
_POLL_S = 0.2


def wait_until_ready(
    servers: Sequence[ServerProcess],
    timeout_s: float,
    asked: StopSignals,
    tell: Callable[[str], object],
) -> None:
    """Wait until each can be pushed to, and tell of it.

    Raises:
        ContractError: one ended, as it was told something wrong.
        RunError: one ended, or was not ready in time; both show its last lines.
        StopAsked: a signal came.
    """
    began = told = time.monotonic()
    waiting = list(servers)
    while waiting:
        reasons = {}
        for server in waiting:
            asked.check()
            reasons[server] = why_not_ready(server)
        waited = time.monotonic() - began
        for server in [server for server in waiting if reasons[server] is None]:
            waiting.remove(server)
            tell(f"Ready after {waited:.0f} s: {server.base_url}")
        if waiting and waited > timeout_s:
            raise _late(waiting[0], timeout_s, reasons[waiting[0]])
        if time.monotonic() - told > _TELL_EVERY_S:
            told = time.monotonic()
            for server in waiting:
                tell(f"Waiting for {waited:.0f} s: {reasons[server]}")
        asked.pause(_POLL_S if waiting else 0.0)


def why_not_ready(server: ServerProcess) -> str | None:
    """What it says, or that it says nothing yet; None: it is ready.

    Raises ContractError or RunError when it has ended.
    """
    if (code := server.code()) is not None:
        where, found = f"the rollout server at {server.base_url}", f"it ended with code {code}"
        if code == BAD_INPUT:
            raise ContractError(where, found, server.log_tail())
        raise RunError(f"{where}: {found}. {server.log_tail()}")
    try:
        with RolloutClient(server.base_url, _LOOK_S) as client:
            client.check_pushable()
    except SERVER_ERRORS as error:
        return str(error)
    return None


def _late(server: ServerProcess, timeout_s: float, reason: str | None) -> RunError:
    return RunError(
        f"the rollout server at {server.base_url} was not ready within {timeout_s:g} s "
        f"({reason}). {server.log_tail()}"
    )
