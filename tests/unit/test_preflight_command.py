"""`learner preflight` and the launcher that lives on what it prints (CFG-09)."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.config import dump_mapping, load_config, load_mapping, merge, parse_config
from learner.config.schema import Config
from learner.operate.launch_plan import rollout_contract, shell_assignments
from shared_contracts.rollout_config import ROUTES
from tests.unit.scripted_server import problem, scripted_server

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "train_stage2.sh"
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
PROD = ROOT / "configs/stage2_two_channel/prod/default.yaml"
WARMUP = load_mapping(ROOT / "configs/demo/warmup.yaml")
# Nothing listens there.
AWAY = {
    "rollout_backend": "vllm",
    "vllm_mode": "server",
    "server_base_urls": ["http://127.0.0.1:9"],
}
GOOD: dict[str, Any] = {"rollout_backend": "hf", "vllm_mode": None, "server_base_urls": []}


def shell_values(text: str, folder: Path) -> dict[str, str]:
    """What a POSIX shell has in its variables after evaluating `text`."""
    names = [word.partition("=")[0] for word in shlex.split(text)]
    echo = "".join(f'printf "%s\\0" "${name}"; ' for name in names)
    done = subprocess.run(
        ["sh", "-uc", f'eval "$1"; {echo}', "sh", text], capture_output=True, text=True, cwd=folder
    )
    assert (done.returncode, done.stderr, list(folder.iterdir())) == (0, "", [])
    return dict(zip(names, done.stdout.split("\0"), strict=False))


def contract_of(text: str) -> Any:
    """The JSON in the assignments, held against its format."""
    values = dict(word.split("=", 1) for word in shlex.split(text))
    contract = values["ROLLOUT_CONTRACT_JSON"]
    assert contract.endswith("\n")
    assert contract.count("\n") == 1
    return json.loads(contract)


def with_rollout(**keys: Any) -> Config:
    """The demo's warm-up with keys of `rollout_matching` in place of its own."""
    section = {"max_new_tokens": 16, **keys}
    return parse_config({**WARMUP, "rollout_matching": section})


def with_servers(*base_urls: str, timeout_s: float = 240.0) -> Config:
    servers = [{"base_url": url, "group_port": 51216 + i} for i, url in enumerate(base_urls)]
    server = {"servers": servers, "timeout_s": timeout_s}
    return with_rollout(vllm={"mode": "server", "server": server})


# --- What preflight prints --------------------------------------------------------------


@pytest.mark.req("CFG-09")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_launcher_preflight_uses_normalized_rollout_contract(path: Path) -> None:
    config = load_config(path)
    contract = contract_of(shell_assignments(config))
    server = config.rollout_matching.vllm.server
    assert contract == {
        "rollout_backend": config.rollout_matching.rollout_backend,
        "vllm_mode": config.rollout_matching.vllm.mode,
        "server_base_urls": [entry.base_url for entry in server.servers] if server else [],
    }


@pytest.mark.req("CFG-09")
@pytest.mark.parametrize(
    ("config", "contract"),
    [
        (
            with_servers("http://b:1", "http://a:2"),
            ("vllm", "server", ["http://b:1", "http://a:2"]),
        ),
        (with_rollout(rollout_backend="hf"), ("hf", None, [])),
        (with_rollout(vllm={"mode": "colocate"}), ("vllm", "colocate", [])),
    ],
    ids=["servers in their order", "no vLLM: no mode", "colocated: no server to wait for"],
)
def test_the_contract_names_the_backend_its_mode_and_its_servers(
    config: Config, contract: tuple[str, str | None, list[str]]
) -> None:
    keys = ("rollout_backend", "vllm_mode", "server_base_urls")
    assert rollout_contract(config) == dict(zip(keys, contract, strict=True))


@pytest.mark.req("CFG-09")
def test_a_shell_gets_the_values_whole_and_runs_none_of_them(tmp_path: Path) -> None:
    config = with_servers("http://host/'$(touch a)`touch b`;touch c\\", timeout_s=7.5)
    values = shell_values(shell_assignments(config), tmp_path)
    assert values["ROLLOUT_SERVER_TIMEOUT_S"] == "7.5"
    contract = values["ROLLOUT_CONTRACT_JSON"]
    assert contract.endswith("]}\n")
    assert json.loads(contract) == rollout_contract(config)


PATHS = st.text(st.characters(exclude_characters="?#[]/\\", exclude_categories=("C", "Z")))


@given(PATHS.filter(lambda path: path not in ROUTES))
def test_any_address_comes_through_the_assignments_whole(path: str) -> None:
    config = with_servers(f"http://host/{path}")
    assert contract_of(shell_assignments(config)) == rollout_contract(config)


# --- The command ------------------------------------------------------------------------


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
    """What the script did: its exit code, its errors, what it started as training.

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


def test_the_launcher_is_a_program_that_shellcheck_has_nothing_to_say_about() -> None:
    assert os.access(SCRIPT, os.X_OK)
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.req("CFG-09")
def test_a_good_contract_starts_training_with_the_config(tmp_path: Path) -> None:
    done = launch(tmp_path, assigning(good(more="keys are allowed") + "\n"), "a b.yaml")
    assert done == Launch(0, "", ["train", "--config", "a b.yaml"])


@pytest.mark.req("CFG-09")
@pytest.mark.parametrize(
    ("learner", "told"),
    [
        ("echo oh no >&2; exit 2", "learner preflight failed"),
        ("exit 0", "ROLLOUT_CONTRACT_JSON"),
        (printing("OTHER=1\n"), "ROLLOUT_CONTRACT_JSON"),
        (printing("ROLLOUT_CONTRACT_JSON='{\n"), "shell assignments"),
        (assigning(good()), "newline"),
        (assigning(good().replace(", ", ",\n", 1)), "newline"),
        (assigning(good() + "\n\n"), "one line"),
        (assigning(good().replace(", ", ",\n", 1) + "\n"), "one line"),
        (assigning("{]\n"), "not JSON"),
        (assigning("[1]\n"), "not a JSON object"),
        (assigning('{"vllm_mode": null, "server_base_urls": []}\n'), "no rollout_backend"),
        (assigning('{"rollout_backend": "hf", "server_base_urls": []}\n'), "no vllm_mode"),
        (assigning('{"rollout_backend": "hf", "vllm_mode": null}\n'), "no server_base_urls"),
        (assigning(good(rollout_backend=None) + "\n"), "rollout_backend is None"),
        (assigning(good(vllm_mode=1) + "\n"), "vllm_mode is 1"),
        (assigning(good(server_base_urls="http://a:1") + "\n"), "not a list of strings"),
        (assigning(good(server_base_urls=[1]) + "\n"), "not a list of strings"),
        (assigning(good(rollout_backend="vllm", vllm_mode="server") + "\n"), "is empty"),
        (assigning(good(rollout_backend="vllm") + "\n"), "'vllm' with vllm_mode None"),
        (assigning(good(vllm_mode="colocate") + "\n"), "'hf' with vllm_mode 'colocate'"),
        (assigning(good(rollout_backend="a", vllm_mode="b") + "\n"), "'a' with vllm_mode 'b'"),
        (assigning(good(**AWAY) + "\n"), "ROLLOUT_SERVER_TIMEOUT_S is ''"),
        *(
            (
                printing(
                    f"ROLLOUT_CONTRACT_JSON={shlex.quote(good(**AWAY) + chr(10))}\n"
                    f"ROLLOUT_SERVER_TIMEOUT_S={seconds}\n"
                ),
                f"ROLLOUT_SERVER_TIMEOUT_S is '{seconds}', not a finite positive number",
            )
            for seconds in ("nan", "inf", "0", "-1", "soon")
        ),
    ],
)
def test_launcher_preflight_fails_on_invalid_normalization_json_contract(
    tmp_path: Path, learner: str, told: str
) -> None:
    done = launch(tmp_path, learner)
    assert done.code != 0
    assert told in done.stderr
    assert "training is not started" in done.stderr
    assert done.trained == []


def test_a_contract_in_the_environment_is_not_taken_for_the_configs(tmp_path: Path) -> None:
    done = launch(tmp_path, "exit 0", ROLLOUT_CONTRACT_JSON=good() + "\n")
    assert (done.code != 0, done.trained) == (True, [])


def test_the_launcher_wants_one_config(tmp_path: Path) -> None:
    done = launch(tmp_path, assigning(good() + "\n"), "a.yaml", "b.yaml")
    assert (done.code, done.trained) == (2, [])
    assert "usage:" in done.stderr


TRAIN = ["learner", "train", "--config", "a.yaml"]
SERVED = assigning(good(**AWAY | {"server_base_urls": ["http://a:1", "http://b:2"]}) + "\n")


@pytest.mark.req("DEP-02")
@pytest.mark.parametrize(
    ("options", "environment", "gpus", "started"),
    [
        (["--train-gpus", "2"], {}, "2", TRAIN[1:]),
        ([], {"TRAIN_GPUS": "2"}, "2", TRAIN[1:]),
        (["--train-gpus", "2,3"], {}, "2,3", ["2"]),
        ([], {"TRAIN_GPUS": "2,3", "NPROC": "2"}, "2,3", ["2"]),
        (["--train-gpus", "1"], {"TRAIN_GPUS": "2,3"}, "1", TRAIN[1:]),
        (["--nproc", "3"], {}, "", ["3"]),
        ([], {"NPROC": "3"}, "", ["3"]),
    ],
)
def test_beside_servers_that_are_up_the_learner_is_started_on_its_gpus(
    tmp_path: Path, options: list[str], environment: dict[str, str], gpus: str, started: list[str]
) -> None:
    done = launch(tmp_path, assigning(good() + "\n"), *options, "a.yaml", **environment)
    if len(started) == 1:
        run = ["-m", "learner.operate.torchrun", "-", "--standalone", "--nproc-per-node"]
        started = [*run, *started, "--", *TRAIN]
    assert done == Launch(0, "", started, gpus)


@pytest.mark.slow
@pytest.mark.req("DEP-02")
def test_of_several_processes_the_exit_code_is_the_learners(tmp_path: Path) -> None:
    """By the real torchrun: whoever starts a service again has to know bad input."""
    preflight = f'[ "$1" != preflight ] || exec {assigning(good() + chr(10))}'
    (tmp_path / "learner").write_text(
        f'#!/bin/sh\n{preflight}\n[ "$RANK" = 0 ] || exit 2\nsleep 60\n'
    )
    (tmp_path / "learner").chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [SCRIPT, "--nproc", "2", "run.yaml"],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.req("DEP-02")
@pytest.mark.parametrize(
    ("options", "environment"),
    [
        (["--server-gpus", "0,1", "--train-gpus", "3", "--server-gpus", "2"], {}),
        ([], {"SERVER_GPUS": "0,1 2", "TRAIN_GPUS": "3"}),
        (["--train-gpus", "3"], {"SERVER_GPUS": " 0,1   2 ", "NPROC": "1"}),
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
    ("learner", "options", "code", "told"),
    [
        (SERVED, "--server-gpus 0 --server-gpus 1", 2, "without --train-gpus"),
        (SERVED, "--server-gpus 0,2 --server-gpus 1 --train-gpus 2,3", 2, "GPU 2 is named more"),
        (SERVED, "--server-gpus 0,0 --server-gpus 1 --train-gpus 2", 2, "GPU 0 is named more"),
        (SERVED, "--server-gpus 0;1 --train-gpus 2", 2, "is '0;1', not a list"),
        (SERVED, "--server-gpus 0,1 --train-gpus 2", 1, "1 times, and server_base_urls has 2"),
        (SERVED, "--train-gpus a", 2, "is 'a', not a list"),
        (SERVED, "--train-gpus 2 --nproc 2", 2, "--nproc is '2', and --train-gpus 2 are 1 GPUs"),
        (SERVED, "--nproc 0", 2, "--nproc is '0'"),
        (SERVED, "--nproc two", 2, "--nproc is 'two'"),
        (SERVED, "--unknown", 2, "usage:"),
        (assigning(good() + "\n"), "--server-gpus 0 --train-gpus 1", 1, "hf with vllm_mode None"),
        ("echo no >&2; exit 2", "--server-gpus 0 --train-gpus 1", 2, "preflight failed"),
    ],
)
def test_a_split_that_cannot_be_starts_nothing(
    tmp_path: Path, learner: str, options: str, code: int, told: str
) -> None:
    done = launch(tmp_path, learner, *options.split(), "a.yaml")
    assert (done.code, done.trained) == (code, [])
    assert told in done.stderr


def real_preflight(folder: Path, config: Config) -> str:
    """The real `learner preflight` of a config."""
    path = folder / "run.yaml"
    path.write_text(dump_mapping(config.model_dump()))
    real = Path(sys.executable).parent / "learner"
    return f"exec {shlex.quote(str(real))} preflight --config {shlex.quote(str(path))}"


@pytest.mark.req("CFG-09")
def test_training_starts_once_every_server_is_healthy(tmp_path: Path) -> None:
    with scripted_server() as one, scripted_server() as other:
        config = with_servers(one.base_url, other.base_url, timeout_s=20)
        done = launch(tmp_path, real_preflight(tmp_path, config), http_proxy="http://127.0.0.1:9")
        assert done == Launch(0, "", ["train", "--config", "run.yaml"])
        assert [server.bodies("GET /health/") for server in (one, other)] == [[None]] * 2


@pytest.mark.req("CFG-09")
def test_a_server_that_is_not_healthy_in_time_stops_the_launch(tmp_path: Path) -> None:
    with scripted_server() as one, scripted_server() as other:
        other.routes["GET /health/"] = lambda _: problem("not-ready", "starting", "replicas")
        config = with_servers(one.base_url, other.base_url, timeout_s=1.2)
        done = launch(tmp_path, real_preflight(tmp_path, config))
    assert done.code != 0
    assert f"{other.base_url}/health/" in done.stderr
    assert "starting" in done.stderr
    assert done.stderr.count(f"waiting for {other.base_url}\n") == 1
    assert done.trained == []


@pytest.mark.req("SYNC-05")
def test_a_problem_that_only_speaks_of_a_push_is_one(tmp_path: Path) -> None:
    other = problem("not-ready", "not urn:rollmatch:push-needed", "replicas")
    with scripted_server() as server:
        server.routes["GET /health/"] = lambda _: other
        config = with_servers(server.base_url, timeout_s=0.5)
        done = launch(tmp_path, real_preflight(tmp_path, config))
    assert (done.code, done.trained) == (1, [])
    assert "gives no good answer (503" in done.stderr


@pytest.mark.req("CFG-09")
def test_the_launcher_is_found_by_a_link_and_needs_its_health_check(tmp_path: Path) -> None:
    contract = assigning(good() + "\n")
    (tmp_path / "link").symlink_to(SCRIPT)
    copy = tmp_path / "copy"
    copy.write_bytes(SCRIPT.read_bytes())
    copy.chmod(0o755)
    for program in (tmp_path / "link", copy):
        (tmp_path / f"of-{program.name}").mkdir()
    assert launch(tmp_path / "of-link", contract, script=tmp_path / "link").trained
    done = launch(tmp_path / "of-copy", contract, script=copy)
    assert (done.code, done.trained) == (2, [])
    assert f"there is no server_healthy.py in {tmp_path}" in done.stderr


@pytest.mark.req("SYNC-05")
def test_a_server_that_waits_for_weights_is_there(tmp_path: Path) -> None:
    with scripted_server() as server:
        server.routes["GET /health/"] = lambda _: problem("weights-poisoned", "push", "weights")
        config = with_servers(server.base_url, timeout_s=0.5)
        done = launch(tmp_path, real_preflight(tmp_path, config))
    assert (done.code, done.trained[:1]) == (0, ["train"])
