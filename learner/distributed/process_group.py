"""The learner processes of a run: one, or those that torchrun starts (DDP-01).

Gradients go over NCCL between GPUs and over gloo between CPUs. Results of `all_gather` go over
torchrun's store. Each round of it is also a collective of a separate gloo group, which has a
time-out and fails at once if a process dies. The store keeps the first failure of a run; a thread
of every process polls it.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed import PrefixStore, Store, TCPStore

from learner.distributed.peers import SINGLE_PROCESS, Peers, described, rebuilt
from learner.distributed.waiting import waiting_for
from shared_contracts.cli import describe, exit_code
from shared_contracts.errors import ContractError, RunError
from shared_contracts.machine import signal_at_death_of

T = TypeVar("T")
# `ProcessGroup` or `ProcessGroupGloo`: the stubs of torch lack their methods.
Group: TypeAlias = Any

# Limits of a collective of gradients, and of a round of results with the slowest process's work.
COLLECTIVE_TIMEOUT, PATIENCE = timedelta(minutes=30), timedelta(hours=2)
_CONNECT_S = 60.0
_FAILED = "failed"
_BROKEN = "a learner process is gone, the connection broke"
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02


@dataclass(frozen=True)
class Timing:
    """Limits in seconds.

    beat: between two reads of the first failure.
    grace: until a process is ended after a failure of the run.
    linger: in which process 0, which may hold the store, waits for the others to leave.
    """

    beat: float = 1.0
    grace: float = 20.0
    linger: float = 8.0


class GroupPeers(Peers):
    """Several processes with a store and a gloo group. end: ends this process with an exit code."""

    def __init__(
        self,
        rank: int,
        count: int,
        store: Store,
        group: Group,
        timing: Timing | None = None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.rank = rank
        self.count = count
        self._store = store
        self._group = group
        self._timing = timing or Timing()
        self._end = end
        self._rounds = 0
        self._own: BaseException | None = None  # the last error of this process
        self._others: BaseException | None = None  # the last failure elsewhere, raised here
        self._failed = False
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def all_gather(
        self, work: Callable[[], T], meanwhile: Callable[[], object] | None = None
    ) -> list[T]:
        try:
            own = json.dumps({"result": work()})
        except BaseException as error:
            if error is not self._own and error is not self._others:  # no nested round raised it
                self._own = error
                with suppress(RuntimeError):  # the others read it in this round; do not wait
                    self._begin_round(json.dumps({"error": described(error)}))
            raise
        self._await(self._begin_round(own), meanwhile)
        # All processes have begun this round, and so have read the one before it.
        self._store.delete_key(f"round/{self._rounds - 1}/{self.rank}")
        parts = [json.loads(self._store.get(self._key(rank))) for rank in range(self.count)]
        for rank, part in enumerate(parts):
            if "error" in part:
                self._others = rebuilt(part["error"], rank)
                raise self._others
        return [part["result"] for part in parts]

    @contextmanager
    def propagate_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            first = self._first_failure(error)
            if first is error:
                raise
            raise first from error

    @contextmanager
    def guarded(self) -> "Iterator[GroupPeers]":
        """Run the block as one of all processes; the first failure of the run ends them all.

        Raises the failure of another process in place of its effects here (a broken collective).
        """
        self._watcher.start()
        try:
            with self.propagate_errors():
                yield self
                self.all_gather(lambda: None)
        finally:
            self._leave()

    def _key(self, rank: int) -> str:
        return f"round/{self._rounds}/{rank}"

    def _begin_round(self, own: str) -> Any:
        """Store the result of this process; return the handle of the round's collective."""
        self._rounds += 1
        self._store.set(self._key(self.rank), own)
        return self._group.allreduce(torch.zeros(1))

    def _await(self, handle: Any, meanwhile: Callable[[], object] | None) -> None:
        checked, pause = time.monotonic(), _SHORTEST_PAUSE_S
        with waiting_for("the other learner processes", self._late):
            while not handle.is_completed():
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                if time.monotonic() - checked < self._timing.beat:
                    continue
                checked = time.monotonic()
                if (failure := self._failure_elsewhere()) is not None:
                    self._others = failure
                    raise failure
                if meanwhile is not None:
                    meanwhile()
        try:
            handle.wait()
        except RuntimeError as error:
            late = self._late()
            about = f" ({late})" if late else ""
            raise RunError(f"{_BROKEN}{about}: {_first_line(error)}") from error

    def _late(self) -> str:
        late = []
        with suppress(RuntimeError):  # process 0 died, with the store
            late = [str(r) for r in range(self.count) if not self._store.check([self._key(r)])]
        return f"late: learner process {', '.join(late)}" if late else ""

    def _first_failure(self, error: BaseException) -> BaseException:
        """Return the first failure of the run: that of another process, or `error`, now stored."""
        if error is self._others:
            return error
        if isinstance(error, Exception) and error is not self._own:
            if (failure := self._failure_elsewhere()) is not None:
                self._others = failure
                return failure
            if _is_of_a_connection(error):
                error = RunError(f"{_BROKEN}: {_first_line(error)}")
        self._own = error
        self._failed = True
        with suppress(RuntimeError):
            stored = json.dumps({"rank": self.rank, "error": described(error)})
            self._store.compare_set(_FAILED, "", stored)
        return error

    def _failure_elsewhere(self) -> RunError | ContractError | None:
        try:
            if self._store.check([_FAILED]):
                stored = json.loads(self._store.get(_FAILED))
                own = stored["rank"] == self.rank
                return None if own else rebuilt(stored["error"], stored["rank"])
        except RuntimeError as error:
            return RunError(f"learner process 0 is gone: {_first_line(error)}")
        return None

    def _watch(self) -> None:
        """End this process after a failure of the run, if it does not end by itself in time.

        It may wait in a collective for a dead process, or its clean-up may hang.
        """
        while not self._stopped.wait(self._timing.beat):
            error = self._own if self._failed else self._failure_elsewhere()
            if error is not None and not self._stopped.wait(self._timing.grace):
                print(describe(error), file=sys.stderr, flush=True)
                self._end(exit_code(error))
                return

    def _leave(self) -> None:
        """Stop the watcher. Process 0, which may hold the store, leaves last."""
        self._stopped.set()
        self._watcher.join(self._timing.linger)  # Python must not end while it uses the store
        others = [f"left/{rank}" for rank in range(self.count) if rank != self.rank]
        with suppress(RuntimeError):  # process 0 died, or the others take too long
            self._store.set(f"left/{self.rank}", "")
            if self.rank == 0:
                self._store.wait(others, timedelta(seconds=self._timing.linger))


def _is_of_a_connection(error: BaseException) -> bool:
    """Return whether gloo, NCCL or a store raised the error because a process is gone."""
    broken = isinstance(error, RuntimeError) and ("gloo" in str(error) or "NCCL" in str(error))
    return broken or isinstance(error, dist.DistError)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


@contextmanager
def open_peers(processes: int) -> Iterator[Peers]:
    """Join the other of `processes` learner processes; an error of one of them ends all of them.

    Raises ContractError if the environment lacks torchrun's variables.
    """
    if processes == 1:
        yield SINGLE_PROCESS
        return
    names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        raise ContractError(
            "WORLD_SIZE",
            f"is {processes}, and {', '.join(missing)} are not set",
            "Start the learner with torchrun, or unset WORLD_SIZE",
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:  # the processes end with torchrun
        signal_at_death_of(os.getppid(), signal.SIGKILL)
    cpu = not torch.cuda.is_available()
    # On GPUs some state of a sharded model is gathered on the CPU.
    backend = "gloo" if cpu else "cuda:nccl,cpu:gloo"
    PartialState(cpu=cpu, backend=backend, timeout=COLLECTIVE_TIMEOUT)
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    # The default group's store, which torchrun or process 0 holds.
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=_CONNECT_S),
    )
    own = PrefixStore("learner", store)
    peers = GroupPeers(dist.get_rank(), dist.get_world_size(), own, group)
    with peers.guarded():
        yield peers
    dist.destroy_process_group()
