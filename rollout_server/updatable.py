"""What a weight update needs of the engines, and what is known of one that runs."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from shared_contracts.weights import DtypeName, ParameterMeta

T = TypeVar("T")


class UpdatableEngine(Protocol):
    """What a weight update needs of an engine (see `engine.Engine`)."""

    @property
    def dtype(self) -> DtypeName: ...
    @property
    def weights_version(self) -> int: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def abort_all(self) -> None: ...
    async def publish(self, version: int) -> None: ...
    async def weight_phase(self, name: str, **arguments: Any) -> list[Any]:
        """What each worker of the engine returned."""


EngineCall = Callable[[UpdatableEngine], Awaitable[T]]


def worker_phase(name: str, **arguments: Any) -> EngineCall[list[Any]]:
    """A phase of `worker_extension`, for each engine that is to run it."""
    return lambda engine: engine.weight_phase(name, **arguments)


class UpdatableEngines(Protocol):
    """The engines of all replicas (see `replicas.Replicas`)."""

    def all(self) -> Sequence[UpdatableEngine]:
        """By index; raises the `not-ready` problem when one is missing."""

    def alive(self) -> Sequence[UpdatableEngine]:
        """Those that are there."""


@dataclass
class Update:
    """The update in progress; seconds by phase, bytes of one replica that came.

    trial: nothing is loaded, so that whatever breaks changes nothing.
    """

    version: int
    parameters: Sequence[ParameterMeta]
    trial: bool = False
    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def by_name(self) -> dict[str, ParameterMeta]:
        return {parameter.name: parameter for parameter in self.parameters}

    def add_slowest(self, answers: Sequence[Sequence[dict[str, float]]]) -> None:
        """Add to each phase what its slowest worker needed, of any engine."""
        of_workers = [seconds for engine in answers for seconds in engine]
        for phase in {phase for seconds in of_workers for phase in seconds}:
            slowest = max(seconds.get(phase, 0.0) for seconds in of_workers)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + slowest

    def __str__(self) -> str:
        shown = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in self.seconds.items())
        rate = self.bytes / 1e9 / max(sum(self.seconds.values()), 1e-9)
        return (
            f"weights {self.version}: {self.bytes} bytes of {len(self.parameters)} parameters; "
            f"{shown}; {rate:.3f} GB/s"
        )
