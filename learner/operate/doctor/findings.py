"""What a check has found, in the words of a `ContractError`; for a person and for a script."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Literal

from rich.table import Table
from rich.text import Text

from shared_contracts.errors import ContractError

Status = Literal["ok", "warn", "fail", "skipped"]

# Errors of one check that are shown one by one.
MOST_SHOWN = 5


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    check: a few words, the same in every run. about: a server, a file or a key; may be empty.
    found: what is there; of a check that was skipped, what it waits for.
    do: empty where nothing is to be done.
    """

    check: str
    about: str
    status: Status
    found: str
    do: str = ""


def ok(check: str, found: str, about: str = "") -> Finding:
    return Finding(check, about, "ok", found)


def skipped(check: str, why: str, about: str = "", do: str = "") -> Finding:
    return Finding(check, about, "skipped", why, do)


def of_error(
    check: str, error: ContractError, about: str = "", status: Status = "fail"
) -> list[Finding]:
    """A finding for each error, up to `MOST_SHOWN`; `about` takes the place of its `where`."""
    errors = error.errors
    shown = [Finding(check, about or e.where, status, e.found, e.do) for e in errors[:MOST_SHOWN]]
    if len(errors) > MOST_SHOWN:
        found = f"{len(errors) - MOST_SHOWN} more of {len(errors)}"
        shown.append(Finding(check, about, status, found, "Mend these first"))
    return shown


_STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}
_HERE = "This machine"


def tables(findings: Sequence[Finding]) -> Iterator[Table]:
    """One for what is here, and one for each server, a row a finding.

    Checks that wait for the same share a row. Below what was found stands what to do.
    """
    servers = dict.fromkeys(f.about for f in findings if _is_server(f))
    if here := [finding for finding in findings if not _is_server(finding)]:
        yield _table(_HERE, here)
    for server in servers:
        yield _table(server, [finding for finding in findings if finding.about == server])


def summary(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.status for finding in findings)
    order: list[Status] = ["ok", "warn", "fail", "skipped"]
    return ", ".join(f"{counts[status]} {status}" for status in order)


def as_json(findings: Sequence[Finding]) -> str:
    """`{"failed": ..., "findings": [{check, about, status, found, do}, ...]}`, indented."""
    document = {"failed": failed(findings), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(document, indent=2, ensure_ascii=False)


def failed(findings: Sequence[Finding]) -> bool:
    return any(finding.status == "fail" for finding in findings)


def _table(title: str, findings: Sequence[Finding]) -> Table:
    shown = Table(title=title, title_justify="left", show_header=False, expand=True)
    shown.add_column(no_wrap=True)
    shown.add_column(width=16)
    shown.add_column(overflow="fold", ratio=1)
    for alike in _rows(findings):
        first = alike[0]
        checks = ", ".join(dict.fromkeys(finding.check for finding in alike))
        shown.add_row(Text(first.status, style=_STYLES[first.status]), checks, _found(first))
    return shown


def _rows(findings: Sequence[Finding]) -> Iterator[list[Finding]]:
    """Findings next to each other that were skipped for one reason, together."""
    for key, alike in groupby(findings, lambda f: f.found if f.status == "skipped" else ""):
        if key:
            yield list(alike)
        else:
            yield from ([finding] for finding in alike)


def _found(finding: Finding) -> Text:
    about = "" if _is_server(finding) or not finding.about else f"{finding.about}: "
    text = Text(f"{about}{finding.found}", style="dim" if finding.status == "skipped" else "")
    if finding.do:
        text.append(f"\n-> {finding.do}", style="bold")
    return text


def _is_server(finding: Finding) -> bool:
    return finding.about.startswith(("http://", "https://"))
