"""All checks of `learner doctor`, in order: files, weights, machine, servers, a push.

`learner train` has the same checks of files and servers (`input_checks`, `server_checks`). A check
that needs the result of a failed check is `skipped`.
"""

from collections.abc import Iterator
from functools import partial

from transformers.utils.logging import disable_progress_bar

from learner.config.schema import Config
from learner.operate.doctor.findings import CheckResult, failed, run_check
from learner.operate.doctor.machine import MachineChecks
from learner.operate.doctor.servers import PATIENCE_S, AnswerChecks
from learner.operate.doctor.weights import push_checkpoint, weight_checks
from learner.training.checks import Check, Waiting, require
from learner.training.input_checks import StartUp, generates, input_checks
from learner.training.server_checks import server_checks
from shared_contracts.errors import ContractError


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
    findings: list[CheckResult] = []
    for check in _checks(config, findings, push):
        findings += (new := run_check(check))
        yield from new


def _checks(config: Config, findings: list[CheckResult], push: bool) -> Iterator[Check]:
    """Yield the checks. findings: those of earlier checks; the caller appends to it."""
    run = StartUp(config, patience_s=PATIENCE_S)
    machine = MachineChecks(run)
    yield from input_checks(run)
    if not any(finding.check == "checkpoint" and finding.status == "fail" for finding in findings):
        yield from weight_checks(config)
    yield from machine.checks()
    if not (generates(config) or push):
        yield Check("servers", lambda: "the run requests no rollouts")
        return
    if config.rollout_matching.backend != "server":
        yield Check("servers", lambda: f"none: {config.rollout_matching.backend} needs no server")
        return
    yield from server_checks(run)
    yield from AnswerChecks(run, machine).checks()
    if push:
        yield Check("push", partial(_push, run, findings))


def _push(run: StartUp, findings: list[CheckResult]) -> str:
    if failed(findings):
        raise Waiting("waits for the checks that failed")
    return push_checkpoint(run.config, require(run.clients, "servers"))
