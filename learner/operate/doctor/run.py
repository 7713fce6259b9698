"""All checks of `learner doctor`, in order: files, weights, machine, servers, a push.

`learner train` has the same checks of files and servers (`input_checks`, `server_checks`). A check
that needs the result of a failed check is `skipped`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.text import Text
from transformers.utils.logging import disable_progress_bar

from learner.config.schema import Config
from learner.data.show import Table, plain
from learner.operate.doctor.machine import Machine, machine_checks
from learner.operate.doctor.servers import PATIENCE_S, answer_checks
from learner.operate.doctor.weights import push_checkpoint, weight_checks
from learner.training.checks import Caution, Check, Waiting, require
from learner.training.input_checks import StartUp, generates, input_checks
from learner.training.server_checks import server_checks
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


def as_json(findings: Sequence[CheckResult]) -> str:
    """Return `{"failed": ..., "findings": [{check, about, status, found, do}, ...]}`."""
    document = {"failed": failed(findings), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(document, indent=2, ensure_ascii=False)


def failed(findings: Sequence[CheckResult]) -> bool:
    return any(finding.status == "fail" for finding in findings)


def examine(config: Config, *, push: bool = False) -> Iterator[CheckResult]:
    """Run the checks, and yield each finding at once.

    push: also push the checkpoint to the servers, if no check fails.

    Raises ContractError for a push without servers.
    """
    backend = config.rollout_matching.backend
    if push and backend != "server":
        found = f"the backend is {backend}, and --push needs servers"
        do = "Set it to server and name them in rollout_matching.vllm.server.servers"
        raise ContractError("rollout_matching.vllm.mode", found, do)
    disable_progress_bar()
    run, machine, findings = StartUp(config, patience_s=PATIENCE_S), Machine(), list[CheckResult]()
    checks = [*input_checks(run), *weight_checks(run), *machine_checks(run, machine)]
    if push or (generates(config) and backend == "server"):
        checks += [*server_checks(run), *answer_checks(run, machine)]
    if push:
        checks.append(Check("push", lambda: _push(run, findings)))
    for check in checks:
        findings += (new := run_check(check))
        yield from new


def _push(run: StartUp, findings: list[CheckResult]) -> str:
    if failed(findings):
        raise Waiting("waits for the checks that failed")
    return push_checkpoint(run.config, require(run.clients, "servers"))
