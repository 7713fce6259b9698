"""Results that the learner processes exchange beside gradients (DDP-01). Imports no torch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from shared_contracts.errors import ContractError, ContractErrors, RunError

T = TypeVar("T")


class Peers:
    """A run of one process; `learner.distributed.process_group` has several."""

    rank = 0
    count = 1

    def all_gather(
        self, work: Callable[[], T], meanwhile: Callable[[], object] | None = None
    ) -> list[T]:
        """Return the JSON results of `work` in each process, by rank.

        Every process must make the same calls. `work` may call `all_gather` itself, in every
        process. meanwhile: called repeatedly while this process waits for others.

        Raises the error of `work`; in the other processes as ContractError or RunError.
        """
        return [work()]

    def propagate_errors(self) -> AbstractContextManager[None]:
        """Report an error of the block to the other processes before this one cleans up."""
        return nullcontext()


SINGLE_PROCESS = Peers()


def broadcast_from_rank0(peers: Peers, work: Callable[[], T]) -> T:
    results: Sequence[T | None] = peers.all_gather(lambda: work() if peers.rank == 0 else None)
    return results[0]  # type: ignore[return-value]  # process 0 has run `work`


def described(error: BaseException) -> dict[str, Any]:
    """Convert a failure to JSON values, for `rebuilt`."""
    if isinstance(error, ContractError):
        return {"contract": [[e.where, e.found, e.do] for e in error.errors]}
    if isinstance(error, RunError):
        return {"text": str(error)}
    text = str(error)
    return {"text": f"{type(error).__name__}: {text}" if text else type(error).__name__}


def rebuilt(described: dict[str, Any], rank: int) -> RunError | ContractError:
    """Return the failure of process `rank`; a ContractError stays as it is."""
    if "text" in described:
        return RunError(f"learner process {rank} failed: {described['text']}")
    errors = [ContractError(*parts) for parts in described["contract"]]
    return errors[0] if len(errors) == 1 else ContractErrors(errors)
