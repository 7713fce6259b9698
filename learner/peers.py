"""What the learner processes of a run tell each other beside gradients (DDP-01).

    share(work)     what `work` gave in every process; fails in all of them if it failed in one
    guarded()       around all that a process does: nobody waits for one that has failed

They talk over a key-value store and not by collectives, so that whoever waits can tell a slow
process, which is waited for, from one that has failed or is gone, which ends the run (see
`peer_watch`). Imports no torch.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol, TypeVar

from learner.peer_watch import (
    Store,
    StoreError,
    Timing,
    Watch,
    described,
    rebuilt,
    there_within,
)
from shared_contracts.errors import RunError

T = TypeVar("T")


class Peers(Protocol):
    """The processes of a run, seen from one of them.

    rank: its own, from 0. count: of the processes.
    """

    @property
    def rank(self) -> int: ...
    @property
    def count(self) -> int: ...

    def share(
        self, work: Callable[[], T], meanwhile: Callable[[], object] | None = None
    ) -> list[T]:
        """What `work` returned in each process, by rank; every process makes the same calls.

        The results are values of JSON. meanwhile: called again and again while others work.

        Raises what `work` raised here; elsewhere the same as ContractError or RunError.
        """

    def telling(self) -> AbstractContextManager[None]:
        """Around what others wait for: they hear at once of what it raises.

        Not only when this process has cleaned up, which may take long.
        """


class Alone:
    """A run of one process."""

    rank = 0
    count = 1

    def share(
        self, work: Callable[[], T], meanwhile: Callable[[], object] | None = None
    ) -> list[T]:
        return [work()]

    def telling(self) -> AbstractContextManager[None]:
        return nullcontext()


ALONE = Alone()


class StorePeers:
    """Processes that share a store.

    connect: a client of the store, one for each thread that uses it.
    launcher, end: see `Watch`.
    held: kept as long as this is, in the process that holds the store.
    """

    def __init__(
        self,
        rank: int,
        count: int,
        connect: Callable[[], Store],
        timing: Timing | None = None,
        launcher: int | None = None,
        end: Callable[[int], object] = os._exit,
        held: object = None,
    ) -> None:
        self._held = held
        self.rank = rank
        self.count = count
        self._store = connect()
        self._timing = timing or Timing()
        self._round = 0
        self._watch = Watch(rank, count, connect(), self._timing, launcher, end)
        self._told: BaseException | None = None
        self._heard_of: BaseException | None = None

    def share(
        self, work: Callable[[], T], meanwhile: Callable[[], object] | None = None
    ) -> list[T]:
        self._round += 1
        try:
            said = json.dumps({"value": work()})
        except BaseException as error:
            with suppress(StoreError):
                self._tell(json.dumps({"error": described(error)}))
            self._told = error
            raise
        self._tell(said)
        heard = [self._heard(rank, meanwhile) for rank in range(self.count)]
        self._forget_last_round()
        for rank, other in enumerate(heard):
            if "error" in other:
                self._heard_of = rebuilt(other["error"], rank)
                raise self._heard_of
        return [other["value"] for other in heard]

    @contextmanager
    def telling(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            own = error is not self._heard_of
            if own and (error is self._told or self._watch.failure() is None):
                self._watch.fail(error)
            raise

    @contextmanager
    def guarded(self) -> "Iterator[StorePeers]":
        """Around all that this process does; what it raises ends the others too.

        Raises the failure of another process in the place of what followed from it here, such
        as a collective that breaks.
        """
        self._watch.start()
        try:
            yield self
            self.share(lambda: None)
        except Exception as error:
            if error is self._heard_of:
                raise
            if error is not self._told and (failure := self._watch.failure()) is not None:
                raise failure from error
            self._watch.fail(error)
            raise
        except BaseException as stopped:  # by a signal, whatever happened elsewhere
            self._watch.fail(stopped)
            raise
        finally:
            self._watch.stop()

    def _tell(self, said: str) -> None:
        self._store.set(self._key(self._round, self.rank), said)

    def _heard(self, rank: int, meanwhile: Callable[[], object] | None) -> dict[str, Any]:
        key = self._key(self._round, rank)
        deadline = time.monotonic() + self._timing.patience
        while not there_within(self._store, [key], self._timing.beat):
            if (failure := self._watch.failure()) is not None:
                self._heard_of = failure
                raise failure
            if time.monotonic() > deadline:
                patience = self._timing.patience
                raise RunError(f"learner process {rank} is there, but took over {patience:g} s")
            if meanwhile is not None:
                meanwhile()
        heard: dict[str, Any] = json.loads(self._store.get(key))
        return heard

    def _forget_last_round(self) -> None:
        """Who has heard everybody's word of this round knows that all have read the last one."""
        if self._round > 1:
            self._store.delete_key(self._key(self._round - 1, self.rank))

    @staticmethod
    def _key(of_round: int, rank: int) -> str:
        return f"round/{of_round}/{rank}"


def first(peers: Peers, work: Callable[[], T]) -> T:
    """What `work` returned in process 0, in all of them; the others do not run it."""
    results: Sequence[T | None] = peers.share(lambda: work() if peers.rank == 0 else None)
    return results[0]  # type: ignore[return-value]  # of process 0, which ran it
