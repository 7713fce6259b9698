"""Errors of both programs.

    ContractError        invalid input; three parts; exit code 2
    RunError             a run cannot continue; one line; exit code 1
      ProblemError       an RFC 9457 problem document: raised by a server that refuses a call, and
                         by the client that reads the answer

Every HTTP error is a `Problem` (WIRE-05).
"""

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

T = TypeVar("T")

PROBLEM_MEDIA_TYPE = "application/problem+json"

# The `type` of a problem is `urn:rollmatch:` and one of these words.
PROBLEM_TITLES: dict[str, tuple[int, str]] = {
    "bad-request": (400, "The request cannot be read"),
    "unauthorized": (401, "The call carries no valid token"),
    "not-found": (404, "There is nothing at this path"),
    "method-not-allowed": (405, "This path does not take this method"),
    "too-slow": (408, "The call did not arrive in time"),
    "weight-update-order": (409, "A weight-update call came out of order"),
    "group-port-taken": (409, "The port of the weight group is taken"),
    "taken-over": (409, "Another learner owns the server"),
    "other-weights": (409, "The server holds other weights than the call expects"),
    "body-too-large": (413, "The body is larger than the server takes"),
    "misdirected": (421, "The server does not serve this host"),
    "invalid-request": (422, "The request breaks the contract"),
    "manifest-mismatch": (422, "The manifest does not cover what the model expects"),
    "adapter-refused": (422, "The engines cannot serve this adapter"),
    "too-many-calls": (429, "The server runs as many calls as it takes"),
    "header-too-large": (431, "The header is larger than the server takes"),
    "internal": (500, "The server failed"),
    "weight-transfer-failed": (502, "A weight transfer broke"),
    "not-ready": (503, "The server cannot answer now"),
    "overloaded": (503, "The server has no room for this now"),
    "push-needed": (503, "The replicas need a push of weights"),
    "weight-transfer-timeout": (504, "A phase of the weight transfer ran out of time"),
}


class ContractError(Exception):
    """Invalid input, found before anything expensive starts.

    where: dotted path, file and line, or endpoint. found: the fault. do: the remedy.
    """

    def __init__(self, where: str, found: str, do: str) -> None:
        super().__init__(where, found, do)
        self.where = where
        self.found = found
        self.do = do

    @property
    def errors(self) -> list["ContractError"]:
        """This error, or all errors of a `ContractErrors`."""
        return [self]

    def __str__(self) -> str:
        return f"{self.where}: {self.found}. {self.do}"


class ContractErrors(ContractError):
    """Several contract errors, reported together."""

    def __init__(self, errors: list[ContractError]) -> None:
        assert errors
        first = errors[0]
        super().__init__(first.where, first.found, first.do)
        self._errors = errors

    @property
    def errors(self) -> list[ContractError]:
        return self._errors

    def __str__(self) -> str:
        return "\n".join(map(str, self._errors))


class CheckErrors:
    """Collects the contract errors of several checks, to report them together."""

    def __init__(self) -> None:
        self.errors: list[ContractError] = []

    def of(self, check: Callable[[], T]) -> T | None:
        """Return the result of `check`; None if it raises a ContractError, which is collected."""
        try:
            return check()
        except ContractError as error:
            self.errors += error.errors
            return None

    def raise_all(self) -> None:
        if self.errors:
            raise ContractErrors(self.errors)


class Problem(BaseModel):
    """RFC 9457 problem details with one member of ours, `where`.

    `where` names the spot in the request, e.g. `infer_requests[3].images[0]`;
    when a call has several faults, `errors` lists each of them.
    """

    model_config = ConfigDict(extra="forbid")

    type: str
    title: str
    status: int
    detail: str
    where: str
    errors: list[dict[str, Any]] | None = None

    @classmethod
    def of(
        cls, kind: str, detail: str, where: str, errors: list[dict[str, Any]] | None = None
    ) -> "Problem":
        """Build the problem of a `kind` in `PROBLEM_TITLES`."""
        status, title = PROBLEM_TITLES[kind]
        name = f"urn:rollmatch:{kind}"
        return cls(type=name, title=title, status=status, detail=detail, where=where, errors=errors)

    @property
    def kind(self) -> str:
        """The key of `PROBLEM_TITLES`."""
        return self.type.rpartition(":")[2]


class RunError(Exception):
    """A run cannot continue, for a reason outside of this program."""


class ProblemError(RunError):
    """An HTTP answer that is a problem document, on either side of the wire."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        p = self.problem
        return f"{p.where}: {p.title} ({p.status}): {p.detail}"


def refusal(kind: str, detail: str, where: str) -> ProblemError:
    """Return the exception of a problem; `kind` is a key of `PROBLEM_TITLES`."""
    return ProblemError(Problem.of(kind, detail, where))
