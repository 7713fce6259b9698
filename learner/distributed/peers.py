"""What the learner processes of a run exchange beside gradients (DDP-01).

    all_gather(work)   what `work` returned in every process; fails in all if it failed in one
    guarded()          around all that a process does: nobody waits for one that has failed

They use a key-value store and not collectives: a process that waits can tell a slow process, which
it waits for, from one that failed or is gone, which ends the run. Each process beats in the store.
A process that sits in a collective with a dead one is ended from a thread. Imports no torch.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from learner.distributed.waiting import waiting_for
from shared_contracts.cli import describe, exit_code
from shared_contracts.errors import ContractError, ContractErrors, RunError

_FAILED = "failed"
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02
# What a store makes of a timeout, and of a connection that is lost.
StoreError = RuntimeError


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


@dataclass(frozen=True)
class Timing:
    """Seconds.

    beat: between two signs of life, which a thread of its own gives.
    silence: after so long without one a process counts as gone.
    patience: so long others wait for what a process does, as long as it beats.
    grace: so long a process may still end by itself once the run has failed elsewhere.
    linger: so long process 0, which holds the store, waits for the others to leave.
    unwind: so long a process that has failed may take to end.
    """

    beat: float = 1.0
    silence: float = 20.0
    patience: float = 7200.0
    grace: float = 5.0
    linger: float = 8.0
    unwind: float = 20.0


class Watch:
    """Beats, and looks whether the others do, in a thread.

    store: a client of its own. launcher: the process that has started this one and sees to its
    end; None where nobody does. end: ends this process at once, with an exit code.
    """

    def __init__(
        self,
        rank: int,
        count: int,
        store: Store,
        timing: Timing,
        launcher: int | None = None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._rank = rank
        self._others = [other for other in range(count) if other != rank]
        self._store = store
        self._timing = timing
        self._launcher = launcher
        self._end = end
        self._lock = threading.Lock()  # a client of the store serves one thread at a time
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._failure: RunError | ContractError | None = None
        self._failed: tuple[BaseException, float] | None = None  # of this process, and when
        self._heard: dict[int, tuple[bytes, float]] = {}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Leave so that nobody misses this process; process 0 leaves last, with the store."""
        self._stopped.set()
        others = [f"left/{other}" for other in self._others]
        with self._lock, suppress(StoreError):  # a process, or process 0, died without a message
            self._store.set(f"left/{self._rank}", "")
            if self._rank == 0:
                there_within(self._store, others, self._timing.linger)

    def fail(self, error: BaseException) -> None:
        """Tell the others why this process ends; the first failure of a run counts.

        It has `unwind` seconds for that from now on.
        """
        if self._failed is not None:
            return
        self._failed = (error, time.monotonic())
        said = json.dumps({"rank": self._rank, "error": described(error)})
        with self._lock, suppress(StoreError):
            self._store.compare_set(_FAILED, "", said)

    def failure(self) -> RunError | ContractError | None:
        """Why the run cannot go on, as far as is known elsewhere."""
        if self._failure is None:
            self._look()
        return self._failure

    def _run(self) -> None:
        beats = 0
        while not self._stopped.wait(self._timing.beat):
            beats += 1
            with self._lock, suppress(StoreError):  # `_look` says so
                self._store.set(f"beat/{self._rank}", str(beats))
            self._look()
            if self._failed is not None:
                # What it cleans up may hang, as a group whose GPU has an error.
                error, since = self._failed
                if time.monotonic() - since > self._timing.unwind:
                    print(describe(error), file=sys.stderr, flush=True)
                    self._end(exit_code(error))
            if self._failure is not None:
                if not self._stopped.wait(self._timing.grace):
                    print(describe(self._failure), file=sys.stderr, flush=True)
                    self._end(exit_code(self._failure))
                return

    def _look(self) -> None:
        with self._lock:
            try:
                self._failure = self._failure or self._found()
            except StoreError as error:
                (reason, *_) = str(error).splitlines()
                self._failure = RunError(f"learner process 0 is gone: {reason}")

    def _found(self) -> RunError | ContractError | None:
        if self._store.check([_FAILED]):
            said = json.loads(self._store.get(_FAILED))
            return None if said["rank"] == self._rank else rebuilt(said["error"], said["rank"])
        if self._launcher is not None and os.getppid() != self._launcher:
            return RunError("the program that launched the learner processes is gone")
        now = time.monotonic()
        for rank in self._others:
            silence = self._timing.silence
            if self._silent_s(rank, now) > silence and not self._store.check([f"left/{rank}"]):
                return RunError(f"learner process {rank} has sent no heartbeat for {silence:g} s")
        return None

    def _silent_s(self, rank: int, now: float) -> float:
        key = f"beat/{rank}"
        beat = self._store.get(key) if self._store.check([key]) else b""
        if rank not in self._heard or self._heard[rank][0] != beat:
            self._heard[rank] = (beat, now)
        return now - self._heard[rank][1]


def there_within(store: Store, keys: list[str], seconds: float) -> bool:
    """Whether all keys are there, as soon as they are; looked for more and more seldom.

    A store's own `wait` writes to the log whenever its time is over.
    """
    deadline, pause = time.monotonic() + seconds, _SHORTEST_PAUSE_S
    while not store.check(keys):
        if (left := deadline - time.monotonic()) <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return True


def described(error: BaseException) -> dict[str, Any]:
    """A failure as values of JSON, for `rebuilt`."""
    if isinstance(error, ContractError):
        return {"contract": [[e.where, e.found, e.do] for e in error.errors]}
    if isinstance(error, RunError):
        return {"told": str(error)}
    text = str(error)
    return {"told": f"{type(error).__name__}: {text}" if text else type(error).__name__}


def rebuilt(described: dict[str, Any], rank: int) -> RunError | ContractError:
    """What process `rank` failed of; an error of the user's input is the same everywhere."""
    if "told" in described:
        return RunError(f"learner process {rank} failed: {described['told']}")
    errors = [ContractError(*parts) for parts in described["contract"]]
    return errors[0] if len(errors) == 1 else ContractErrors(errors)


T = TypeVar("T")


class Peers(Protocol):
    """The processes of a run, seen from one of them.

    rank: its own, from 0. count: of the processes.
    """

    @property
    def rank(self) -> int: ...
    @property
    def count(self) -> int: ...

    def all_gather(
        self, work: Callable[[], T], meanwhile: Callable[[], object] | None = None
    ) -> list[T]:
        """What `work` returned in each process, by rank; every process makes the same calls.

        `work` may call `all_gather` itself, in every process.
        The results are values of JSON. meanwhile: called again and again while others work.

        Raises what `work` raised here; elsewhere the same as ContractError or RunError.
        """

    def propagate_errors(self) -> AbstractContextManager[None]:
        """Around what others wait for: they hear at once of what it raises.

        Not only when this process has cleaned up, which may take long.
        """


class SingleProcess:
    """The peers of a run of one process."""

    rank = 0
    count = 1

    def all_gather(
        self, work: Callable[[], T], meanwhile: Callable[[], object] | None = None
    ) -> list[T]:
        return [work()]

    def propagate_errors(self) -> AbstractContextManager[None]:
        return nullcontext()


SINGLE_PROCESS = SingleProcess()


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
        self._rounds = 0
        self._spent: list[str] = []  # keys that every process has read
        self._watch = Watch(rank, count, connect(), self._timing, launcher, end)
        self._told: BaseException | None = None
        self._heard_of: BaseException | None = None

    def all_gather(
        self, work: Callable[[], T], meanwhile: Callable[[], object] | None = None
    ) -> list[T]:
        self._rounds += 1
        this = self._rounds  # `work` may have rounds of its own
        own = self._key(this, self.rank)
        try:
            said = json.dumps({"value": work()})
        except BaseException as error:
            with suppress(StoreError):
                self._store.set(own, json.dumps({"error": described(error)}))
            self._told = error
            raise
        self._store.set(own, said)
        heard = [self._heard(this, rank, meanwhile) for rank in range(self.count)]
        for key in self._spent:  # whoever is heard in this round has read the rounds before
            self._store.delete_key(key)
        self._spent = [own]
        for rank, other in enumerate(heard):
            if "error" in other:
                self._heard_of = rebuilt(other["error"], rank)
                raise self._heard_of
        return [other["value"] for other in heard]

    @contextmanager
    def propagate_errors(self) -> Iterator[None]:
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
            self.all_gather(lambda: None)
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

    def _heard(
        self, this: int, rank: int, meanwhile: Callable[[], object] | None
    ) -> dict[str, Any]:
        key = self._key(this, rank)
        with waiting_for(f"learner process {rank}"):
            self._await(key, rank, meanwhile)
        heard: dict[str, Any] = json.loads(self._store.get(key))
        return heard

    def _await(self, key: str, rank: int, meanwhile: Callable[[], object] | None) -> None:
        deadline = time.monotonic() + self._timing.patience
        while not there_within(self._store, [key], self._timing.beat):
            if (failure := self._watch.failure()) is not None:
                self._heard_of = failure
                raise failure
            if time.monotonic() > deadline:
                patience = self._timing.patience
                raise RunError(
                    f"learner process {rank} is alive, but took more than {patience:g} s"
                )
            if meanwhile is not None:
                meanwhile()

    @staticmethod
    def _key(of_round: int, rank: int) -> str:
        return f"round/{of_round}/{rank}"


def broadcast_from_rank0(peers: Peers, work: Callable[[], T]) -> T:
    """What `work` returned in process 0, in all of them; the others do not run it."""
    results: Sequence[T | None] = peers.all_gather(lambda: work() if peers.rank == 0 else None)
    return results[0]  # type: ignore[return-value]  # of process 0, which ran it
