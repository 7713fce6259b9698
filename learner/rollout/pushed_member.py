"""One server as process 0 has it, which alone pushes to it (SYNC-07, SYNC-08).

lost --- its group is formed anew, and the weights are pushed again ---> may be asked
"""

import logging
import time

from learner.rollout.backend import WeightChannel
from learner.rollout.client import SERVER_ERRORS, RolloutClient, ServerUnreachable, needs_push
from learner.rollout.journal import Journal
from learner.rollout.member import Differences, Member, Sleep, no_differences
from shared_contracts.errors import ProblemError, RunError
from shared_contracts.server_info import Info

_LOG = logging.getLogger(__name__)

# After a take-back that failed, before the next one: doubled each time, up to the longest.
FIRST_REST_S = 5.0
_LONGEST_REST_S = 300.0
_REFUSED = 422


class PushedMember(Member):
    """A server with its weight channel. One thread at a time pushes to it or takes it back."""

    def __init__(
        self,
        client: RolloutClient,
        channel: WeightChannel,
        journal: Journal,
        sleep: Sleep = time.sleep,
        differences: Differences = no_differences,
    ) -> None:
        super().__init__(client, journal, sleep, differences)
        self._channel = channel
        self._taken: int | None = None  # the version it has, unless something happened to it
        self._rest_s = self._rests_until = 0.0

    def connect(self) -> int:
        """Form the weight group; returns the server's weights version."""
        ready = self._channel.connect()
        self._epoch, self.world_size = ready.server_epoch, ready.world_size - 1
        return ready.weights_version

    def bring_to(self, version: int | None) -> RunError | None:
        """Make `version` its weights; it is lost when that fails, for the error returned.

        Raises what would fail again, and ContractError where another learner has it by now.
        """
        try:
            if self.lost is None and version is not None:
                self._push(version)
            else:
                self.take_back(version)
        except RunError as error:
            if _is_final(error):
                raise
            self.lose(str(error))
            return error
        return None

    def take_back(self, version: int | None) -> None:
        """Ask it again, once it has the weights `version`; None: any will do.

        A push whose answer was lost is not made twice, which the server would refuse.
        Raises what a push raises, SERVER_ERRORS, and RunError for a server that differs.
        After a failure it `rests`, longer every time.
        """
        try:
            self._bring_back(version)
        except RunError as error:
            self._rest_s = min(max(FIRST_REST_S, 2 * self._rest_s), _LONGEST_REST_S)
            self._rests_until = time.monotonic() + self._rest_s
            if self.lost != str(error):
                _LOG.warning("rollout server %s stays lost: %s", self.url, error)
            raise
        self._rest_s = self._rests_until = 0.0
        self._is_back()
        _LOG.warning("rollout server %s is back", self.url)

    def rejoin(self, version: int | None) -> None:
        """Where no push of it is known to have failed; that is believed more than the server."""
        if version in (None, self._taken):
            super().rejoin(version)
        elif self.look():
            self.wants_push = True

    def lose(self, reason: str, returns: int | None = None) -> bool:
        if lost := super().lose(reason, returns):
            self._channel.abandon()
        return lost

    def notice(self) -> None:
        """Lose it where it was started anew, or otherwise lacks the weights; one quick call.

        One that does not answer is left to those who ask it: when it is there again it is
        another epoch.
        """
        returns = self.returns
        try:
            epoch = self._client.health().server_epoch
        except SERVER_ERRORS as error:
            if needs_push(error):
                self.lose(str(error), returns)
            return
        if epoch != self._epoch:
            self.lose("the server or one of its replicas was started anew", returns)

    def look(self) -> bool:
        """Whether a lost server could take a push now; one quick call."""
        try:
            self._client.check_pushable()
        except SERVER_ERRORS as error:
            self.stays_lost(error)
            return False
        self.starting = self.wants_push = False
        return True

    def rests(self) -> bool:
        """Whether it failed to come back, so lately that it is not tried again yet."""
        return time.monotonic() < self._rests_until

    def close(self) -> None:
        self._channel.close()
        super().close()

    def _push(self, version: int, again: bool = False) -> None:
        """Make `version` the server's weights; it may be asked from then on.

        Raises:
            RunError: the push broke, or did not reach every replica.
        """
        self.connect()
        try:
            report = self._channel.push(version)
        except RunError as error:
            self._taken = version if _answer_was_lost(error) else None
            raise
        self._taken = version
        self.connect()  # it may have formed the group anew
        if report.status.server_epoch != self._epoch:
            raise RunError(f"{self.url} lost a replica while weights were pushed")
        self._journal.push(self.url, again, report)
        self._is_back()

    def _bring_back(self, version: int | None) -> None:
        info = self._client.info()
        if found := self._differences(self.url, info):
            raise RunError("; ".join(map(str, found)))
        if version is not None and not self._holds(version, info):
            self._push(version, again=True)
        elif self._epoch is not None:
            self._epoch, self.world_size = info.server_epoch, info.world_size

    def _holds(self, version: int, info: Info) -> bool:
        """Whether it was pushed this version, and nothing was started anew since.

        What it says of itself is believed only where no push is known to have failed.
        """
        held = (info.server_epoch, info.weights_state, info.weights_version)
        return self._taken == version and held == (self._epoch, "READY", version)


def _answer_was_lost(error: RunError) -> bool:
    """Whether a push broke in such a way that it may have got through."""
    return isinstance(error.__cause__, (ServerUnreachable, TimeoutError))


def _is_final(error: RunError) -> bool:
    """Whether a server has refused what was pushed to it."""
    cause = error.__cause__
    return isinstance(cause, ProblemError) and cause.problem.status == _REFUSED
