"""What the learner processes of a run exchange beside gradients (DDP-01).

    all_gather(work)              the result of `work` of every process; raises in all if one failed
    broadcast_from_rank0(...)     the result of `work` of process 0

`learner.distributed.process_group` has the peers of several processes. Imports no torch.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from shared_contracts.errors import ContractError, ContractErrors, RunError

T = TypeVar("T")


class Peers:
    """The processes of a run, seen from one of them, which is alone unless it is a `GroupPeers`.

    rank: its own, from 0. count: of the processes.
    """

    rank = 0
    count = 1

    def all_gather(
        self, work: Callable[[], T], meanwhile: Callable[[], object] | None = None
    ) -> list[T]:
        """The result of `work` in each process, by rank; every process makes the same calls.

        `work` may call `all_gather` itself, in every process. The results are values of JSON.
        meanwhile: called again and again while others work.

        Raises the error of `work` here; elsewhere the same as ContractError or RunError.
        """
        return [work()]

    def propagate_errors(self) -> AbstractContextManager[None]:
        """Report an error of the block to the other processes before this one cleans up."""
        return nullcontext()


SINGLE_PROCESS = Peers()


def broadcast_from_rank0(peers: Peers, work: Callable[[], T]) -> T:
    """The result of `work` of process 0, in all of them; the others do not run it."""
    results: Sequence[T | None] = peers.all_gather(lambda: work() if peers.rank == 0 else None)
    return results[0]  # type: ignore[return-value]  # of process 0, which ran it


def described(error: BaseException) -> dict[str, Any]:
    """A failure as values of JSON, for `rebuilt`."""
    if isinstance(error, ContractError):
        return {"contract": [[e.where, e.found, e.do] for e in error.errors]}
    if isinstance(error, RunError):
        return {"text": str(error)}
    text = str(error)
    return {"text": f"{type(error).__name__}: {text}" if text else type(error).__name__}


def rebuilt(described: dict[str, Any], rank: int) -> RunError | ContractError:
    """The failure of process `rank`; an error of the user's input is the same everywhere."""
    if "text" in described:
        return RunError(f"learner process {rank} failed: {described['text']}")
    errors = [ContractError(*parts) for parts in described["contract"]]
    return errors[0] if len(errors) == 1 else ContractErrors(errors)
