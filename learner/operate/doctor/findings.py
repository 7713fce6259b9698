"""Findings of checks, as a table and as JSON."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.text import Text

from learner.data.show import Table, plain
from learner.training.checks import Caution, Check, Waiting
from shared_contracts.cli import printable
from shared_contracts.errors import ContractError, RunError

Status = Literal["ok", "warn", "fail", "skipped"]

_STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}


@dataclass(frozen=True)
class CheckResult:
    """One row of the table.

    check: name of the check. about: a server, file or key; may be empty. found: the result; for a
    skipped check, the missing one. do: the remedy; may be empty.
    """

    check: str
    about: str
    status: Status
    found: str
    do: str = ""


def run_check(check: Check) -> list[CheckResult]:
    """Run a check; return one finding, or one for each of its errors."""
    try:
        return [CheckResult(check.name, "", "ok", check.run())]
    except Waiting as waiting:
        return [CheckResult(check.name, "", "skipped", str(waiting))]
    except RunError as error:
        return [CheckResult(check.name, "", "fail", str(error), "See the server's log")]
    except ContractError as error:
        status: Status = "warn" if isinstance(error, Caution) else "fail"
        return [CheckResult(check.name, e.where, status, e.found, e.do) for e in error.errors]


def table(findings: Sequence[CheckResult]) -> Table:
    """Return one row for each finding: status, check, and result above remedy."""
    rows = list[list[str | Text]]()
    for finding in findings:
        about = f"{finding.about}: " if finding.about else ""
        text = plain(f"{about}{finding.found}")
        if finding.do:
            text.append(f"\n-> {printable(finding.do)}", style="bold")
        rows.append([Text(finding.status, _STYLES[finding.status]), finding.check, text])
    return Table("", ("", "", ""), rows)


def summary(findings: Sequence[CheckResult]) -> str:
    counts = Counter(finding.status for finding in findings)
    return ", ".join(f"{counts[status]} {status}" for status in _STYLES)


def as_json(findings: Sequence[CheckResult]) -> str:
    """Return `{"failed": ..., "findings": [{check, about, status, found, do}, ...]}`."""
    document = {"failed": failed(findings), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(document, indent=2, ensure_ascii=False)


def failed(findings: Sequence[CheckResult]) -> bool:
    return any(finding.status == "fail" for finding in findings)
