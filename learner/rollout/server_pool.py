"""The servers of one learner process: which are usable, their places, and the wait for one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from learner.distributed.peers import SINGLE_PROCESS, Peers
from learner.distributed.waiting import waiting_for
from learner.rollout.backend import Journal
from learner.rollout.distribution import rank_caps
from learner.rollout.server_handle import Clock, ServerHandle, Sleep
from shared_contracts.errors import RunError

T = TypeVar("T")

# Longer than any engine takes to be built again.
LONGEST_WAIT_S = 1800.0
# Between two checks; doubled each time.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


@dataclass(frozen=True)
class ServerPool:
    """All servers, also lost ones.

    decode_batch_size: most sequences decoded at once per rollout GPU (DIST-03).
    timeout_s: longest wait for servers that do not answer. peers: the learner processes.
    sleep, clock: of the waits, in seconds.
    """

    servers: Sequence[ServerHandle]
    decode_batch_size: int
    timeout_s: float
    journal: Journal
    peers: Peers = SINGLE_PROCESS
    sleep: Sleep = time.sleep
    clock: Clock = time.monotonic

    def usable(self) -> list[ServerHandle]:
        return [server for server in self.servers if server.lost is None]

    def lost(self) -> list[ServerHandle]:
        return [server for server in self.servers if server.lost is not None]

    def reasons(self) -> str:
        """Return why each server is lost."""
        return "; ".join(f"{server.url}: {server.lost}" for server in self.servers)

    def caps(self, usable: Sequence[ServerHandle]) -> dict[ServerHandle, int]:
        """Return the most requests of this process at each of these servers (DIST-03).

        They are its shares of all servers, so they do not depend on what another process has
        lost. A process that has no share at any of them gets one place at each.
        """
        sizes = [server.world_size for server in self.servers]
        caps = rank_caps(self.decode_batch_size, sizes, self.peers.count, self.peers.rank)
        shares = dict(zip(self.servers, caps, strict=True))
        here = {server: shares[server] for server in usable}
        return here if any(here.values()) else dict.fromkeys(here, 1)

    def wait_for(self, find: Callable[[], list[T]]) -> list[T]:
        """Call `find` until it returns a server.

        Raises:
            RunError: for `timeout_s` no server was starting or needed only a push, or none came
                back within LONGEST_WAIT_S.
        """
        began = last_sign = self.clock()
        pause_s = _FIRST_PAUSE_S
        with waiting_for("a rollout server to come back", self.reasons):
            while not (found := find()):
                now = self.clock()
                if any(server.starting or server.wants_push for server in self.servers):
                    last_sign = now
                limit_s, name = LONGEST_WAIT_S, "the longest wait"
                if now - last_sign > self.timeout_s:
                    limit_s, name = self.timeout_s, "rollout_matching.vllm.server.timeout_s"
                if now - began > limit_s:
                    raise RunError(
                        f"no rollout server can take a push and answer; waited {limit_s:.0f} s "
                        f"({name}) for one to come back or to start. {self.reasons()}"
                    )
                self.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return found
