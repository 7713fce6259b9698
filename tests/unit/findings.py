"""What the doctor found, in short."""

from learner.operate.doctor.findings import Finding, Status


def worst(findings: list[Finding]) -> Status:
    order: list[Status] = ["ok", "skipped", "warn", "fail"]
    return max((f.status for f in findings), key=order.index, default="ok")


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    """The worst finding of each check."""
    found: dict[str, Finding] = {}
    for finding in findings:
        before = found.get(finding.check)
        if before is None or worst([before, finding]) != before.status:
            found[finding.check] = finding
    return found
