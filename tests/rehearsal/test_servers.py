"""vLLM's whole configuration of every server that is shipped, on GPUs that are not there."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from learner.config import dump_mapping, load_config, load_mapping, merge, parse_config
from learner.operate.doctor.machine import Here, shared_gpus
from learner.operate.estimate.sizes import read_sizes
from learner.rollout.colocate import place, server_settings
from learner.rollout.server_process import free_ports
from learner.training.start_checks import check_backend, check_launcher, context_of_run
from rollout_server.engines.vllm import environment
from rollout_server.settings.options import ServerSettings
from rollout_server.settings.repeat_config import PROCESSOR, PROCESSOR_V2
from shared_contracts.errors import ContractError
from shared_contracts.machine import GpuMemory, GpuUse, visible_gpus
from shared_contracts.server_info import Info
from tests.contract import log_probabilities
from tests.contract.running_server import server_options
from tests.gpu import servers
from tests.rehearsal.faked_gpus import UUIDS, write_driver
from tests.unit.deployment import services_of
from tests.unit.full_size_models import make_full_size, make_samples
from tests.unit.sparse_weights import write_sparse_weights

pytestmark = [pytest.mark.timeout(600), pytest.mark.req("FULL-06", "FULL-10")]

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
OF_GPUS = sorted((CONFIGS / "stage2_two_channel" / "gpu").glob("*.yaml"))
# Profiles that name no size: they are tried with a model of 4B.
OF_ANY_SIZE = sorted(
    path for kind in ("prod", "smoke") for path in CONFIGS.glob(f"stage2_*/{kind}/*.yaml")
)
PROFILES = [*OF_GPUS, *OF_ANY_SIZE]
FIRST = OF_GPUS[0]
LORA_4B = CONFIGS / "stage2_two_channel" / "gpu" / "4b_lora.yaml"


def named(path: Path) -> str:
    """A profile, as in `stage2_two_channel/gpu/4b_lora`."""
    return str(path.relative_to(CONFIGS).with_suffix(""))


# The memory of the GPU that docs/full-size.md names for each.
GIB = {path: 24.0 if path.stem == "2b_full_fsdp2" else 80.0 for path in PROFILES}

# CUDA_VISIBLE_DEVICES of a server on GPUs 0 and 1, in every form that CUDA takes.
VISIBLE = {
    "ids": "0,1",
    "ids with blanks": " 0 , 1 ",
    "ids with a comma at the end": "0,1,",
    "UUIDs": f"{UUIDS[0]},{UUIDS[1]}",
    "beginnings of UUIDs": f"{UUIDS[0][:14]},{UUIDS[1][:14]}",
    "beginnings of UUIDs with blanks": f"{UUIDS[0][:14]}, {UUIDS[1][:14]}",
    "an id and a UUID": f"0,{UUIDS[1]}",
    "more than it takes": ",".join(UUIDS),
}
MIG = "MIG-41b3b2a1-9f6f-5a3e-8f0e-1f3f6b7e2c55"


@dataclass
class Rehearsed:
    """What vLLM made of each command, by name: a configuration for each replica, or a refusal."""

    commands: dict[str, dict[str, Any]] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, gib: float, *argv: object, **environment: str) -> None:
        (port,) = free_ports(1)
        options = [str(word) for word in argv if not str(word).startswith("--port=")]
        command = {"gib": gib, "argv": [*options, f"--port={port}"], "environment": environment}
        self.commands[name] = command


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by size, whose weights take no space."""
    folder = tmp_path_factory.mktemp("models")
    made = {size: make_full_size(folder / size, size) for size in ("2b", "4b", "8b")}
    base = load_mapping(FIRST)
    for model in made.values():
        config = parse_config(merge(base, {"model": {"model": str(model)}}))
        shapes = read_sizes(config).shapes
        write_sparse_weights(model / "model.safetensors", shapes)
    return made


def compose_argv(models: dict[str, Path], folder: Path) -> list[str]:
    """The command of the server of deploy/docker-compose.yaml, with its variables."""
    text = (ROOT / "deploy" / "docker-compose.yaml").read_text(encoding="utf-8")
    command: list[str] = yaml.safe_load(text)["services"]["server"]["command"]
    program, serve, *argv = command
    assert (program, serve) == ("rollout-server", "serve")
    token = folder / "token"
    token.write_text("secret")
    token.chmod(0o600)
    values = {
        "${CHECKPOINT}": models["8b"],
        "${CONFIG:?the training YAML, relative to WORK}": ROOT / "deploy/config/two_channel.yaml",
        "${IMAGES}": folder,
        "/run/secrets/rollout_server_token": token,
    }
    for name, value in values.items():
        argv = [word.replace(name, str(value)) for word in argv]
    assert not [word for word in argv if "$" in word]
    return argv


def colocated_argv(model: Path, folder: Path) -> list[str]:
    """Of the server that a learner starts beside itself, by default."""
    vllm = {"mode": "colocate", "server": None}
    changes = {"model": {"model": str(model)}, "rollout_matching": {"vllm": vllm}}
    mapping = merge(load_mapping(LORA_4B), changes)
    config, samples = parse_config(mapping), make_samples(folder, 2)
    told = server_settings(
        config,
        place(config.rollout_matching.vllm, [1]),
        [folder],
        "ipc",
        context_of_run(config, samples),
    )
    (folder / "told.yaml").write_text(dump_mapping(told))
    (folder / "run.yaml").write_text(dump_mapping(mapping))
    return [f"--config={folder / 'told.yaml'}", f"--run-config={folder / 'run.yaml'}"]


@pytest.fixture(scope="module")
def rehearsed(
    models: dict[str, Path], toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Rehearsed:
    """All servers in one process, which imports vLLM once."""
    folder, made = tmp_path_factory.mktemp("servers"), Rehearsed()
    for path in PROFILES:
        model = models[path.stem[:2] if path in OF_GPUS else "4b"]
        made.add(named(path), GIB[path], "--model", model, "--gpus=2,3", "--run-config", path)
    of_4b = ("--model", models["4b"], "--run-config", LORA_4B)
    made.add("tensor parallel", 80, *of_4b, "--gpus=2,3", "--tensor-parallel-size=2")
    made.add("compose", 80, *compose_argv(models, folder))
    made.add("colocated", 80, *colocated_argv(models["4b"], folder))
    bare = ("--model", models["4b"], "--gpus=0", "--gpu-memory-utilization=0.45")
    made.add("the checkpoint's own context", 80, *bare)
    guard = {"enabled": True, "max_consecutive_token_repeats": 64}
    guarded = merge(load_mapping(LORA_4B), {"rollout_matching": {"repeat_terminate": guard}})
    (folder / "guarded.yaml").write_text(dump_mapping(guarded))
    of_4b_guarded = ("--model", models["4b"], "--run-config", folder / "guarded.yaml", "--gpus=0")
    made.add("guarded", 80, *of_4b_guarded)
    made.add("guarded by V2", 80, *of_4b_guarded, "--model-runner=v2")
    for name, options in servers.STARTED.items():
        made.add(name, 80, *server_options(toy_checkpoint, folder, device=options))
    for form, visible in {**VISIBLE, "MIG": f"0,{MIG}", "another order": "1,0"}.items():
        made.add(form, 80, *of_4b, "--gpus=0,1", CUDA_VISIBLE_DEVICES=visible)
    (folder / "commands.json").write_text(json.dumps(list(made.commands.values())))
    hidden = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.rehearsal.faked_gpus", str(folder)],
        cwd=ROOT,
        env=hidden,
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line[:1] in "[{"]
    made.found = dict(zip(made.commands, lines, strict=True))
    return made


@pytest.mark.parametrize("path", PROFILES, ids=named)
def test_a_profile_starts_a_server_that_fits_its_gpu(rehearsed: Rehearsed, path: Path) -> None:
    config, replicas = load_config(path), rehearsed.found[named(path)]
    assert [one["gpus"] for one in replicas] == [[2], [3]]
    longest = config.global_max_length + config.rollout_matching.max_new_tokens
    for one in replicas:
        assert one["device"] == "cuda"
        assert one["worker"] == "vllm.v1.worker.gpu_worker.Worker"
        assert not one["v2_runner"]
        assert (one["dtype"], one["transfer"]) == ("torch.bfloat16", "nccl-met")
        assert one["architecture"] == "Qwen3VLForConditionalGeneration"
        assert longest <= one["max_model_len"] < longest + 256
        assert one["max_num_seqs"] == config.rollout_matching.decode_batch_size >= 64
        assert one["chunked_prefill"]
        assert not one["sleep_mode"], "nobody else needs its memory"
        assert one["max_num_batched_tokens"] == one["encoder_tokens"] == 8192
        assert one["share"] == (0.9 if GIB[path] == 80 else 0.88)


def test_a_replica_of_two_gpus_decodes_twice_as_much(rehearsed: Rehearsed) -> None:
    (one,) = rehearsed.found["tensor parallel"]
    assert (one["gpus"], one["tensor_parallel_size"], one["max_num_seqs"]) == ([2, 3], 2, 128)


def test_the_server_of_compose_has_a_replica_on_each_of_its_gpus(rehearsed: Rehearsed) -> None:
    replicas = rehearsed.found["compose"]
    assert [one["gpus"] for one in replicas] == [[0], [1], [2]]
    assert {one["max_num_seqs"] for one in replicas} == {64}
    assert {one["max_model_len"] for one in replicas} == {15104}


@pytest.mark.req("DEP-01", "DDP-01")
def test_the_learner_of_compose_has_the_gpu_that_its_server_has_not(tmp_path: Path) -> None:
    """Each container has a driver's folder of its GPUs alone, which count from 0 there."""
    text = (ROOT / "deploy" / "docker-compose.yaml").read_text(encoding="utf-8")
    services = {service.name: service for service in services_of(text)}
    uuids = {
        name: [UUIDS[int(gpu)] for gpu in services[name].gpu_ids] for name in ("server", "learner")
    }
    driver = write_driver(tmp_path / "learner", uuids["learner"])
    environment = services["learner"].raw["environment"]
    config = load_config(ROOT / "deploy" / "config" / "two_channel.yaml")
    check_launcher(environment, driver)
    assert check_backend(config, environment, driver) is None, "its server is another container's"
    assert visible_gpus(environment, driver) == [0]
    with pytest.raises(ContractError, match="1 GPUs are visible to 2 learner processes"):
        check_launcher({**environment, "LOCAL_WORLD_SIZE": "2"}, driver)
    use = GpuUse([GpuMemory(0, uuid, 0, 80 * 1024) for uuid in uuids["learner"]], [])
    info = Info.model_construct(host="node", gpus=[0, 1, 2], gpu_uuids=uuids["server"])
    (finding,) = shared_gpus(Here("node", [0], use), {"http://server:8000": info})
    assert finding.status == "ok"


@pytest.mark.req("SRV-04")
@pytest.mark.parametrize("form", VISIBLE)
def test_vllm_has_the_gpus_that_cuda_would_show(rehearsed: Rehearsed, form: str) -> None:
    assert [one["gpus"] for one in rehearsed.found[form]] == [[0], [1]]


@pytest.mark.req("SRV-04")
def test_gpus_that_a_server_cannot_take_are_refused_before_vllm(rehearsed: Rehearsed) -> None:
    part, order = rehearsed.found["MIG"], rehearsed.found["another order"]
    assert part == {
        "refused": "CUDA_VISIBLE_DEVICES",
        "found": f"{MIG!r} is a part of a GPU (MIG), and servers take whole ones",
        "do": "Name GPUs by id, as in 0,1, or by UUID, as nvidia-smi -L shows them",
    }
    assert (order["refused"], order["do"][:8]) == ("CUDA_VISIBLE_DEVICES", "Unset it")


@pytest.mark.parametrize("name", servers.STARTED)
def test_a_server_of_a_test_for_gpus_starts(rehearsed: Rehearsed, name: str) -> None:
    (one,) = rehearsed.found[name]
    options = servers.STARTED[name]
    assert one["gpus"] == ([0, 1] if "0,1" in options else [0])
    assert (one["dtype"], one["max_model_len"]) == ("torch.bfloat16", 512)
    assert one["transfer"] == ("shared-memory" if "ipc" in options else "nccl-met")
    assert one["sleep_mode"] == ("--share-gpus" in options)
    assert one["lora"] == ("--enable-lora" in options)
    assert one["share"] == float(options[options.index("--gpu-memory-utilization") + 1])
    assert not one["v2_runner"]


@pytest.mark.req("REP-04")
def test_each_runner_has_a_guard_of_its_own(rehearsed: Rehearsed) -> None:
    found = [rehearsed.found[name][0] for name in ("guarded", "guarded by V2")]
    runners = [(one["v2_runner"], one["guards"]) for one in found]
    assert runners == [(False, [PROCESSOR]), (True, [PROCESSOR_V2])]


def test_log_probabilities_come_from_the_runner_of_servers(toy_checkpoint: Path) -> None:
    told = environment(ServerSettings(model=toy_checkpoint, gpus=(0,)))
    runner = "VLLM_USE_V2_MODEL_RUNNER"
    assert log_probabilities.VARIABLES[runner] == told[runner]


@pytest.mark.req("ROLL-03")
def test_a_learner_starts_a_published_model_beside_itself(rehearsed: Rehearsed) -> None:
    (one,) = rehearsed.found["colocated"]
    assert (one["gpus"], one["share"], one["max_model_len"]) == ([1], 0.45, 4352)
    assert (one["max_num_seqs"], one["dtype"]) == (64, "torch.bfloat16")
    assert one["sleep_mode"], "for the learner on its GPU"


def test_the_checkpoints_own_context_is_refused_where_it_cannot_fit(rehearsed: Rehearsed) -> None:
    refused = rehearsed.found["the checkpoint's own context"]
    assert refused["refused"] == "max_model_len"
    assert "262,144 tokens is 36 GiB (144 KiB a token)" in refused["found"]
