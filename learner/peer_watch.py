"""Whether the other learner processes are there, and what made one of them fail (DDP-01).

Each process beats in the store they share. One that has failed says so, and why; one that is
silent is gone. A process that sits in a collective with it would sit there for ever: it is ended
from a thread beside it. Imports no torch.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

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
        with self._lock, suppress(StoreError):  # one has gone without a word, or process 0
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
            self._end_if_stuck()
            if self._failure is not None:
                if not self._stopped.wait(self._timing.grace):
                    print(describe(self._failure), file=sys.stderr, flush=True)
                    self._end(exit_code(self._failure))
                return

    def _end_if_stuck(self) -> None:
        """What a failed process cleans up may hang, as a group whose GPU has an error."""
        if self._failed is None:
            return
        error, since = self._failed
        if time.monotonic() - since > self._timing.unwind:
            print(describe(error), file=sys.stderr, flush=True)
            self._end(exit_code(error))

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
            return RunError("whoever launched the learner processes is gone")
        now = time.monotonic()
        for rank in self._others:
            silence = self._timing.silence
            if self._silent_s(rank, now) > silence and not self._store.check([f"left/{rank}"]):
                return RunError(f"learner process {rank} has not been heard of for {silence:g} s")
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
        errors = error.errors if isinstance(error, ContractErrors) else [error]
        return {"contract": [[e.where, e.found, e.do] for e in errors]}
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
