"""The checks of `learner doctor`: files, machine, memory, servers; and how they are shown."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor
from typer.testing import CliRunner

from learner.cli import app
from learner.config.schema import Config
from learner.models.prompts import encode_request
from learner.operate import doctor
from learner.operate.doctor import (
    CheckResult,
    Machine,
    check_overlap,
    check_owner,
    check_token,
    check_use,
    compare_versions,
    examine,
    machine_checks,
    push_checkpoint,
    run_check,
)
from learner.rollout.client import RolloutClient
from learner.training.input_checks import Caution, Check, StartUp, input_checks
from shared_contracts.errors import RunError
from shared_contracts.infer import ChoiceLogprobs, InferCall, RolloutEnvelope
from shared_contracts.machine import GpuMemory, GpuProcess, GpuUse
from shared_contracts.weights import CommunicatorReady
from tests.unit.scripted_server import envelope, problem, scripted_server
from tests.unit.scripted_server import info as info_of
from tests.unit.small_run import ConfigOf, RunYaml

URL = "http://serve-0:8000"

pytestmark = pytest.mark.req("DEP-03")


@pytest.fixture
def config(config_of: ConfigOf) -> Config:
    return config_of()


def finding_of(run: Callable[[], str]) -> CheckResult:
    (finding,) = run_check(Check("check", run))
    return finding


# --- files ------------------------------------------------------------------------------


def by_check(findings: list[CheckResult]) -> dict[str, CheckResult]:
    return {finding.check: finding for finding in reversed(findings)}


def test_every_wrong_file_is_reported_and_dependent_checks_are_skipped(
    config: Config, tmp_path: Path
) -> None:
    wrong = {
        "model": config.model.model_copy(update={"model": tmp_path / "nowhere"}),
        "training": config.training.model_copy(update={"resume": "auto"}),
    }
    checks = input_checks(StartUp(config.model_copy(update=wrong)))
    found = by_check([finding for check in checks for finding in run_check(check)])
    assert found["run folder"].found == str(tmp_path / "run"), "nothing to resume"
    assert (found["checkpoint"].status, found["data"].status) == ("fail", "skipped")
    assert (found["step"].status, found["step"].found) == ("skipped", "waits for data")


# --- machine ----------------------------------------------------------------------------


OURS = {"rollmatch": "1", "torch": "2.13.0", "transformers": "5.19.0", "vllm": "0.32.0"}


@pytest.mark.parametrize(
    ("theirs", "status"),
    [
        ({}, "ok"),
        ({"torch": "2.13.0+cpu"}, "ok"),
        ({"vllm": "0.33.0"}, "ok"),
        ({"rollmatch": "2"}, "fail"),
        ({"transformers": "5.18.0"}, "warn"),
    ],
)
def test_versions_must_agree(theirs: dict[str, str], status: str) -> None:
    info = info_of().model_copy(update={"versions": OURS | theirs})
    finding = finding_of(lambda: compare_versions(OURS, {URL: info}))
    assert finding.status == status
    for name in theirs if status != "ok" else ():
        assert f"{name} is {theirs[name]} there and {OURS[name]} here" in finding.found


USE = GpuUse(
    [GpuMemory(0, "GPU-a", 500, 81920), GpuMemory(1, "GPU-b", 9000, 81920)],
    [GpuProcess("GPU-b", 42, "python", 8192)],
)


@pytest.mark.parametrize(
    ("uuids", "status", "says"),
    [
        (["GPU-x", "GPU-b"], "fail", "has GPU-b, which the learner has"),
        (["GPU-x", "GPU-y"], "ok", "of which 1 have a known UUID"),
    ],
)
def test_gpus_of_both_sides_are_compared_by_uuid(uuids: list[str], status: str, says: str) -> None:
    theirs = info_of().model_copy(update={"gpus": [0, 1], "gpu_uuids": uuids})
    found = finding_of(lambda: check_overlap([1], USE, {URL: theirs}))
    assert found.status == status
    assert says in found.found


def test_a_used_gpu_of_the_learner_is_a_warning() -> None:
    check_use([0], USE)
    with pytest.raises(Caution, match="python \\(pid 42"):
        check_use([1], USE)


@pytest.mark.req("FULL-05")
@pytest.mark.parametrize(("gib", "status"), [(64.0, "ok"), (1e-6, "fail")])
def test_memory_by_the_estimate_is_compared_with_what_is_there(
    config: Config, monkeypatch: pytest.MonkeyPatch, gib: float, status: str
) -> None:
    run = StartUp(config)
    for check in input_checks(run):
        check.run()
    monkeypatch.setattr(doctor, "available_ram", lambda: gib * 2**30)
    checks = {check.name: check for check in machine_checks(run, Machine())}
    (found,) = run_check(checks["memory (estimate)"])
    assert found.status == status
    assert f"there are {gib:.3g} GiB" in found.found


# --- servers ----------------------------------------------------------------------------


def test_a_server_that_another_learner_owns_is_a_warning() -> None:
    check_owner({URL: info_of()})
    owned = info_of().model_copy(update={"owner": "the learner on node-3"})
    with pytest.raises(Caution, match="the learner on node-3 pushes to this server"):
        check_owner({URL: owned})


@pytest.mark.req("SRV-06")
@pytest.mark.parametrize("protected", [True, False])
def test_a_server_without_a_token_is_a_warning_if_the_learner_has_one(protected: bool) -> None:
    with scripted_server() as server:
        if protected:
            server.routes["GET /info/"] = lambda _: problem("unauthorized", "no token", "header")
        check_token([server.base_url], None)
        with nullcontext() if protected else pytest.raises(Caution, match="without one"):
            check_token([server.base_url], "secret")


# --- weights ----------------------------------------------------------------------------


class ScriptedPusher:
    def __init__(self, calls: list[object]) -> None:
        self._calls = calls

    def connect(self) -> CommunicatorReady:
        return CommunicatorReady(
            weights_version=4, world_size=2, transport="gloo", server_epoch="a-0", dtype="float32"
        )

    def push(self, version: int) -> None:
        self._calls.append(f"push {version}")

    def close(self) -> None:
        self._calls.append("close")


@pytest.mark.req("SYNC-06")
def test_push_fails_if_the_server_answers_with_other_weights(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scripted server is certain of every token, and the toy model of none."""
    processor = AutoProcessor.from_pretrained(config.model.model)
    calls: list[object] = []

    class Client(RolloutClient):
        def infer(self, call: InferCall, *_: Any) -> list[RolloutEnvelope]:
            calls.append(call.expected_weights_version)
            prompts = [encode_request(processor, each).ids.tolist() for each in call.infer_requests]
            envelopes = [envelope([1, 2], prompt) for prompt in prompts]
            for each in envelopes:
                each.response.choices[0].logprobs = ChoiceLogprobs.of([0.0, 0.0])
            return envelopes

    monkeypatch.setattr(doctor, "WeightPusher", lambda *_: ScriptedPusher(calls))
    address = {"base_url": URL, "group_port": 1}
    server = {"mode": "server", "server": {"servers": [address]}}
    vllm = config.rollout_matching.vllm.model_validate(server)
    rollout = config.rollout_matching.model_copy(update={"vllm": vllm})
    with pytest.raises(RunError, match="does not compute with the weights that were pushed"):
        push_checkpoint(config.model_copy(update={"rollout_matching": rollout}), [Client(URL)])
    assert calls == [None, "push 5", 5, "close"]


# --- the whole --------------------------------------------------------------------------


def test_push_waits_for_the_other_checks(run_yaml: RunYaml) -> None:
    file = run_yaml(data={"train_jsonl": "/none.jsonl"})
    result = CliRunner().invoke(app, ["doctor", str(file), "--json", "--push"])
    assert result.exit_code == 1, result.output
    last = json.loads(result.stdout)["findings"][-1]
    assert (last["check"], last["status"]) == ("push", "skipped")


@pytest.mark.slow
def test_run_without_servers_is_examined(config_of: ConfigOf) -> None:
    own = {"vllm": {"mode": "colocate", "server": None}}
    ratio = {"schedule": {"b_ratio": 0.5}}
    findings = list(examine(config_of(stage2_ab=ratio, rollout_matching=own)))
    found = by_check(findings)
    rows = found["coordinate rows"]
    assert "look untrained" in rows.found
    assert (rows.status, "b_ratio" in rows.do) == ("warn", True)
    assert [f for f in findings if f.status in ("warn", "fail") and f is not rows] == []
    assert "servers" not in found
