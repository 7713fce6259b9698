"""The backend over the learner's own server; it decides which side has the GPUs' memory (ROLL-03).

    serving   the learner moves away what `offload` names; the server takes its memory back, for a
              push (the weights first, then the KV cache) or for answers
    else      the server gives its memory up; the learner has its own

All learner processes enter and leave `serving` together.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial

from learner.distributed.peers import SINGLE_PROCESS, Peers, broadcast_from_rank0
from learner.rollout.backend import RolloutBackend
from learner.rollout.client import CLOCK, SERVER_ERRORS, RolloutClient
from learner.rollout.server_pool import LONGEST_WAIT_S, Answers, ServerPool
from learner.rollout.server_process import SupervisedServer
from learner.types import RolloutOutput
from shared_contracts.errors import ContractError, ProblemError, RunError
from shared_contracts.infer import RequestConfig, RolloutInferRequest


class ColocatedBackend(RolloutBackend):
    """The backend of servers, with the one server of the learner.

    own: the server; None in every process but process 0. room: frees memory of the learner while
    the server works. memory: of the server; None where it keeps it, as on the CPU.
    """

    def __init__(
        self,
        servers: ServerPool,
        own: SupervisedServer | None,
        room: Callable[[], AbstractContextManager[None]],
        memory: RolloutClient | None = None,
        peers: Peers = SINGLE_PROCESS,
    ) -> None:
        super().__init__(servers.journal)
        self.version = servers.version
        self.repeat_terminate_active = servers.repeat_terminate_active
        self._servers = servers
        self._own = own
        self._room = room
        self._memory = memory
        self._peers = peers
        self._is_serving = False
        self._asleep = False
        self._answers: Answers = []

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Give the device to the server within the block, and then to the learner.

        Every push and rollout is one by itself; a block around several moves the memory once.
        """
        if self._is_serving:
            yield
            return
        with self._room():
            self._is_serving = True
            try:
                self._peers.all_gather(lambda: None)  # every process has made room
                yield
            except BaseException:
                self._answers = []
                if self._memory is not None:
                    with suppress(RunError, ContractError):
                        self._memory.sleep()
                        self._asleep = True
                raise
            else:
                self.sleep()
            finally:
                self._is_serving = False
        answers, self._answers = self._answers, []
        self._servers.prove(answers)  # its forward needs the learner's weights on the device

    def sleep(self) -> None:
        """Have the server give its memory up, once every process has its answers."""
        self._peers.all_gather(lambda: None)
        if self._memory is not None:
            broadcast_from_rank0(self._peers, partial(self._repeat, self._memory.sleep))
            self._asleep = True

    def rollout(
        self, requests: Sequence[RolloutInferRequest], request_config: RequestConfig
    ) -> list[RolloutOutput]:
        with self.serving():
            if self._memory is not None and self._asleep:
                self._repeat(self._memory.wake_up)
                self._asleep = False
            return self._servers.rollout(requests, request_config)

    def push_weights(self, version: int) -> None:
        with self.serving():
            self._answers = self._servers.push_and_ask(version)
            self._asleep = False

    def _repeat(self, call: Callable[[], object]) -> None:
        """Call the server, again while it restarts. Raises its error if it refuses or is gone."""
        for waited_s in CLOCK.attempts():
            try:
                call()
                return
            except SERVER_ERRORS as error:
                if self._own is not None:
                    self._own.check()
                refused = isinstance(error, ProblemError) and error.problem.kind != "not-ready"
                if refused or waited_s > LONGEST_WAIT_S:
                    raise

    def close(self) -> None:
        try:
            self._servers.close()
        finally:
            if self._own is not None:
                self._own.stop()
