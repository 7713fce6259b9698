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
    def row_end(self) -> int:
        return self.row + self.rows

    @property
    def column_end(self) -> int:
        return self.column + self.columns

    @property
    def size(self) -> int:
        return self.rows * self.columns

    def overlaps(self, other: "Box") -> bool:
        return (
            self.row < other.row_end
            and other.row < self.row_end
            and self.column < other.column_end
            and other.column < self.column_end
        )

    def without(self, other: "Box") -> list["Box"]:
        """The parts of this box that `other` does not cover, disjoint."""
        if not self.overlaps(other):
            return [self]
        top, bottom = max(self.row, other.row), min(self.row_end, other.row_end)
        left, right = max(self.column, other.column), min(self.column_end, other.column_end)
        parts = [
            Box(self.row, self.column, top - self.row, self.columns),
            Box(bottom, self.column, self.row_end - bottom, self.columns),
            Box(top, self.column, bottom - top, left - self.column),
            Box(top, right, bottom - top, self.column_end - right),
        ]
        return [part for part in parts if part.size > 0]


def covered(boxes: Iterable[Box]) -> int:
    """Elements that `boxes` cover together."""
    disjoint: list[Box] = []
    for box in boxes:
        rest = [box]
        for other in disjoint:
            rest = [part for each in rest for part in each.without(other)]
        disjoint += rest
    return sum(part.size for part in disjoint)


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
