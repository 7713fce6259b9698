"""The checks of `learner doctor`: files, machine, memory, servers; and how they are shown."""

import json
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor
from typer.testing import CliRunner

from learner.cli import app
from learner.config import dump_mapping
from learner.config.schema import Config, LoraTuner
from learner.data.jsonl import build_request, read_samples
from learner.data.toy import ToyData
from learner.models.packed_forward import encode_request
from learner.operate.doctor import inputs, machine, memory, servers, weights
from learner.operate.doctor.findings import Finding, as_json, ok, skipped, summary, tables
from learner.operate.doctor.run import examine
from learner.operate.estimate import sizes
from learner.rollout.client import RolloutClient, ServerUnreachable
from shared_contracts.errors import Problem, ProblemError
from shared_contracts.infer import ChoiceLogprobs, InferCall, RolloutEnvelope
from shared_contracts.machine import GpuMemory, GpuProcess, GpuUse
from shared_contracts.weights import CommunicatorReady
from tests.unit.findings import by_check, worst
from tests.unit.scripted_server import envelope
from tests.unit.scripted_server import info as info_of
from tests.unit.small_run import small_config, small_mapping

URL = "http://serve-0:8000"
GIB = 2**30

pytestmark = pytest.mark.req("DEP-03")


@pytest.fixture
def config(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> Config:
    return small_config(toy_checkpoint, toy_data, tmp_path / "run")


# --- files ------------------------------------------------------------------------------


def test_valid_files_are_counted(config: Config) -> None:
    looked = inputs.look(config)
    assert worst(looked.findings) == "ok"
    found = by_check(looked.findings)
    assert [f.found for f in looked.findings if f.check == "data"] == ["24 samples", "4 samples"]
    assert found["images"].found == "28 of 28 decoded"
    assert found["run"].found.startswith("3 steps into ")
    assert looked.whole is not None
    assert len(looked.samples) == 24


def test_broken_image_is_named_and_the_other_checks_run(
    config: Config, toy_data: ToyData, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    line = json.loads(toy_data.train_jsonl.read_text().splitlines()[0])
    data = tmp_path / "train.jsonl"
    data.write_text((json.dumps({**line, "images": [str(broken)]}) + "\n") * 4)
    own = config.data.model_copy(update={"train_jsonl": data})
    looked = inputs.look(config.model_copy(update={"data": own}))
    found = by_check(looked.findings)
    assert found["images"].status == "fail"
    assert found["images"].about == str(broken)
    assert "no image of a known format" in found["images"].found
    assert found["run"].status == "fail"  # it would not start
    assert {f.about for f in looked.findings if f.check == "run"} == {
        f"{data}:{line}" for line in range(1, 5)
    }
    assert found["data"].status == "ok"


def test_every_wrong_file_is_reported_and_dependent_checks_are_skipped(
    config: Config, tmp_path: Path
) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text('{"images": []}\n')
    wrong = {
        "data": config.data.model_copy(update={"train_jsonl": data}),
        "model": config.model.model_copy(update={"model": tmp_path / "nowhere"}),
    }
    looked = inputs.look(config.model_copy(update=wrong))
    found = by_check(looked.findings)
    assert (found["checkpoint"].status, found["data"].status) == ("fail", "fail")
    assert found["data"].about == f"{data}:1"
    assert (found["images"].status, found["run"].status) == ("ok", "skipped")
    assert (looked.has_checkpoint, looked.samples) == (False, [])


# --- machine ----------------------------------------------------------------------------


OURS = {"rollmatch": "1", "torch": "2.13.0", "transformers": "5.19.0", "vllm": "0.32.0"}


@pytest.mark.parametrize(
    ("theirs", "status"),
    [
        ({}, "ok"),
        ({"torch": "2.13.0+cpu"}, "ok"),
        ({"vllm": "0.33.0"}, "ok"),
        ({"rollmatch": "2"}, "fail"),
        ({"torch": "2.14.0"}, "warn"),
        ({"transformers": "5.18.0"}, "warn"),
    ],
)
def test_versions_must_agree(theirs: dict[str, str], status: str) -> None:
    finding = machine.compare_versions(OURS, OURS | theirs, URL)
    assert finding.status == status
    for name in theirs if status != "ok" else ():
        assert f"{name} is {theirs[name]} there and {OURS[name]} here" in finding.found


USE = GpuUse(
    [GpuMemory(0, "GPU-a", 500, 81920), GpuMemory(1, "GPU-b", 9000, 81920)],
    [GpuProcess("GPU-b", 42, "python", 8192)],
)


@pytest.mark.parametrize(
    ("host", "uuids", "use", "status", "says"),
    [
        ("node", ["GPU-x", "GPU-b"], USE, "fail", "GPU 1 is this server's"),
        ("pod-2", ["GPU-b", "GPU-x"], USE, "fail", "GPU 1 is this server's"),  # renumbered there
        ("node", ["GPU-x", "GPU-y"], USE, "ok", "none of its GPUs"),
        ("node", [], USE, "warn", "both sides name GPU 1 of node"),
        ("pod-2", [], USE, "skipped", "were not compared"),
    ],
)
def test_gpus_of_both_sides_are_compared_by_uuid(
    host: str, uuids: list[str], use: GpuUse | None, status: str, says: str
) -> None:
    theirs = info_of().model_copy(update={"host": host, "gpus": [0, 1], "gpu_uuids": uuids})
    (found,) = machine.shared_gpus(machine.Here("node", [1], use), {URL: theirs})
    assert (found.status, found.about) == (status, URL)
    assert says in found.found


def test_a_missing_parameter_is_a_failure(config: Config, tmp_path: Path) -> None:
    model = shutil.copytree(config.model.model, tmp_path / "model")
    held = load_file(model / "model.safetensors")
    del held["model.language_model.norm.weight"]
    save_file(held, model / "model.safetensors", {"format": "pt"})
    own = config.model_copy(update={"model": config.model.model_copy(update={"model": model})})
    found = by_check(memory.weigh(own, inputs.look(own), [], None, None).findings)
    assert found["weights"].status == "fail"
    assert "model.language_model.norm.weight" in found["weights"].found


@pytest.mark.req("FULL-03")
def test_host_with_too_little_memory_for_the_processes_is_a_failure(config: Config) -> None:
    """Each process loads the whole model: in float32, with LoRA in 16 bits."""
    counted = sizes.read_sizes(config)
    lora = LoraTuner(train_type="lora", lora_rank=4, lora_alpha=8)
    low = config.model.model_copy(update={"torch_dtype": "bfloat16"})
    frozen = config.model_copy(update={"tuner": lora, "model": low})
    for of, size in ((config, 4), (frozen, 2)):
        needed = 4 * size * counted.parameters
        assert memory.judge_loading(of, counted, 4, needed) is None
        finding = memory.judge_loading(of, counted, 4, needed - 1)
        assert finding is not None
        assert finding.status == "fail"
        assert finding.found.startswith("4 learner processes load ")
    assert memory.judge_loading(config, counted, 4, None) is None


# --- servers ----------------------------------------------------------------------------


def test_settings_of_a_server_are_compared_with_the_config(config: Config) -> None:
    assert servers.judge_settings(config, URL, info_of(), "gloo")[0].status == "ok"
    (other,) = servers.judge_settings(config, URL, info_of(), "nccl")
    assert other.status == "fail"
    assert "over gloo, the learner's over nccl" in other.found
    few = servers.judge_settings(config, URL, info_of(max_num_seqs=1, world_size=64), "gloo")
    assert "decodes 1 sequences" in few[0].found
    short = servers.judge_settings(config, URL, info_of(max_model_len=64), "gloo", needed=65)
    assert (worst(short), "at most 64 tokens" in short[0].found) == ("warn", True)
    assert worst(servers.judge_settings(config, URL, info_of(max_model_len=65), "gloo", 65)) == "ok"
    assert worst(servers.judge_together(config, [info_of()], {})) == "ok"
    assert worst(servers.judge_together(config, [info_of()], {"WORLD_SIZE": "4096"})) == "fail"
    (taken,) = servers.judge_together(config, [info_of(world_size=2)], {})
    assert "1 learner process(es), which WORLD_SIZE=N says otherwise" in taken.found


def refused(kind: str, detail: str, *wheres: str) -> ProblemError:
    errors = [{"where": where, "detail": detail} for where in wheres]
    return ProblemError(Problem.of(kind, detail, "infer_requests", errors or None))


@pytest.mark.parametrize(
    ("error", "status", "found", "do"),
    [
        (
            refused(
                "invalid-request",
                "in no directory (--allowed-media-dir)",
                "infer_requests[0].images[0]",
                "infer_requests[1].images[0]",
            ),
            "fail",
            "00000.png",
            "--allowed-media-dir",
        ),
        (
            refused("invalid-request", "no such file", "infer_requests[1].images[0]"),
            "fail",
            "00001.png",
            "same path",
        ),
        (refused("push-needed", "it broke"), "skipped", "the first push of the run mends it", ""),
        (refused("body-too-large", "9 MiB"), "fail", "9 MiB", "--max-body-mib"),
        (ServerUnreachable("gone"), "fail", "gone", ""),
    ],
)
def test_request_without_an_answer_is_explained(
    toy_data: ToyData, error: Any, status: str, found: str, do: str
) -> None:
    samples = read_samples(toy_data.train_jsonl, allow_poly=False)[:2]
    requests = [build_request(sample, "Detect.", None) for sample in samples]
    (finding,) = servers.unanswered(error, requests, URL)
    assert finding.status == status
    assert found in finding.found
    assert do in finding.do


@pytest.mark.req("RES-16")
def test_prompt_of_the_server_must_have_every_id_of_the_learner(
    toy_checkpoint: Path, toy_data: ToyData
) -> None:
    sample = read_samples(toy_data.train_jsonl, allow_poly=False)[0]
    request = build_request(sample, "Detect.", None)
    processor = AutoProcessor.from_pretrained(toy_checkpoint)
    ours = encode_request(processor, request).ids.tolist()

    def finding(theirs: list[int]) -> Finding:
        return servers.prompts([sample], [request], [envelope([1], theirs)], processor, URL)

    assert finding(ours).found == f"1 prompts of {len(ours)} tokens agree"
    for theirs in ([], ours[:3], ours[:-1], [*ours, ours[-1]]):
        differs = finding(theirs)
        assert (differs.check, differs.status) == ("prompt", "fail")
        assert f"position {min(len(theirs), len(ours))}" in differs.found
        assert "no token" in differs.found
        assert f"lengths {len(ours)} and {len(theirs)}" in differs.found


# --- weights ----------------------------------------------------------------------------


def test_a_taken_group_port_is_a_failure_that_names_its_process() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        free = weights.group_port(URL, "127.0.0.1", port)
        held.listen()
        taken = weights.group_port(URL, "127.0.0.1", port)
    assert (free.status, taken.status) == ("ok", "fail")
    assert f"(pid {os.getpid()})" in taken.found


def test_owner_of_a_server_is_a_warning() -> None:
    assert weights.owned(info_of(), URL) is None
    found = weights.owned(info_of().model_copy(update={"owner": "the learner on node-3"}), URL)
    assert found is not None
    assert (found.check, found.status) == ("group port", "warn")
    assert "the learner on node-3 pushes to this server" in found.found
    assert "takes a server over" in found.do


class ScriptedPusher:
    """Notes its calls."""

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

    monkeypatch.setattr(weights, "WeightPusher", lambda *_: ScriptedPusher(calls))
    (finding,) = weights.push_checkpoint(config, [Client(URL)])
    assert calls == [None, "push 5", 5, "close"]
    assert (finding.check, finding.about, finding.status) == ("push", URL, "fail")
    assert "does not compute with the weights that were pushed" in finding.found


def test_push_waits_for_the_other_checks(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    file, data = tmp_path / "run.yaml", replace(toy_data, train_jsonl=tmp_path / "none.jsonl")
    file.write_text(dump_mapping(small_mapping(toy_checkpoint, data, tmp_path / "run")))
    result = CliRunner().invoke(app, ["doctor", str(file), "--json", "--push"])
    assert result.exit_code == 1, result.output
    last = json.loads(result.stdout)["findings"][-1]
    assert (last["check"], last["status"]) == ("push", "skipped")


# --- the whole --------------------------------------------------------------------------


@pytest.mark.slow
def test_run_without_servers_is_examined(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    own = {"vllm": {"mode": "colocate", "server": None}}
    ratio = {"schedule": {"b_ratio": 0.5}}
    config = small_config(toy_checkpoint, toy_data, tmp_path, stage2_ab=ratio, rollout_matching=own)
    findings = list(examine(config))
    found = by_check(findings)
    rows = found["coordinate rows"]
    assert "look untrained" in rows.found
    assert (rows.status, "b_ratio" in rows.do) == ("warn", True)
    assert [f for f in findings if f.status in ("warn", "fail") and f is not rows] == []
    assert found["servers"].status == "skipped"
    assert "colocate" in found["servers"].found
    assert "server memory (estimate)" in found


def test_findings_are_shown_as_tables_and_as_json() -> None:
    findings = [
        ok("data", "4 samples", "train.jsonl"),
        Finding("token", URL, "fail", "there is none", "Set it"),
        skipped("media", "waits for token", URL),
        skipped("rollout", "waits for token", URL),
    ]
    console = Console(width=90, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in tables(findings):
        console.print(table)
    text = console.export_text()
    for part in ("This machine", "train.jsonl: 4 samples", URL, "-> Set it", "media, rollout"):
        assert part in text
    assert text.count("waits for token") == 1
    assert summary(findings) == "1 ok, 0 warn, 1 fail, 2 skipped"
    document = json.loads(as_json(findings))
    assert document["failed"] is True
    assert [each["status"] for each in document["findings"]] == ["ok", "fail", "skipped", "skipped"]
