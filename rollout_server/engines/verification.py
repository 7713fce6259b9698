"""Checks of what workers report: the coverage of a manifest, and digests read back.

Each worker answers with the subtotals of the parts it holds (`read_back`). A part that several
hold, such as a tied head and its embedding, must be the same in all of them; the parts
together must make up the parameter, and their sum its digest. A parameter is a matrix here, as
in `shared_contracts.digests`. No torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shared_contracts.digests import matrix_shape, written
from shared_contracts.errors import Problem, ProblemError
from shared_contracts.weights import ParameterDigest, ParameterMeta

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
    detail = f"server: {found[0]} ({len(found)} fault(s)); the weights have not changed"
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
        f"server: {len(found)} fault(s), nothing was loaded and the weights have not changed; "
        f"the first: {first.name} ({first.kind}): {first.detail}"
    )
    return ProblemError(Problem.of("manifest-mismatch", detail, "parameters", errors))


# As they come from a worker: (module, row, column, rows, columns, subtotal).
RawPart = tuple[str, int, int, int, int, int]


@dataclass(frozen=True)
class Difference:
    """A parameter that an engine does not hold as it was sent."""

    replica: int
    name: str
    detail: str


def unknown_digests(
    digests: Sequence[ParameterDigest], parameters: Mapping[str, ParameterMeta]
) -> str | None:
    """What is wrong with the digests a push brought; None when nothing is."""
    names = [digest.name for digest in digests]
    if len(set(names)) < len(names):
        return "a parameter has two digests"
    for digest in digests:
        if digest.name not in parameters:
            return f"{digest.name} is not in the manifest"
        columns = digest.columns
        if columns is None:
            continue
        if not columns or columns != sorted(set(columns)):
            return f"the columns of {digest.name} are not in ascending order"
        width = matrix_shape(parameters[digest.name].shape)[1]
        if columns[-1] >= width:
            return f"{digest.name} has {width} column(s), not {columns[-1] + 1}"
    return None


def differences(
    replica: int,
    digests: Sequence[ParameterDigest],
    parameters: Mapping[str, ParameterMeta],
    answers: Sequence[Sequence[Sequence[RawPart]]],
) -> list[Difference]:
    """Which parameters a replica holds otherwise than they were sent.

    answers: of each worker, for each digest, the parts it holds.
    """
    found = []
    for index, digest in enumerate(digests):
        parts = [part for answer in answers for part in answer[index]]
        detail = _difference(digest, matrix_shape(parameters[digest.name].shape), parts)
        if detail is not None:
            found.append(Difference(replica, digest.name, detail))
    return found


def _difference(
    digest: ParameterDigest, shape: tuple[int, int], parts: Sequence[RawPart]
) -> str | None:
    held: dict[Box, int] = {}
    for module, row, column, rows, columns, subtotal in parts:
        if held.setdefault(Box(row, column, rows, columns), subtotal) != subtotal:
            modules = " and ".join(sorted({part[0] for part in parts}))
            return f"the copies of it differ ({modules or module})"
    size = sum(box.size for box in held)
    if size != shape[0] * shape[1]:
        return f"{size} of its {shape[0] * shape[1]} elements can be read back"
    found = written(sum(held.values()))
    if found != digest.digest:
        return f"{digest.digest} was sent, {found} is held"
    return None


def differ(found: Sequence[Difference], compared: int, where: str) -> ProblemError:
    """The `weights-differ` problem of what was found."""
    errors = [
        {"where": each.name, "replica": each.replica, "detail": each.detail}
        for each in found[:MOST_LISTED]
    ]
    first = found[0]
    detail = (
        f"server: replica {first.replica} does not hold {first.name} as it was sent: "
        f"{first.detail} ({len(found)} difference(s), {compared} parameter(s) compared)"
    )
    return ProblemError(Problem.of("weights-differ", detail, where, errors))
