"""Exceptions of refused calls; `http/problems.py` answers them (WIRE-05)."""

from shared_contracts.errors import Problem, ProblemError


class BadRequest(Exception):
    """A fault inside one request of a call.

    where: path inside the request, such as `images[0]`. found: the fault.
    """

    def __init__(self, where: str, found: str) -> None:
        super().__init__(where, found)
        self.where = where
        self.found = found


def refusal(kind: str, detail: str, where: str) -> ProblemError:
    """Return the exception of a problem; `kind` is a key of `PROBLEM_TITLES`."""
    return ProblemError(Problem.of(kind, detail, where))


def refuse_requests(faults: dict[int, BadRequest]) -> ProblemError:
    """Return the refusal of a call with bad requests. faults: by request index."""
    errors = [
        {"index": index, "where": f"infer_requests[{index}].{fault.where}", "detail": fault.found}
        for index, fault in sorted(faults.items())
    ]
    first = errors[0]
    detail = f"{len(errors)} bad request(s), nothing is answered; the first: {first['detail']}"
    return ProblemError(Problem.of("invalid-request", detail, str(first["where"]), errors))
