"""How servers get the newest weights and are taken back, by who pushes and who does not (SYNC-08).

Pushing     in process 0: forms the weight groups, pushes, and tends the servers for all
Following   in every other process: takes process 0's word, and that of a server itself
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from learner.peers import Peers
from learner.rollout.member import Member, Standing
from learner.rollout.parallel import in_parallel
from learner.rollout.pushed_member import PushedMember
from shared_contracts.errors import RunError

# Of the time that process 0 waits for others, at most one part in so many goes into looks at
# servers: one that is cut off holds a look up for seconds.
_LOOKS_SHARE = 6

# Calls a look again and again until it has found someone; raises RunError when it will not.
Waiting = Callable[[Callable[[], list[PushedMember]]], list[PushedMember]]


class Upkeep(Protocol):
    """Of the members of one backend; all processes connect and push at the same time.

    version: of the weights that were pushed last; None before the first push.
    """

    @property
    def version(self) -> int | None: ...

    def connect(self) -> int:
        """Form the weight group with every server; returns their newest weights version."""

    def push(self, version: int) -> None:
        """Make `version` the weights of at least one server; who does not have them is lost.

        Raises:
            RunError: no server took the push; the same in every process.
        """

    def take_back_lost(self) -> None:
        """Look at every lost server once; those are back that have the weights."""

    def rejoin_lost(self) -> None:
        """The same, and nothing is pushed: while the training weights may be changing."""

    def tend(self) -> None:
        """Do for the servers what other processes may be waiting for."""


class Pushing:
    """Of the process that pushes; its methods may be called from several threads.

    wait: for a server that can be pushed to.
    """

    def __init__(self, members: Sequence[PushedMember], peers: Peers, wait: Waiting) -> None:
        self.version: int | None = None
        self._members = members
        self._peers = peers
        self._wait = wait
        self._busy = threading.Lock()  # pushes are made by one thread at a time
        self._rests_until = 0.0

    def connect(self) -> int:
        return self._tell(lambda: max(in_parallel([one.connect for one in self._members])))

    def push(self, version: int) -> None:
        self._peers.share(lambda: None)  # from here on nobody asks the old weights
        self._tell(partial(self._push, version))
        self._peers.share(lambda: None)

    def take_back_lost(self) -> None:
        """Those that are back get the weights first (SYNC-07)."""
        with self._busy:
            _bring(self._back(), self.version)

    def rejoin_lost(self) -> None:
        with self._busy:
            _rejoin(self._lost(), self.version)

    def tend(self) -> None:
        """Notice who was started anew, and push again to whoever can take it.

        To be called again and again while other processes are waited for; cheap where all is
        well. Raises only what would fail again.
        """
        if self.version is None or time.monotonic() < self._rests_until:
            return
        if not self._busy.acquire(blocking=False):
            return  # another thread is at it
        try:
            began = time.monotonic()
            in_parallel([member.notice for member in self._members if member.lost is None])
            back = self._back()
            ended = time.monotonic()
            self._rests_until = ended + _LOOKS_SHARE * (ended - began)
            _bring(back, self.version)
        finally:
            self._busy.release()

    def _tell(self, work: Callable[[], int]) -> int:
        """What `work` gives; the others hear it, and how the servers are then."""

        def done() -> tuple[int, list[Standing]]:
            return work(), [member.standing() for member in self._members]

        return self._peers.share(done)[0][0]

    def _push(self, version: int) -> int:
        """Push to all servers at the same time; when all fail, wait for them and push again."""
        with self._busy:
            for last_attempt in (False, True):
                members = self._wait(self._pushable)
                errors = [error for error in _bring(members, version) if error is not None]
                if len(errors) < len(members):
                    break
                if last_attempt:
                    raise errors[0]
            self.version = version
        return version

    def _lost(self) -> list[PushedMember]:
        """Those to look at; who rests is left alone while there are others to ask."""
        lost = [member for member in self._members if member.lost is not None]
        if len(lost) == len(self._members):
            return lost
        return [member for member in lost if not member.rests()]

    def _back(self) -> list[PushedMember]:
        """Who is lost but could take a push now."""
        lost = self._lost()
        found = zip(lost, in_parallel([member.look for member in lost]), strict=True)
        return [member for member, pushable in found if pushable]

    def _pushable(self) -> list[PushedMember]:
        """Who may be asked, and who is back."""
        back = self._back()
        return [member for member in self._members if member.lost is None or member in back]


def _bring(members: Sequence[PushedMember], version: int | None) -> list[RunError | None]:
    return in_parallel([partial(member.bring_to, version) for member in members])


def _rejoin(members: Sequence[Member], version: int | None) -> None:
    in_parallel([partial(member.rejoin, version) for member in members])


class Following:
    """Of a process that never pushes."""

    def __init__(self, members: Sequence[Member], peers: Peers) -> None:
        self.version: int | None = None
        self._members = members
        self._peers = peers

    def connect(self) -> int:
        return self._hear()

    def push(self, version: int) -> None:
        self._peers.share(lambda: None)
        self.version = self._hear()
        self._peers.share(lambda: None)

    def take_back_lost(self) -> None:
        """Those are back that process 0 has pushed to, as they say themselves."""
        self.rejoin_lost()

    def rejoin_lost(self) -> None:
        _rejoin([one for one in self._members if one.lost is not None], self.version)

    def tend(self) -> None:
        """Process 0 does."""

    def _hear(self) -> int:
        """What process 0 tells; how the servers are then is taken from it."""
        said: Sequence[tuple[int, list[Standing]] | None] = self._peers.share(lambda: None)
        assert said[0] is not None, "process 0 tells"
        version, standings = said[0]
        for member, standing in zip(self._members, standings, strict=True):
            member.adopt(Standing(*standing))
        return version
