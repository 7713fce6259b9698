"""Whether the engines hold what was sent: digests read back, put together and compared.

Each worker answers with the subtotals of the parts it holds (`readback`). A part that several
hold, such as a tied head and its embedding, must be the same in all of them; the parts
together must make up the parameter, and their sum its digest. No torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollout_server.coverage import MOST_LISTED, Box
from shared_contracts.digests import matrix_shape, written
from shared_contracts.errors import Problem, ProblemError
from shared_contracts.weights import ParameterDigest, ParameterMeta

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
