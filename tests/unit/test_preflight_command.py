"""`learner preflight`, and the launcher that reads its output (CFG-09)."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from learner.config import dump_mapping, load_config, load_mapping, merge, parse_config
from learner.config.schema import Config
from learner.operate.launch import shell_assignments
from learner.rollout.server_process import free_ports
from tests.unit.scripted_server import problem, scripted_server

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "train_stage2.sh"
PROD = ROOT / "configs/stage2_two_channel/prod/default.yaml"
WARMUP = load_mapping(ROOT / "configs/demo/warmup.yaml")
# Nothing listens there.
AWAY = {
    "rollout_backend": "vllm",
    "vllm_mode": "server",
    "server_base_urls": ["http://127.0.0.1:9"],
}
GOOD: dict[str, Any] = {"rollout_backend": "hf", "vllm_mode": None, "server_base_urls": []}


def contract_of(text: str) -> Any:
    """The JSON in the assignments, after a check of its format."""
    values = dict(word.split("=", 1) for word in shlex.split(text))
    contract = values["ROLLOUT_CONTRACT_JSON"]
    assert contract.endswith("\n")
    assert contract.count("\n") == 1
    return json.loads(contract)


def with_servers(*base_urls: str, timeout_s: float = 240.0) -> Config:
    """The demo's warm-up with these servers."""
    ports = free_ports(len(base_urls))
    servers = [{"base_url": u, "group_port": p} for u, p in zip(base_urls, ports, strict=True)]
    server = {"servers": servers, "timeout_s": timeout_s}
    section = {"max_new_tokens": 16, "vllm": {"mode": "server", "server": server}}
    return parse_config({**WARMUP, "rollout_matching": section})


# --- What preflight prints --------------------------------------------------------------


@pytest.mark.req("CFG-09")
def test_launcher_preflight_uses_normalized_rollout_contract() -> None:
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        config = load_config(path)
        server = config.rollout_matching.vllm.server
        assert contract_of(shell_assignments(config)) == {
            "rollout_backend": config.rollout_matching.rollout_backend,
            "vllm_mode": config.rollout_matching.vllm.mode,
            "server_base_urls": [entry.base_url for entry in server.servers] if server else [],
        }


@pytest.mark.req("CFG-09")
def test_a_shell_evaluates_the_assignments_and_runs_no_word_of_a_value(tmp_path: Path) -> None:
    config = with_servers("http://host/'$(touch a)`touch b`;touch c\\", timeout_s=7.5)
    text = shell_assignments(config)
    echo = 'eval "$1"; printf "%s" "$ROLLOUT_SERVER_TIMEOUT_S $ROLLOUT_CONTRACT_JSON"'
    done = subprocess.run(["sh", "-uc", echo, "sh", text], capture_output=True, cwd=tmp_path)
    assert (done.returncode, done.stderr, list(tmp_path.iterdir())) == (0, b"", [])
    seconds, _, contract = done.stdout.decode().partition(" ")
    assert (seconds, json.loads(contract)) == ("7.5", contract_of(text))


def preflight(config: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "learner"
    return subprocess.run(
        [program, "preflight", "--config", config], capture_output=True, text=True, cwd=ROOT
    )


@pytest.mark.req("CFG-09")
def test_preflight_contract_format_is_strict() -> None:
    done = preflight(PROD)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == shell_assignments(load_config(PROD))


@pytest.mark.req("CFG-09")
def test_preflight_of_a_bad_config_leaves_stdout_empty(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(dump_mapping(merge(WARMUP, {"rollout_matching": {"mode": "server"}})))
    done = preflight(path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: rollout_matching.mode" in done.stderr


# --- The launcher -----------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """Exit code and errors of the script, and the words of the training that it started.

    gpus: those that the learner sees.
    """

    code: int
    stderr: str
    trained: list[str]
    gpus: str = ""


def launch(
    folder: Path, learner: str, *arguments: str, script: str | Path = SCRIPT, **environment: str
) -> Launch:
    """Run the script with this `learner preflight` (shell text) first on the PATH."""
    bin_folder, log = folder / "bin", folder / "trained"
    bin_folder.mkdir()
    log.touch()
    note = f'printf "%s\\n" "${{CUDA_VISIBLE_DEVICES-}}" "$@" > {shlex.quote(str(log))}'
    fakes = {
        "learner": f'if [ "$1" = preflight ]; then\n{learner}\nelse\n{note}\nfi',
        "python3": f'[ "$1" != - ] || exec {shlex.quote(sys.executable)} -\n{note}',
    }
    for name, text in fakes.items():
        (bin_folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin_folder / name).chmod(0o755)
    path = f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [script, *(arguments or ["run.yaml"])],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PATH": path, **environment},
        timeout=60,
    )
    gpus, *trained = log.read_text().split("\n")[:-1] or [""]
    return Launch(done.returncode, done.stderr, trained, gpus)


def printing(text: str) -> str:
    """A `learner preflight` that prints this."""
    return f"printf %s {shlex.quote(text)}"


def assigning(contract: str) -> str:
    return printing(f"ROLLOUT_CONTRACT_JSON={shlex.quote(contract)}\n")


def good(**changed: Any) -> str:
    return json.dumps({**GOOD, **changed})


@pytest.mark.req("CFG-09")
@pytest.mark.parametrize(
    ("learner", "message"),
    [
        ("echo oh no >&2; exit 2", "learner preflight failed"),
        (printing("ROLLOUT_CONTRACT_JSON='{\n"), "shell assignments"),
        (assigning(good()), "newline"),
        (assigning("{]\n"), "not JSON"),
        (assigning('{"vllm_mode": null, "server_base_urls": []}\n'), "no rollout_backend"),
        (assigning(good(server_base_urls=[1]) + "\n"), "not a list of strings"),
        (assigning(good(rollout_backend="vllm", vllm_mode="server") + "\n"), "is empty"),
        (assigning(good(vllm_mode="colocate") + "\n"), "'hf' with vllm_mode 'colocate'"),
        (
            assigning(good(**AWAY) + "\n") + "; echo ROLLOUT_SERVER_TIMEOUT_S=nan",
            "ROLLOUT_SERVER_TIMEOUT_S is 'nan', not a finite positive number",
        ),
    ],
)
def test_launcher_preflight_fails_on_invalid_normalization_json_contract(
    tmp_path: Path, learner: str, message: str
) -> None:
    done = launch(tmp_path, learner)
    assert done.code != 0
    assert message in done.stderr
    assert "training is not started" in done.stderr
    assert done.trained == []


TRAIN = ["learner", "train", "--config", "a b.yaml"]
SERVED = assigning(good(**AWAY | {"server_base_urls": ["http://a:1", "http://b:2"]}) + "\n")


@pytest.mark.req("CFG-09", "DEP-02")
@pytest.mark.parametrize(
    ("options", "environment", "gpus", "started"),
    [
        (["--train-gpus", "2"], {}, "2", TRAIN[1:]),
        (["--train-gpus", "2,3"], {}, "2,3", ["2"]),
        ([], {"TRAIN_GPUS": "2,3", "NPROC": "2"}, "2,3", ["2"]),
        (["--nproc", "3"], {}, "", ["3"]),
    ],
)
def test_beside_servers_that_are_up_the_learner_is_started_on_its_gpus(
    tmp_path: Path, options: list[str], environment: dict[str, str], gpus: str, started: list[str]
) -> None:
    contract = assigning(good(more="keys are allowed") + "\n")
    done = launch(tmp_path, contract, *options, "a b.yaml", **environment)
    if len(started) == 1:
        run = ["-m", "learner.operate.torchrun", "-", "--standalone", "--nproc-per-node"]
        started = [*run, *started, "--", *TRAIN]
    assert done == Launch(0, "", started, gpus)


@pytest.mark.slow
@pytest.mark.req("DEP-02")
def test_the_exit_code_of_several_processes_is_that_of_the_learner(tmp_path: Path) -> None:
    """torchrun is the real one. Rank 0 ends together with its peer."""
    preflight = f'[ "$1" != preflight ] || exec {assigning(good() + chr(10))}'
    program = tmp_path / "learner"
    program.write_text(f'#!/bin/sh\n{preflight}\n[ "$RANK" = 0 ] || exit 2\nexec sleep 600\n')
    program.chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [SCRIPT, "--nproc", "2", "run.yaml"],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
        timeout=240,
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.req("DEP-02")
@pytest.mark.parametrize(
    ("options", "environment"),
    [
        (["--server-gpus", "0,1", "--train-gpus", "3", "--server-gpus", "2"], {}),
        ([], {"SERVER_GPUS": "0,1 2", "TRAIN_GPUS": "3"}),
    ],
)
def test_with_gpus_for_servers_it_hands_over_to_learner_launch(
    tmp_path: Path, options: list[str], environment: dict[str, str]
) -> None:
    """No server is waited for: none listens at these addresses."""
    done = launch(tmp_path, SERVED, *options, "a.yaml", **environment)
    split = ["--server-gpus=0,1", "--server-gpus=2", "--train-gpus", "3"]
    assert done == Launch(0, "", ["launch", "--config", "a.yaml", *split])


@pytest.mark.req("DEP-02")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--train-gpus 2 --nproc 2", "--nproc is '2', and --train-gpus 2 are 1 GPUs"),
        ("--train-gpus 0;1", "is '0;1', not a list"),
        ("--nproc 0", "is '0', not a number"),
    ],
)
def test_processes_must_fit_their_gpus(tmp_path: Path, options: str, message: str) -> None:
    done = launch(tmp_path, SERVED, *options.split(), "a.yaml")
    assert (done.code, done.trained) == (2, [])
    assert message in done.stderr


def real_preflight(folder: Path, config: Config) -> str:
    """The real `learner preflight` of a config."""
    path = folder / "run.yaml"
    path.write_text(dump_mapping(config.model_dump()))
    real = Path(sys.executable).parent / "learner"
    return f"exec {shlex.quote(str(real))} preflight --config {shlex.quote(str(path))}"


@pytest.mark.req("CFG-09", "SYNC-05")
@pytest.mark.parametrize(
    ("kind", "starts"), [(None, True), ("not-ready", False), ("push-needed", True)], ids=str
)
def test_training_starts_once_every_server_is_healthy_or_needs_a_push(
    tmp_path: Path, kind: str | None, starts: bool
) -> None:
    with scripted_server() as one, scripted_server() as other:
        if kind is not None:
            answer = problem(kind, "not urn:rollmatch:push-needed", "replicas")
            other.routes["GET /health/"] = lambda _: answer
        config = with_servers(one.base_url, other.base_url, timeout_s=0.5 if kind else 60)
        done = launch(tmp_path, real_preflight(tmp_path, config), http_proxy="http://127.0.0.1:9")
        assert one.bodies("GET /health/") == [None]
    if starts:
        assert (done.code, done.trained) == (0, ["train", "--config", "run.yaml"])
    else:
        assert (done.code, done.trained) == (1, [])
        assert f"{other.base_url}/health/ gives no good answer (503" in done.stderr
        assert "not urn:rollmatch:push-needed" in done.stderr
        assert done.stderr.count(f"waiting for {other.base_url}\n") == 1
