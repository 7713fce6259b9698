"""What the doctor found, in short."""

from learner.operate.doctor.findings import CheckResult, Status


def worst(findings: list[CheckResult]) -> Status:
    order: list[Status] = ["ok", "skipped", "warn", "fail"]
    return max((f.status for f in findings), key=order.index, default="ok")


def by_check(findings: list[CheckResult]) -> dict[str, CheckResult]:
    """The worst finding of each check."""
    found: dict[str, CheckResult] = {}
    for finding in findings:
        before = found.get(finding.check)
        if before is None or worst([before, finding]) != before.status:
            found[finding.check] = finding
    return found
