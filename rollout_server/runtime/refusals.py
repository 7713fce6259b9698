"""Refusals: what any room raises for a call that the server does not answer (WIRE-05).

`http/problems.py` turns them into problem documents.
"""

from shared_contracts.errors import Problem, ProblemError


class BadRequest(Exception):
    """A fault inside one request of a call.

    where: the spot inside the request, such as `images[0]`; found: what is wrong there.
    """

    def __init__(self, where: str, found: str) -> None:
        super().__init__(where, found)
        self.where = where
        self.found = found


def refusal(kind: str, detail: str, where: str) -> ProblemError:
    """The exception of a problem of `kind` (`PROBLEM_TITLES`), to be raised."""
    return ProblemError(Problem.of(kind, detail, where))


def refuse_requests(faults: dict[int, BadRequest]) -> ProblemError:
    """The refusal of a whole call, with the index of every bad request."""
    errors = [
        {"index": index, "where": f"infer_requests[{index}].{fault.where}", "detail": fault.found}
        for index, fault in sorted(faults.items())
    ]
    first = errors[0]
    detail = f"{len(errors)} bad request(s), nothing is answered; the first: {first['detail']}"
    return ProblemError(Problem.of("invalid-request", detail, str(first["where"]), errors))
