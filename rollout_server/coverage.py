"""What workers say about a manifest: whether it covers exactly what their model expects.

A parameter is a matrix here, as in `shared_contracts.digests`. No torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shared_contracts.errors import Problem, ProblemError

FaultKind = Literal["missing", "unexpected", "shape", "dtype", "duplicate", "untraceable"]

# Faults that a refusal lists; it counts them all.
MOST_LISTED = 32


@dataclass(frozen=True)
class Box:
    """A part of a matrix: from (row, column), so many rows and columns."""

    row: int
    column: int
    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def size(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class Fault:
    """What is wrong with a parameter of a manifest; `untraceable` is the server's own limit."""

    name: str
    kind: FaultKind
    detail: str


def adapter_refused(faults: Iterable[str]) -> ProblemError:
    """The refusal of an adapter, with why it cannot be served, whoever found it."""
    found = list(dict.fromkeys(faults))
    errors = [{"where": "adapter", "detail": fault} for fault in found[:MOST_LISTED]]
    detail = f"server: {found[0]} ({len(found)} fault(s)); the weights are what they were"
    return ProblemError(Problem.of("adapter-refused", detail, "adapter", errors))


def mismatch(faults: Iterable[Fault]) -> ProblemError:
    """The refusal of a manifest, with each of its faults once, whoever found it."""
    found = sorted(set(faults), key=lambda fault: (fault.name, fault.kind, fault.detail))
    errors = [
        {"where": fault.name, "fault": fault.kind, "detail": fault.detail}
        for fault in found[:MOST_LISTED]
    ]
    first = found[0]
    detail = (
        f"server: {len(found)} fault(s), nothing was loaded and the weights are what they were; "
        f"the first: {first.name} ({first.kind}): {first.detail}"
    )
    return ProblemError(Problem.of("manifest-mismatch", detail, "parameters", errors))
