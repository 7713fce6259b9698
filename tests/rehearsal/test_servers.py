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
from learner.operate.estimate.sizes import read_sizes
from learner.rollout.colocate import place, server_settings
from learner.rollout.server_process import free_ports
from learner.training.start_checks import context_of_run
from tests.unit.full_size_models import make_full_size, make_samples
from tests.unit.sparse_weights import write_sparse_weights

pytestmark = [pytest.mark.timeout(300), pytest.mark.req("FULL-06", "FULL-10")]

ROOT = Path(__file__).parents[2]
PROFILES = sorted((ROOT / "configs" / "stage2_two_channel" / "gpu").glob("*.yaml"))
# The memory of the GPU that docs/full-size.md names for each.
GIB = {path.stem: 24.0 if path.stem == "2b_full_fsdp2" else 80.0 for path in PROFILES}


@dataclass
class Rehearsed:
    """What vLLM made of each command, by name: a configuration for each replica, or a refusal."""

    commands: dict[str, dict[str, Any]] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, gib: float, *argv: object) -> None:
        (port,) = free_ports(1)
        options = [str(word) for word in argv if not str(word).startswith("--port=")]
        self.commands[name] = {"gib": gib, "argv": [*options, f"--port={port}"]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by size, whose weights take no space."""
    folder = tmp_path_factory.mktemp("models")
    made = {size: make_full_size(folder / size, size) for size in ("2b", "4b", "8b")}
    base = load_mapping(PROFILES[0])
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
    profile = next(path for path in PROFILES if path.stem == "4b_lora")
    mapping = merge(load_mapping(profile), changes)
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
def rehearsed(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Rehearsed:
    """All servers in one process, which imports vLLM once."""
    folder, made = tmp_path_factory.mktemp("servers"), Rehearsed()
    for path in PROFILES:
        model = models[path.stem[:2]]
        options = ("--model", model, "--gpus=2,3", "--run-config", path)
        made.add(path.stem, GIB[path.stem], *options)
    path = PROFILES[-1]
    made.add("tensor parallel", 80, *options, "--tensor-parallel-size=2")
    made.add("compose", 80, *compose_argv(models, folder))
    made.add("colocated", 80, *colocated_argv(models["4b"], folder))
    bare = ("--model", models["4b"], "--gpus=0", "--gpu-memory-utilization=0.45")
    made.add("the checkpoint's own context", 80, *bare)
    (folder / "commands.json").write_text(json.dumps(list(made.commands.values())))
    hidden = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.rehearsal.faked_gpus", str(folder)],
        cwd=ROOT,
        env=hidden,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line[:1] in "[{"]
    made.found = dict(zip(made.commands, lines, strict=True))
    return made


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_profile_starts_a_server_that_fits_its_gpu(rehearsed: Rehearsed, path: Path) -> None:
    config, replicas = load_config(path), rehearsed.found[path.stem]
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
        assert one["share"] == (0.9 if GIB[path.stem] == 80 else 0.88)


def test_a_replica_of_two_gpus_decodes_twice_as_much(rehearsed: Rehearsed) -> None:
    (one,) = rehearsed.found["tensor parallel"]
    assert (one["gpus"], one["tensor_parallel_size"], one["max_num_seqs"]) == ([2, 3], 2, 128)


def test_the_server_of_compose_has_a_replica_on_each_of_its_gpus(rehearsed: Rehearsed) -> None:
    replicas = rehearsed.found["compose"]
    assert [one["gpus"] for one in replicas] == [[0], [1], [2]]
    assert {one["max_num_seqs"] for one in replicas} == {64}
    assert {one["max_model_len"] for one in replicas} == {15104}


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
