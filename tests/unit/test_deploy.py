"""The files of deploy/ without an engine: what a deployment relies on. `make lint` lints them."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from learner.cli import app as learner_app
from learner.config import load_config
from rollout_server.cli import app as server_app
from rollout_server.serve import ANSWERS_S
from rollout_server.settings.options import load_settings
from shared_contracts.cli import BAD_INPUT
from shared_contracts.errors import Problem
from tests.unit.fleets import wait_until
from tests.unit.scripted_server import HangUp, Reply, problem, scripted_server

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "docker-compose.yaml"
KUBERNETES = DEPLOY / "kubernetes.yaml"
SYSTEMD = DEPLOY / "systemd"
SBATCH = DEPLOY / "slurm" / "train.sbatch"
PROD = ROOT / "configs/stage2_two_channel/prod/default.yaml"
SERVER_UNIT = SYSTEMD / "rollout-server.service"
LEARNER_UNIT = SYSTEMD / "rollmatch-learner.service"
EXAMPLES = sorted((DEPLOY / "config").glob("*.yaml"))

pytestmark = pytest.mark.req("DEP-01")

PROGRAMS = {"rollout-server": server_app, "learner": learner_app}


def parsed(words: list[str]) -> dict[str, Any]:
    """The options of a command line, parsed by the program itself. Raises its usage errors."""
    command: Any = typer.main.get_command(PROGRAMS[Path(words[0]).name])
    rest = words[1:]
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    params: dict[str, Any] = command.make_context(words[0], rest).params
    return params


# --- Containers ---------------------------------------------------------------------------


def container(name: str) -> dict[str, Any]:
    """A service of the compose file; its variables are not replaced."""
    service: dict[str, Any] = yaml.safe_load(COMPOSE.read_text("utf-8"))["services"][name]
    return service


def test_the_containers_for_gpus_have_gpus_of_their_own_and_the_server_has_time_to_stop() -> None:
    """`tests/containers` runs those for the CPU."""
    server, learner = container("server"), container("learner")
    reserved = [
        each["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for each in (server, learner)
    ]
    assert reserved == [["0", "1", "2"], ["3"]]
    options = parsed(server["command"])
    assert options["gpus"] == [0, 1, 2]
    stop_s = int(server["stop_grace_period"].removesuffix("s"))
    assert stop_s >= options["grace_seconds"] + ANSWERS_S + 10
    assert learner["depends_on"] == {"server": {"condition": "service_healthy"}}
    token = learner["environment"]["ROLLOUT_SERVER_TOKEN_FILE"]
    assert token == str(options["token_file"]) == f"/run/secrets/{server['secrets'][0]}"
    for each in (server, learner):
        assert (each["cap_drop"], each["read_only"]) == (["ALL"], True)
        assert "no-new-privileges:true" in each["security_opt"]
        assert "user" in each
    assert all(port.startswith("127.0.0.1:") for port in server["ports"])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", ["server", "server-cpu"])
def test_example_yaml_reaches_and_configures_the_server(name: str, example: Path) -> None:
    service = container(name)
    options = parsed(service["command"])
    config = load_config(example)
    assert config.training.resume == "auto", "a restarted container continues the run"
    assert config.rollout_matching.vllm.server is not None
    (address,) = config.rollout_matching.vllm.server.servers
    assert address.base_url == f"http://server:{options['port']}"
    assert str(address.group_port) in service["expose"]
    given = {key: options[key] for key in ("device", "grace_seconds", "gpus")}
    settings = load_settings(None, given | {"model": "/data/model"}, example, {})
    assert settings.max_num_seqs == config.rollout_matching.decode_batch_size


# --- Kubernetes ---------------------------------------------------------------------------


def test_the_pods_of_the_manifest_start_as_the_containers_and_share_a_token() -> None:
    _, service, deployment, job = yaml.safe_load_all(KUBERNETES.read_text("utf-8"))
    server, learner = (each["spec"]["template"]["spec"] for each in (deployment, job))
    (serve,), (train,) = server["containers"], learner["containers"]
    options, composed = parsed(serve["args"]), parsed(container("server")["command"])
    same = ("gpus", "host", "port", "grace_seconds", "log_format")
    assert {key: options[key] for key in same} == {key: composed[key] for key in same}
    assert server["terminationGracePeriodSeconds"] >= options["grace_seconds"] + ANSWERS_S + 10
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert [variable["value"] for variable in train["env"]] == [str(options["token_file"])]
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [BAD_INPUT])
    for pod, each in ((server, serve), (learner, train)):
        assert pod["securityContext"]["runAsNonRoot"]
        assert not each["securityContext"]["allowPrivilegeEscalation"]
        assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}


# --- The health check ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "code", "message"),
    [
        pytest.param(None, 0, "", id="ready"),
        pytest.param(problem("push-needed", "push", "replica 0"), 0, "", id="push-needed"),
        pytest.param(problem("not-ready", "it starts", "replica 0"), 1, "it starts", id="starting"),
        pytest.param(
            (500, Problem.of("internal", "urn:rollmatch:push-needed", "GET /health/")),
            1,
            "500",
            id="another problem that quotes push-needed",
        ),
        pytest.param(HangUp(), 1, "", id="closed connection"),
    ],
)
def test_the_health_check_accepts_a_server_that_is_ready_or_lacks_only_a_push(
    reply: Reply, code: int, message: str
) -> None:
    with scripted_server() as server:
        if reply is not None:
            server.routes["GET /health/"] = lambda _: reply
        program = [sys.executable, str(DEPLOY / "server_healthy.py"), server.base_url]
        done = subprocess.run(program, capture_output=True, text=True)
        assert server.authorizations == [None]
    assert done.returncode == code
    assert message in done.stderr


# --- systemd ------------------------------------------------------------------------------


def settings_of(unit: Path) -> dict[str, list[str]]:
    """Return the values of each key of a unit, in order. Continued lines are joined."""
    lines = unit.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    pairs = [line.split("=", 1) for line in lines if re.match(r"[A-Za-z]+=", line)]
    return {key: [value for k, value in pairs if k == key] for key, _ in pairs}


def start_words(unit: Path) -> list[str]:
    """ExecStart with the variables of run.env and systemd's %d filled in."""
    (line,) = settings_of(unit)["ExecStart"]
    text = (SYSTEMD / "run.env").read_text(encoding="utf-8")
    values = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    filled = re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], line)
    return shlex.split(filled.replace("%d", "/run/credentials"))


@pytest.mark.req("RES-29")
def test_the_units_start_a_server_and_a_learner_on_different_gpus() -> None:
    server = parsed(start_words(SERVER_UNIT))
    script, option, gpus, config = start_words(LEARNER_UNIT)
    assert (option, config) == ("--train-gpus", str(server["run_config"]))
    assert ROOT / script.removeprefix("/opt/rollmatch/") == DEPLOY / "train_stage2.sh"
    assert not set(map(str, server["gpus"])) & set(gpus.split(","))
    assert str(server["token_file"]) == "/run/credentials/rollout_server_token"
    environment = settings_of(LEARNER_UNIT)["Environment"]
    assert "ROLLOUT_SERVER_TOKEN_FILE=%d/rollout_server_token" in environment
    for unit in map(settings_of, (SERVER_UNIT, LEARNER_UNIT)):
        assert unit["RestartPreventExitStatus"] == [str(BAD_INPUT)]
        assert unit["User"] == ["rollmatch"]
    stop_s = int(settings_of(SERVER_UNIT)["TimeoutStopSec"][0].removesuffix("s"))
    assert stop_s >= server["grace_seconds"] + ANSWERS_S + 10
    environment_file = (SYSTEMD / "run.env").read_text(encoding="utf-8")
    assert "\nSERVER_GPUS=" not in environment_file, "the learner would start servers itself"


@pytest.mark.skipif(
    "CI" not in os.environ and shutil.which("systemd-analyze") is None,
    reason="systemd-analyze is not there (Debian: apt-get install systemd)",
)
def test_systemd_verifies_both_units(tmp_path: Path) -> None:
    """The root folder has the targets and programs that the units name."""
    units = tmp_path / "etc/systemd/system"
    units.mkdir(parents=True)
    for target in ("basic", "multi-user", "network-online", "shutdown", "sysinit", "umount"):
        (units / f"{target}.target").write_text("[Unit]\nDescription=stub\n")
    for name in (".venv/bin/rollout-server", "deploy/train_stage2.sh"):
        program = tmp_path / "opt/rollmatch" / name
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    for unit in (SERVER_UNIT, LEARNER_UNIT):
        shutil.copy(unit, units)
    command = ["systemd-analyze", "verify", "--man=no", f"--root={tmp_path}"]
    command += [SERVER_UNIT.name, LEARNER_UNIT.name]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout + done.stderr == ""


# --- Slurm: the job with substitutes for Slurm's commands and both programs ---------------

SUBSTITUTES = {
    "srun": """
echo "srun $*" >>"$JOB/log"
echo $$ >>"$JOB/tasks"
while [[ $1 == --* ]]; do shift; done
SLURM_PROCID=0 exec "$@"
""",
    # Signals the tasks of all steps; some of them may have ended.
    "scancel": """
for task in $(<"$JOB/tasks"); do kill -TERM "$task" 2>/dev/null; done
""",
    "scontrol": """
if [[ $1 == show ]]; then printf 'node%s\\n' 1 2 3; else echo "scontrol $*" >>"$JOB/log"; fi
""",
    "rollout-server": """
echo "rollout-server $*" >>"$JOB/log"
trap 'echo "server stopped" >>"$JOB/log"; exit 0' TERM
[[ ${SERVER_FAILS-} ]] && exit 1
touch "$JOB/healthy"
while true; do sleep 0.1; [[ -e ${SERVER_DIES:-/nowhere} ]] && exit 1; done
""",
    "python3": f"""
[[ $1 == -m ]] || exec {sys.executable} "$@"
[[ "$2 $3" == "learner.operate.torchrun -" ]] || exit 9
shift 3
"""
    + """
trap 'echo "learner stopped" >>"$JOB/log"; exit 143' TERM
echo "torchrun $*" >>"$JOB/log"
cp -p "$ROLLOUT_SERVER_TOKEN_FILE" "$JOB/token"; cp "${@: -1}" "$JOB/yaml"
echo "umask $(umask), folder $(stat -c %a "$(dirname "${@: -1}")")" >>"$JOB/log"
while [[ ${LEARNER_STAYS-} ]]; do sleep 0.1; done
exit "${LEARNER_EXIT:-0}"
""",
}


@dataclass
class Job:
    """A job on three nodes, in its own folder, with what the substitutes write there."""

    folder: Path
    process: "subprocess.Popen[str]"

    @property
    def log(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text(encoding="utf-8").splitlines() if log.exists() else []

    def logged(self, program: str) -> list[str]:
        """The words of the one call of `program`."""
        (line,) = (line for line in self.log if line.startswith(f"{program} "))
        return line.split()

    def end(self) -> tuple[int, str]:
        """Exit code and standard error of a job that left nothing behind."""
        _, err = self.process.communicate(timeout=120)
        assert list(self.folder.glob(".rollmatch-*")) == []
        return self.process.returncode, err


Submit = Callable[..., Job]


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Submit]:
    bin_folder = tmp_path / "checkout" / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    for name, body in SUBSTITUTES.items():
        (bin_folder / name).write_text(f"#!/usr/bin/env bash\n{body.lstrip()}")
        (bin_folder / name).chmod(0o755)
    (bin_folder / "learner").symlink_to(Path(sys.executable).parent / "learner")
    health = tmp_path / "checkout" / "deploy" / "server_healthy.py"
    health.parent.mkdir()
    health.write_text("import os, sys; sys.exit('healthy' not in os.listdir(os.environ['JOB']))\n")
    jobs: list[Job] = []

    def start(**environment: str) -> Job:
        given = {
            "ROLLMATCH": str(tmp_path / "checkout"),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node[1-3]",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_GPUS_ON_NODE": "8",
            "CHECKPOINT": "/data/model",
            "IMAGES": "/data/images",
            "JOB": str(tmp_path),
        }
        process = subprocess.Popen(
            ["bash", SBATCH, environment.pop("YAML", PROD)],
            env={**os.environ, **given, **environment},
            cwd=tmp_path,
            umask=0o022,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        jobs.append(Job(tmp_path, process))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.process.terminate()
            job.process.wait(timeout=60)


@pytest.mark.slow
def test_a_job_starts_servers_and_a_learner_and_stops_the_servers_at_its_end(
    submit: Submit, tmp_path: Path
) -> None:
    job = submit(SERVER_NODES="2")
    assert job.end() == (0, "")
    assert "server stopped" in job.log
    serve, learn = (line for line in job.log if line.startswith("srun"))
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=node1,node2" in serve
    assert "--nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist=node3" in learn
    torchrun = job.logged("torchrun")
    at = torchrun.index("--")
    assert " ".join(torchrun[1:at]) == (
        "--node-rank 0 --nnodes 1 --nproc-per-node 8 --master-addr node3 --master-port 29500"
    )
    options = parsed(job.logged("rollout-server"))
    assert (options["gpus"], options["host"]) == (list(range(8)), "0.0.0.0")
    assert options["run_config"] == parsed(torchrun[at + 1 :])["config"]
    # The token is in a file of the user alone, and the umask of the run is unchanged.
    token = tmp_path / "token"
    assert len(token.read_text()) == 64
    assert token.read_text() not in "\n".join(job.log)
    assert token.stat().st_mode & 0o777 == 0o600
    assert "umask 0022, folder 700" in job.log
    # The YAML names the nodes of the job, and a requeued job continues.
    config, given = load_config(tmp_path / "yaml"), load_config(PROD)
    assert config.rollout_matching.vllm.server is not None
    servers = config.rollout_matching.vllm.server.servers
    assert [(server.base_url, server.group_port) for server in servers] == [
        ("http://node1:8000", 51216),
        ("http://node2:8000", 51216),
    ]
    assert config.training.resume == "auto"
    assert config.stage2_ab == given.stage2_ab


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "code"),
    [(signal.SIGUSR1, 0), (signal.SIGTERM, 143), (None, 1)],
    ids=["time is up", "cancelled", "servers end"],
)
def test_an_event_during_training_stops_both_and_only_the_end_of_the_time_requeues_the_job(
    submit: Submit, tmp_path: Path, event: signal.Signals | None, code: int
) -> None:
    job = submit(LEARNER_STAYS="1", SERVER_DIES=str(tmp_path / "die"), SLURM_GPUS_ON_NODE="")
    wait_until(lambda: any(line.startswith("umask") for line in job.log))
    if event is None:
        (tmp_path / "die").touch()
    else:
        job.process.send_signal(event)
    found, err = job.end()
    assert found == code
    assert parsed(job.logged("rollout-server"))["device"] == "cpu"
    assert "learner stopped" in job.log
    assert ("servers ended before the learner" in err) == (event is None)
    assert ("server stopped" in job.log) == (event is not None)
    assert (job.log[-1] == "scontrol requeue 7") == (event == signal.SIGUSR1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "code", "message", "log"),
    [
        ({"SERVER_NODES": "3"}, 2, "SERVER_NODES is 3 of 3 nodes", set()),
        ({"CHECKPOINT": ""}, 1, "CHECKPOINT", set()),
        ({"YAML": "gone.yaml"}, 2, "the YAML has faults", set()),
        ({"SERVER_FAILS": "1"}, 1, "the servers did not start", {"srun", "rollout-server"}),
        ({"LEARNER_EXIT": "3"}, 3, "", {"srun", "rollout-server", "torchrun", "umask", "server"}),
    ],
    ids=["nodes", "no checkpoint", "no YAML", "servers fail", "learner fails"],
)
def test_a_job_ends_with_the_code_of_what_failed(
    submit: Submit, environment: dict[str, str], code: int, message: str, log: set[str]
) -> None:
    job = submit(**environment)
    found, err = job.end()
    assert (found, message in err) == (code, True)
    assert {line.split()[0] for line in job.log} == log
