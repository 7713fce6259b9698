"""What the learner processes of a run tell each other beside gradients (DDP-01).

    share(work)     what `work` gave in every process; fails in all of them if it failed in one
    guarded()       around all that a process does: nobody waits for one that has failed

They talk over a key-value store and not by collectives, so that whoever waits can tell a slow
process, which is waited for, from one that has failed or is gone, which ends the run. A watch
in a thread of its own does the same for a process that sits in a collective. Imports no torch.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from shared_contracts.errors import ContractError, RunError

T = TypeVar("T")

BEAT_S = 1.0
# So long a process may be silent before it counts as gone; it beats in a thread of its own.
SILENCE_S = 20.0
# So long others wait for what a process does, as long as it beats.
PATIENCE_S = 7200.0
# So long a process may still end by itself, once the run has failed elsewhere.
GRACE_S = 5.0
_FAILED = "failed"


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


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


class Alone:
    """A run of one process."""

    rank = 0
    count = 1

    def share(
        self, work: Callable[[], T], meanwhile: Callable[[], object] | None = None
    ) -> list[T]:
        return [work()]


ALONE = Alone()


class StorePeers:
    """Processes that share a store.

    connect: a client of the store, one for each thread that uses it.
    end: ends this process at once, with an exit code; when it sits in a collective for ever.
    held: kept as long as this is, in the process that holds the store.
    """

    def __init__(
        self,
        rank: int,
        count: int,
        connect: Callable[[], Store],
        end: Callable[[int], object] = os._exit,
        held: object = None,
    ) -> None:
        self._held = held
        self.rank = rank
        self.count = count
        self._store = connect()
        self._round = 0
        self._watch = _Watch(rank, count, connect(), end)

    def share(
        self, work: Callable[[], T], meanwhile: Callable[[], object] | None = None
    ) -> list[T]:
        self._round += 1
        try:
            outcome = {"value": work()}
        except BaseException as error:
            self._tell({"error": _described(error)})
            raise
        self._tell(outcome)
        said = [self._heard(rank, meanwhile) for rank in range(self.count)]
        self._forget_last_round()
        for rank, other in enumerate(said):
            if "error" in other:
                raise _rebuilt(other["error"], rank)
        return [other["value"] for other in said]

    @contextmanager
    def guarded(self) -> "Iterator[StorePeers]":
        """Around all that this process does; what it raises ends the others too.

        Raises the failure of another process where that was first.
        """
        self._watch.start()
        try:
            yield self
            self.share(lambda: None)
        except BaseException as error:
            if (failure := self._watch.failure()) is not None:
                raise failure from error
            self._watch.fail(error)
            raise
        finally:
            self._watch.stop()

    def _tell(self, said: dict[str, Any]) -> None:
        self._store.set(self._key(self._round, self.rank), json.dumps(said))

    def _heard(self, rank: int, meanwhile: Callable[[], object] | None) -> dict[str, Any]:
        key = self._key(self._round, rank)
        deadline = time.monotonic() + PATIENCE_S
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise RunError(f"learner process {rank} is there, but took over {PATIENCE_S:g} s")
            if (failure := self._watch.failure()) is not None:
                raise failure
            if meanwhile is not None:
                meanwhile()
            self._wait(key)
        heard: dict[str, Any] = json.loads(self._store.get(key))
        return heard

    def _wait(self, key: str) -> None:
        try:
            self._store.wait([key], timedelta(seconds=BEAT_S))
        except RuntimeError:  # which is what the store makes of a timeout
            return

    def _forget_last_round(self) -> None:
        """Who has heard everybody's word of this round knows that all have read the last one."""
        if self._round > 1:
            self._store.delete_key(self._key(self._round - 1, self.rank))

    @staticmethod
    def _key(of_round: int, rank: int) -> str:
        return f"round/{of_round}/{rank}"


class _Watch:
    """Beats, and looks whether the others do, in a thread."""

    def __init__(self, rank: int, count: int, store: Store, end: Callable[[int], object]) -> None:
        self._rank = rank
        self._others = [other for other in range(count) if other != rank]
        self._store = store
        self._lock = threading.Lock()  # a client of the store serves one thread at a time
        self._end = end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._failure: RunError | ContractError | None = None
        self._parent = os.getppid()
        self._heard: dict[int, tuple[bytes, float]] = {}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Leave so that nobody misses this process; process 0 leaves last, with the store."""
        self._stopped.set()
        others = [f"left/{other}" for other in self._others] if self._rank == 0 else []
        with self._lock:
            try:
                self._store.set(f"left/{self._rank}", "")
                self._store.wait(others, timedelta(seconds=GRACE_S))
            except RuntimeError:
                return  # one has gone without a word, or process 0 with the store

    def fail(self, error: BaseException) -> None:
        """Tell the others why this process ends; the first failure counts."""
        said = json.dumps({"rank": self._rank, "error": _described(error)})
        with self._lock:
            try:
                if not self._store.check([_FAILED]):
                    self._store.set(_FAILED, said)
            except RuntimeError:
                return

    def failure(self) -> RunError | ContractError | None:
        """Why the run cannot go on, as far as is known elsewhere."""
        if self._failure is None:
            self._look()
        return self._failure

    def _run(self) -> None:
        beats = 0
        while not self._stopped.wait(BEAT_S):
            beats += 1
            self._beat(beats)
            self._look()
            if self._failure is not None:
                if not self._stopped.wait(GRACE_S):
                    print(f"error: {self._failure}", file=sys.stderr, flush=True)
                    self._end(exit_code(self._failure))
                return

    def _beat(self, beats: int) -> None:
        with self._lock:
            try:
                self._store.set(f"beat/{self._rank}", str(beats))
            except RuntimeError:
                return  # `_look` says so

    def _look(self) -> None:
        with self._lock:
            try:
                self._failure = self._failure or self._found()
            except RuntimeError as error:
                self._failure = RunError(f"learner process 0 is gone: {error}")

    def _found(self) -> RunError | ContractError | None:
        if self._store.check([_FAILED]):
            said = json.loads(self._store.get(_FAILED))
            return None if said["rank"] == self._rank else _rebuilt(said["error"], said["rank"])
        if os.getppid() != self._parent:
            return RunError("whoever launched the learner processes is gone")
        now = time.monotonic()
        for rank in self._others:
            if self._silent_s(rank, now) > SILENCE_S and not self._store.check([f"left/{rank}"]):
                return RunError(f"learner process {rank} has not been heard of for {SILENCE_S:g} s")
        return None

    def _silent_s(self, rank: int, now: float) -> float:
        key = f"beat/{rank}"
        beat = self._store.get(key) if self._store.check([key]) else b""
        if rank not in self._heard or self._heard[rank][0] != beat:
            self._heard[rank] = (beat, now)
        return now - self._heard[rank][1]


def first(peers: Peers, work: Callable[[], T]) -> T:
    """What `work` returns in process 0, in all of them; the others do not run it."""
    results: Sequence[T | None] = peers.share(lambda: work() if peers.rank == 0 else None)
    return results[0]  # type: ignore[return-value]  # of process 0, which ran it


def exit_code(error: BaseException) -> int:
    return 2 if isinstance(error, ContractError) else 1


def _described(error: BaseException) -> dict[str, str]:
    if isinstance(error, ContractError):
        return {"where": error.where, "found": error.found, "do": error.do}
    told = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
    return {"told": told}


def _rebuilt(described: dict[str, str], rank: int) -> RunError | ContractError:
    if "told" in described:
        return RunError(f"learner process {rank} failed: {described['told']}")
    return ContractError(**described)
