"""How the ranks of an NCCL group meet, which both programs run (FULL-07).

`ncclCommInitRank` has no deadline, and nothing can interrupt it. So the ranks meet at the store
of the server first:

    ready       each rank says that it has imported what it needs and has its device
    verdict     GO when all ranks are ready; else why the rendezvous is given up
    NCCL        every rank after GO, in a thread that is left behind when the others give up

The verdict is set once, by whoever comes first: no rank goes where another does not. Only a
rank that fails inside NCCL replaces it, for the others to give up.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")

_POLL_S = 0.05
_READY_PREFIX, _VERDICT = "ready", "verdict"
GO = "go"


class Store(Protocol):
    """Torch's `TCPStore`, as it is used here. A closed one raises RuntimeError."""

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class RendezvousGivenUp(RuntimeError):
    """Says which ranks were missing, or which rank gave up and why."""


class Rendezvous(Generic[T]):
    """One rank at the store.

    timeout_s: for the whole, from `meet` on. given_up: whether nobody waits for this rank any more.
    enter: joins the NCCL group, in a thread of its own. leave: aborts what `enter` has returned
    too late.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        enter: Callable[[], T],
        leave: Callable[[T], object],
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._enter = enter
        self._leave = leave
        self._given_up = given_up
        self._deadline = 0.0

    def meet(self) -> T:
        """Return what `enter` returns, once all ranks are ready.

        Raises RendezvousGivenUp at the deadline or when another rank has given up, and what
        `enter` raises.
        """
        self._deadline = time.monotonic() + self._timeout_s
        try:
            verdict = self._agree()
        except RuntimeError as error:
            raise RendezvousGivenUp("the server has closed the store") from error
        if verdict != GO:
            raise RendezvousGivenUp(verdict)
        joined: Future[T] = Future()
        threading.Thread(target=_settle, args=(joined, self._enter), daemon=True).start()
        while not wait([joined], _POLL_S).done:
            if (reason := self._broken()) is not None:
                joined.add_done_callback(partial(_leave_late, leave=self._leave))
                self._tell(reason)
                raise RendezvousGivenUp(reason)
        if (failure := joined.exception()) is not None:
            self._tell(f"{type(failure).__name__}: {failure}")
        return joined.result()

    def _agree(self) -> str:
        """Say that this rank is ready, and return the verdict."""
        self._store.set(_ready(self._rank), "")
        everyone = [_ready(rank) for rank in range(self._world_size)]
        while True:
            if self._store.check(everyone):
                verdict = GO
            elif self._given_up():
                verdict = f"{name_of(self._rank)} gave up"
            elif time.monotonic() > self._deadline:
                verdict = self._missing()
            elif self._store.check([_VERDICT]):
                verdict = ""  # that of another rank stands
            else:
                time.sleep(_POLL_S)
                continue
            return self._store.compare_set(_VERDICT, "", verdict).decode()

    def _missing(self) -> str:
        ranks = [r for r in range(self._world_size) if not self._store.check([_ready(r)])]
        names = ", ".join(map(name_of, ranks))
        return f"{names}: missing for {self._timeout_s:g} s, so no rank has called NCCL"

    def _broken(self) -> str | None:
        """Why this rank need not wait inside NCCL any longer; None while it has to."""
        if self._given_up():
            return "nobody waits for this rank any more"
        if time.monotonic() > self._deadline:
            return f"NCCL has not joined all ranks within {self._timeout_s:g} s"
        try:
            verdict = self._store.get(_VERDICT).decode()
        except RuntimeError:
            # It closes, too, when the workers have joined, which the learner may be about to do.
            return None if self._rank == 0 else "the server has closed the store"
        return None if verdict == GO else verdict

    def _tell(self, reason: str) -> None:
        """Have the other ranks give up."""
        with suppress(RuntimeError):  # it is closed: they have
            self._store.set(_VERDICT, f"{name_of(self._rank)} gave up: {reason}")


def name_of(rank: int) -> str:
    """As errors name it."""
    return "learner (rank 0)" if rank == 0 else f"engine worker (rank {rank})"


def _ready(rank: int) -> str:
    return f"{_READY_PREFIX}/{rank}"


def _settle(outcome: "Future[T]", call: Callable[[], T]) -> None:
    try:
        outcome.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised by who waits for it
        outcome.set_exception(error)


def _leave_late(joined: "Future[T]", leave: Callable[[T], object]) -> None:
    if joined.exception() is None:
        leave(joined.result())
