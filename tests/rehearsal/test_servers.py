"""vLLM's configuration of the servers of all profiles, on GPUs that are not there."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_mapping, load_config, load_mapping, merge, parse_config
from learner.models.load import on_meta
from learner.rollout.colocate import place, server_settings
from learner.rollout.server_process import free_ports
from learner.training.checkpoint_checks import context_of_run
from rollout_server.settings.repeat_config import PROCESSOR
from tests.contract.running_server import server_options
from tests.gpu import servers
from tests.rehearsal.faked_gpus import UUIDS
from tests.unit.full_size_models import make_full_size, make_samples
from tests.unit.sparse_weights import write_sparse_weights

pytestmark = [pytest.mark.slow, pytest.mark.req("FULL-06", "FULL-10")]

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


# Memory of the GPU in docs/gpus.md, by profile.
GIB = {path: 24.0 if path.stem == "2b_full_fsdp2" else 80.0 for path in PROFILES}

# Values of CUDA_VISIBLE_DEVICES for a server on GPUs 0 and 1.
VISIBLE = {
    "ids and beginnings of UUIDs, with blanks": f" 0 , {UUIDS[1][:14]},",
    "more than it takes": ",".join(UUIDS),
}
# Of our plug-in for weight transfer.
BACKEND = "rollmatch"
MIG = "MIG-41b3b2a1-9f6f-5a3e-8f0e-1f3f6b7e2c55"


@dataclass
class Rehearsed:
    """vLLM's configuration of each replica, or a refusal, by the name of the command."""

    commands: dict[str, dict[str, Any]] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, gib: float, *argv: object, **environment: str) -> None:
        (port,) = free_ports(1)
        options = [*map(str, argv), f"--port={port}"]
        self.commands[name] = {"gib": gib, "argv": options, "environment": environment}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by size, whose weights take no space."""
    folder = tmp_path_factory.mktemp("models")
    made = {size: make_full_size(folder / size, size) for size in ("2b", "4b", "8b")}
    base = load_mapping(FIRST)
    for model in made.values():
        config = parse_config(merge(base, {"model": {"model": str(model)}}))
        shapes = {name: tuple(w.shape) for name, w in on_meta(config).named_parameters()}
        write_sparse_weights(model / "model.safetensors", shapes)
    return made


def colocated_argv(model: Path, folder: Path) -> list[str]:
    """The server that a learner starts beside itself by default."""
    vllm = {"mode": "colocate", "server": None}
    changes = {"model": {"model": str(model)}, "rollout_matching": {"vllm": vllm}}
    mapping = merge(load_mapping(LORA_4B), changes)
    config, samples = parse_config(mapping), make_samples(folder, 2)
    placed, context = place(config.rollout_matching.vllm, [1]), context_of_run(config, samples)
    settings = server_settings(config, placed, [folder], "ipc", context)
    (folder / "server.yaml").write_text(dump_mapping(settings))
    (folder / "run.yaml").write_text(dump_mapping(mapping))
    return [f"--config={folder / 'server.yaml'}", f"--run-config={folder / 'run.yaml'}"]


@pytest.fixture(scope="module")
def rehearsed(
    models: dict[str, Path], toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Rehearsed:
    """All servers in one process that imports vLLM once."""
    folder, made = tmp_path_factory.mktemp("servers"), Rehearsed()
    for path in PROFILES:
        model = models[path.stem[:2] if path in OF_GPUS else "4b"]
        made.add(named(path), GIB[path], "--model", model, "--gpus=2", "--run-config", path)
    of_4b = ("--model", models["4b"], "--run-config", LORA_4B)
    made.add("tensor parallel", 80, *of_4b, "--gpus=2,3", "--tensor-parallel-size=2")
    made.add("colocated", 80, *colocated_argv(models["4b"], folder))
    bare = ("--model", models["4b"], "--gpus=0", "--gpu-memory-utilization=0.45")
    made.add("the checkpoint's own context", 80, *bare)
    guard = {"enabled": True, "max_consecutive_token_repeats": 64}
    guarded = merge(load_mapping(LORA_4B), {"rollout_matching": {"repeat_terminate": guard}})
    (folder / "guarded.yaml").write_text(dump_mapping(guarded))
    of_4b_guarded = ("--model", models["4b"], "--run-config", folder / "guarded.yaml")
    made.add("guarded", 80, *of_4b_guarded, "--gpus=0")
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
    config, (one,) = load_config(path), rehearsed.found[named(path)]
    longest = config.global_max_length + config.rollout_matching.max_new_tokens
    assert (one["device"], one["gpus"]) == ("cuda", [2])
    assert one["worker"] == "vllm.v1.worker.gpu_worker.Worker"
    assert one["v2_runner"], "vLLM's default"
    assert (one["dtype"], one["transfer"]) == ("torch.bfloat16", BACKEND)
    assert one["architecture"] == "Qwen3VLForConditionalGeneration"
    assert longest <= one["max_model_len"] < longest + 256
    assert one["max_num_seqs"] == config.rollout_matching.decode_batch_size >= 64
    assert one["chunked_prefill"]
    assert not one["sleep_mode"], "the GPU is not shared"
    assert one["max_num_batched_tokens"] == one["encoder_tokens"] == 8192
    assert one["share"] == (0.9 if GIB[path] == 80 else 0.88)


@pytest.mark.req("ROLL-03")
def test_gpus_and_sequences_follow_the_command(rehearsed: Rehearsed) -> None:
    (one,) = rehearsed.found["tensor parallel"]
    assert (one["gpus"], one["tensor_parallel_size"], one["max_num_seqs"]) == ([2, 3], 2, 128)
    (one,) = rehearsed.found["colocated"]
    assert (one["gpus"], one["share"], one["max_model_len"]) == ([1], 0.45, 4352)
    assert (one["max_num_seqs"], one["dtype"]) == (64, "torch.bfloat16")
    assert one["sleep_mode"], "the learner uses the same GPU"
    refused = rehearsed.found["the checkpoint's own context"]
    assert refused["refused"] == "max_model_len"
    assert "262,144 tokens is 36 GiB (144 KiB a token)" in refused["found"]


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
def test_servers_of_tests_for_gpus_start(rehearsed: Rehearsed, name: str) -> None:
    (one,) = rehearsed.found[name]
    options = servers.STARTED[name]
    assert one["gpus"] == ([0, 1] if "0,1" in options else [0])
    assert (one["dtype"], one["max_model_len"]) == ("torch.bfloat16", 512)
    assert one["transfer"] == BACKEND
    assert one["sleep_mode"] == ("--share-gpus" in options)
    assert one["lora"] == ("--enable-lora" in options)
    assert one["share"] == float(options[options.index("--gpu-memory-utilization") + 1])
    assert one["v2_runner"], "vLLM's default"


@pytest.mark.req("REP-03", "REP-04")
def test_the_guard_runs_on_the_model_runner_v1(rehearsed: Rehearsed) -> None:
    (one,) = rehearsed.found["guarded"]
    assert (one["v2_runner"], one["guards"]) == (False, [PROCESSOR])
